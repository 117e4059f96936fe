"""A recipe as torchtitan's advantage estimator: ``Rollouter.Config(advantage=RecipeEstimator.Config())``.

pytorch/torchtitan, torchtitan/experiments/rl/rollout/advantage.py and rollouter.py, at b5bcd76c66
(2026-08-21).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable

from headrace.transforms import Status

from .environment import decide_here, recipe_of_environment, scale_here

recipe_of_environment("as/tinker")  # an unknown recipe raises here
LIKE_TORCHTITAN = ("pipeline.stages.advantage.ddof=0", "pipeline.stages.advantage.eps=1e-6")


class RecipeEstimator(Configurable):
    """Estimate the advantages of one group. All its rollouts are there, including failed ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """The option of torchtitan's own estimator. The environment names the recipe."""

        should_std_normalize: bool = False

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, group: Any) -> list[float]:
        """Return the advantages of a group's rollouts, in their order."""
        rollouts = group.rollouts
        columns = {
            "group_id": [rollout.group_id for rollout in rollouts],
            "rollout_id": [rollout.rollout_id for rollout in rollouts],
            "status": [status_of(rollout.status) for rollout in rollouts],
            "reward": [rollout.reward for rollout in rollouts],
            "tokens": [sum(len(turn.completion_token_ids) for turn in rollout.turns) for rollout in rollouts],
        }
        words = scale_here("as/tinker", self.config.should_std_normalize)
        if words:
            words += LIKE_TORCHTITAN  # without a scale they change nothing
        return decide_here("as/tinker", columns, *words).advantage.tolist()


def status_of(status: Any) -> int:
    """Convert torchtitan's status to our status number."""
    if status.is_error():
        return int(Status.FAILED)
    return int(Status.TRUNCATED if status.is_truncated() else Status.COMPLETED)

"""A recipe as torchtitan's advantage estimator: ``Rollouter.Config(advantage=RecipeEstimator.Config())``.

pytorch/torchtitan, torchtitan/experiments/rl/rollout/advantage.py and rollouter.py, at b5bcd76c66
(2026-08-21).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable

from headrace.transforms import Status

from .environment import decide_here, recipe_of_environment

recipe_of_environment("as/tinker")  # a wrong name fails here, before any rollout


class RecipeEstimator(Configurable):
    """Called for one group at a time, whose rollouts are all there, failed ones too."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No options: the environment names the recipe."""

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, group: Any) -> list[float]:
        """Advantages of the rollouts of a group, in its order."""
        rollouts = group.rollouts
        columns = {
            "group_id": [rollout.group_id for rollout in rollouts],
            "rollout_id": [rollout.rollout_id for rollout in rollouts],
            "status": [status_of(rollout.status) for rollout in rollouts],
            "reward": [rollout.reward for rollout in rollouts],
            "tokens": [sum(len(turn.completion_token_ids) for turn in rollout.turns) for rollout in rollouts],
        }
        return decide_here("as/tinker", columns).advantage.tolist()


def status_of(status: Any) -> int:
    """Of torchtitan's status ours, as a number."""
    if status.is_error():
        return int(Status.FAILED)
    return int(Status.TRUNCATED if status.is_truncated() else Status.COMPLETED)

"""An advantage estimator `headrace` for verl: ``VERL_USE_EXTERNAL_MODULES=headrace.adapters.verl``.

verl-project/verl 0.9.1, the release; the same lines are in 1dda039b9c (2026-08-22). verl imports this module
in every process. An estimator of ``register_adv_est`` (trainer/ppo/core_algos.py) gets rows and their `uid`.
The v1 trainer (trainer/ppo/v1/trainer_base.py) has no registry, so its function is replaced, for this
estimator alone. The new function finds the rows of a rollout by their keys, ``{uid}_{session}_{index}``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from headrace.pipeline import advantages_of

from .environment import advantages_by_uid, recipe_of_environment, scale_here

try:
    from verl.trainer.ppo.v1 import trainer_base
except ImportError:  # the v1 trainer needs TransferQueue, and the older trainer does not
    trainer_base = None

recipe_of_environment("as/verl")  # an unknown recipe raises here
# Rows that the v1 trainer adds to fill its batch (trainer/ppo/padding_utils.py). They are not rollouts.
PADDING = re.compile(r"pad[0-9a-f]{32}_\d+_0")
LAST = "pipeline.stages.collapse.reward=last"  # verl's reward of a session is the reward of its last output


@register_adv_est("headrace")
def estimate_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both (N, T). Each row is a rollout, and `index` has its group."""
    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    advantages = advantages_by_uid(
        "as/verl", token_level_rewards, response_mask, index, *scale_here("as/verl", by_std)
    )
    return advantages, advantages


def compute_advantage_of_sessions(
    data: Any, batch_keys: Sequence[str], adv_estimator: Any, num_repeat: int = 1, **others: Any
) -> Any:
    """Compute advantages for the v1 trainer. With `headrace`, all rows of a session are one rollout."""
    if adv_estimator != "headrace":
        return theirs(data, batch_keys, adv_estimator, num_repeat=num_repeat, **others)
    mask = data.batch["response_mask"]
    rows = [row for row, key in enumerate(batch_keys) if not PADDING.fullmatch(key)]
    order = sorted(rows, key=lambda row: int(batch_keys[row].rsplit("_", 1)[1]))
    batch = TensorDict(
        {
            "group_id": [batch_keys[row].rsplit("_", 2)[0] for row in order],
            "rollout_id": [batch_keys[row].rsplit("_", 1)[0] for row in order],
            "expected_rollouts": torch.full((len(order),), num_repeat),
            ("next", "reward"): data.batch["token_level_rewards"].sum(-1)[order],
            ("masks", "all_assistant_mask"): mask[order].bool(),
        },
        [len(order)],
        device=mask.device,
    )
    words = (LAST, *scale_here("as/verl", others.get("norm_adv_by_std_in_grpo", True)))
    found = advantages_of(recipe_of_environment("as/verl", *words), batch).advantage
    advantages = mask.new_zeros(mask.shape, dtype=found.dtype)
    advantages[order] = found * mask[order]
    data.batch["advantages"] = data.batch["returns"] = advantages
    return data


if trainer_base is not None:
    theirs = trainer_base.compute_advantage_for_multi_trajectories
    trainer_base.compute_advantage_for_multi_trajectories = compute_advantage_of_sessions

"""An advantage estimator `headrace` for SkyRL: import this module in your entry point.

NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, ``register_advantage_estimator``, and
skyrl/train/trainer.py, ``compute_advantages_and_returns``, at a9564572eb (2026-08-21). With
`generator.step_wise_trajectories`, SkyRL passes only the last step of each trajectory, and gives the
advantage of this step to the other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator
from torch import Tensor

from .environment import advantages_by_uid, recipe_of_environment, scale_here

recipe_of_environment("as/skyrl")  # an unknown recipe raises here


@register_advantage_estimator("headrace")
def estimate_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    grpo_norm_by_std: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both (N, T). Each row is a rollout, and `index` has its group."""
    words = scale_here("as/skyrl", grpo_norm_by_std)
    advantages = advantages_by_uid("as/skyrl", token_level_rewards, response_mask, index, *words)
    return advantages, advantages

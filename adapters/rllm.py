"""An advantage estimator `headrace` for rLLM: import this module where you make the trainer.

rllm-org/rllm, rllm/trainer/algorithms/advantage.py, ``register_rllm_adv_estimator``, at 9beb6e0f67
(2026-08-15). rLLM calls the estimator once for each role, with the groups of that role.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rllm.trainer.algorithms.advantage import register_rllm_adv_estimator

from .environment import decide_here, recipe_of_environment

recipe_of_environment("as/rllm")  # an unknown recipe raises here


@register_rllm_adv_estimator("headrace")
def estimate_advantages(
    rewards: list[np.ndarray], algorithm_config: Any, traj_groups: list[Any], **others: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute advantages and returns of trajectories, by group. A trajectory is a whole rollout."""
    rows = [(group, trajectory) for group in traj_groups for trajectory in group.trajectories]
    columns = {
        "group_id": [group.group_id for group, _ in rows],
        "rollout_id": [trajectory.uid for _, trajectory in rows],
        "role": [trajectory.name for _, trajectory in rows],
        "reward": np.concatenate(rewards) if rewards else [],
        "tokens": [sum(len(step.response_ids) for step in trajectory.steps) for _, trajectory in rows],
    }
    advantages = decide_here("as/rllm", columns).advantage.numpy()
    by_group = np.split(advantages, np.cumsum([len(each) for each in rewards])[:-1]) if rewards else []
    return by_group, by_group

"""A recipe in slime and miles, by ``--custom-reward-post-process-path``.

THUDM/slime, slime/ray/rollout.py, ``_post_process_rewards``, at 624b824a89 (2026-08-21); radixark/miles,
miles/ray/rollout/train_data_conversion.py, the same name, at 31f1ca961a (2026-08-21).
"""

from __future__ import annotations

from typing import Any

from headrace.transforms import Status

from .environment import decide_here


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Rewards, and the advantages that the trainer takes in their place; rows that leave are removed."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    masks = [
        [0] if s.remove_sample else [1] * s.response_length if s.loss_mask is None else s.loss_mask
        for s in samples
    ]
    columns = {
        "group_id": [s.group_index for s in samples],
        "rollout_id": [s.index if s.rollout_id is None else s.rollout_id for s in samples],
        "expected_rollouts": [args.n_samples_per_prompt] * len(samples),
        "status": [int(Status[s.status.name]) for s in samples],
        "reward": rewards,
        "tokens": [sum(map(bool, mask)) for mask in masks],
        "length": [s.response_length for s in samples],
    }
    decision = decide_here("as/slime", columns)
    for sample, trains in zip(samples, decision.keep.tolist(), strict=True):
        sample.remove_sample = not trains  # the trainer zeroes its loss mask
    return rewards, decision.advantage.tolist()

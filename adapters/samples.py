"""Functions that slime's and miles' hooks share: samples become columns, and weights become denominators.

THUDM/slime at 624b824a89, slime/utils/types.py; radixark/miles at 31f1ca961a, miles/utils/types.py (both
2026-08-21).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.pipeline import Decision
from headrace.transforms import BatchError, Status

from .environment import Part, decide_here, scale_here

Rewards = tuple[list[float], list[float]]
"""The rewards of the samples, and the numbers that the trainer uses as advantages."""


def decide_samples(
    args: Any, samples: list[Any], *words: str, part: Part = "advantages"
) -> tuple[list[float], Decision]:
    """Return the rewards and the recipe's decision, and mark samples that leave the loss as removed."""
    masks = [
        [0] if s.remove_sample else [1] * s.response_length if s.loss_mask is None else s.loss_mask
        for s in samples
    ]
    columns = {
        "group_id": [s.group_index for s in samples],
        "rollout_id": rollout_ids(samples),
        "expected_rollouts": [args.n_samples_per_prompt] * len(samples),
        "status": [int(Status[s.status.name]) for s in samples],
        "reward": [s.get_reward_value(args) for s in samples],
        "tokens": [sum(map(bool, mask)) for mask in masks],
        "length": [s.response_length for s in samples],
    }
    scale = scale_here("as/slime", getattr(args, "grpo_std_normalization", True))
    decision = decide_here("as/slime", columns, *scale, *words, part=part)
    for sample, trains in zip(samples, decision.keep.tolist(), strict=True):
        sample.remove_sample = not trains  # the trainer zeroes the loss mask of a removed sample
    return columns["reward"], decision


def rollout_ids(samples: list[Any]) -> list[Any]:
    """Return the rollout ids by the rule of both trainers: `index` if `rollout_id` is None."""
    return [s.index if s.rollout_id is None else s.rollout_id for s in samples]


def weigh_samples(
    args: Any, samples: list[Any], convert: Callable[[list[Any], Rewards], dict[str, Any]], *, whole: bool
) -> dict[str, Any]:
    """Return the trainer's data of the trained samples, with the recipe's weights as denominators.

    The trainer's loss is Σ mask · term / rollout_mask_sums / global_batch_size over a step of
    global_batch_size rollouts. A row of weight w gets the denominator 1 / (w · global_batch_size). The
    trainer raises denominators below 1 to 1, and may need whole numbers. So the advantage is multiplied by
    the stored denominator, divided by the exact one.
    """
    if args.calculate_per_token_loss:
        raise ValueError(
            "--calculate-per-token-loss ignores weights of rows: leave it out, and weigh tokens equally with "
            "pipeline.stages.weight.unit=token"
        )
    size = args.global_batch_size
    words = [
        "pipeline.stages.split.minibatches=null",
        f"pipeline.stages.split.minibatch_size={size}",
        "pipeline.stages.split.unit=rollout",
        "pipeline.stages.split.remainder=drop",
        "pipeline.stages.split.shuffle=false",
    ]
    rewards, decision = decide_samples(args, samples, *words, part="whole")
    ids = rollout_ids(samples)
    found = [len({ids[row] for row in step.tolist()}) for step in decision.steps]
    if not found or set(found) != {size}:
        raise BatchError(
            f"the trainer cuts steps of global_batch_size={size} rollouts; found steps of {found}: leave "
            "pipeline.stages.split as the hook sets it"
        )
    rows = torch.cat(decision.steps)
    weight = decision.loss_weight[rows] * size
    exact = torch.where(weight > 0, 1 / weight, 1.0)
    stored = (exact.round() if whole else exact).clamp(min=1)
    advantages = (decision.advantage[rows] * stored / exact).tolist()
    trained = [samples[row] for row in rows.tolist()]
    data = convert(trained, ([rewards[row] for row in rows.tolist()], advantages))
    sums = [int(each) for each in stored] if whole else stored.tolist()
    return data | {"rollout_ids": rollout_ids(trained), "rollout_mask_sums": sums}

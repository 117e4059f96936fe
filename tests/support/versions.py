"""Rows whose tokens were sampled by several policy versions, and loops that compute their versions."""

from __future__ import annotations

from random import Random

import torch
from tensordict import TensorDict, lazy_stack
from tries import ATTENTION, LOSS, dense, ragged

VERSION = ("next", "policy_version")
LAYOUTS = ("left", "right", "ragged")


def with_versions(seed: int, layout: str = "left", rows: int = 8, most: int = 9) -> TensorDict:
    """Groups of two rollouts of one row. Tokens that were not sampled have meaningless versions."""
    draw = Random(seed)
    tokens = [draw.choices(range(1, 9), k=draw.randint(1, most)) for _ in range(rows)]
    tokens[0] = tokens[0] + [1] * 20  # a column of tokens must be wider than a column of numbers
    batch = ragged(tokens) if layout == "ragged" else dense(tokens, 30, layout)
    batch["rollout_id"], batch["group_id"] = torch.arange(rows), torch.arange(rows) // 2
    batch["next", "reward"] = torch.arange(rows) / 8
    batch["next", "done"] = torch.ones(rows, 1, dtype=torch.bool)
    out = []
    for row in batch.exclude("advantage", "loss_weight").unbind(0):
        there = row[ATTENTION]
        sampled = there & torch.tensor([draw.random() < 0.6 for _ in there])
        odd = torch.tensor([draw.choice((-1, 0, 99)) for _ in there])
        version = torch.where(
            sampled, torch.tensor([max(draw.randint(3, 8), draw.randint(3, 8)) for _ in there]), odd
        )
        out.append(row.clone().set(LOSS, sampled).set(VERSION, version))
    return lazy_stack(out) if layout == "ragged" else torch.stack(out)


def sampled_by(batch: TensorDict) -> list[list[int]]:
    """The versions of the sampled tokens of each row."""
    pairs = [(row[VERSION].tolist(), row[LOSS].tolist()) for row in batch.unbind(0)]
    return [[v for v, own in zip(versions, loss, strict=True) if own] for versions, loss in pairs]

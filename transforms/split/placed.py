"""What the plans of a batch say, where its rows lie: one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import Plan


class Placed(NamedTuple):
    """A plan on the device of the batch."""

    order: Tensor
    """(M,) int64, row numbers in training order."""
    padding: Tensor
    """(M,) bool."""
    numbers: Tensor
    """(3, M) int64: the minibatch, rank and micro-batch of each row in the order."""
    table: Tensor
    """(3, N) int64: those of each row of the batch; −1 where it is in none."""


def place(plans: Sequence[Plan], verdict: Tensor, device: torch.device) -> tuple[list[Placed], Tensor]:
    """Bring plans, and the verdicts of the rows, to a device.

    Args:
        plans: of a batch of N rows, on the CPU.
        verdict: (N,) int8 on the CPU.
        device: where the batch lies.
    """
    here = [Placed(plan.order, plan.padding, plan.numbers, _by_row(plan, len(verdict))) for plan in plans]
    if device.type == "cpu":
        return here, verdict
    parts = [verdict, *(part for placed in here for part in placed)]
    flat = torch.cat([part.reshape(-1).long() for part in parts]).to(device, non_blocking=True)
    sizes = [part.numel() for part in parts]
    there = [
        moved.view(part.shape).to(part.dtype) for moved, part in zip(flat.split(sizes), parts, strict=True)
    ]
    fields = len(Placed._fields)
    return [Placed(*there[start : start + fields]) for start in range(1, len(there), fields)], there[0]


def joined(plan: Plan, placed: Placed, spans: Sequence[slice]) -> tuple[Plan, Placed]:
    """Some spans of an order as one."""

    def some(column: Tensor) -> Tensor:
        return torch.cat([column[..., :0], *(column[..., span] for span in spans)], -1)

    order, padding, numbers = map(some, (placed.order, placed.padding, placed.numbers))
    part = replace(plan, order=some(plan.order), padding=some(plan.padding))
    return part, Placed(order, padding, numbers, placed.table)


def _by_row(plan: Plan, rows: int) -> Tensor:
    """(3, rows) int64: the numbers of a plan in the order of the batch."""
    order, numbers = plan.order, plan.numbers
    if plan.is_padded:
        order, numbers = order[~plan.padding], numbers[:, ~plan.padding]
    return torch.full((3, rows), -1, dtype=torch.int64).index_copy_(1, order, numbers)

"""Groups by position, for batches that carry no ids. A guess, and only made where an option asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.transforms.ids import first_row, number_of


def chunk_groups(
    rows: int,
    rollout_id: Tensor | None,
    group_size: int,
    groups_per_batch: int | None = None,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Number consecutive rollouts by chunks of `group_size`; the last group may be short.

    Args:
        rows: N.
        rollout_id: (N,) integers ≥ 0, which rows are one rollout; None: each row is one.
        group_size: rollouts per group.
        groups_per_batch: where given, any other number of rollouts than `group_size` times this makes one
            global group instead (miles' ``rigid_or_global``). Costs one device read.
        device: where the result lies.

    Returns:
        (N,) int64 group ids.

    Example:
        >>> chunk_groups(5, None, 2).tolist(), chunk_groups(5, None, 2, 2).tolist()
        ([0, 0, 1, 1, 2], [0, 0, 0, 0, 0])
    """
    number = torch.arange(rows, device=device) if rollout_id is None else number_of(first_row(rollout_id))
    if groups_per_batch is not None and int(number.amax()) + 1 != group_size * groups_per_batch:
        return torch.zeros_like(number)
    return number // group_size

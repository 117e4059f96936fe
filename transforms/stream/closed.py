"""Ids that are over, as intervals: dense ids take no room, however many there were."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .open_groups import partitions_in

Closed = Mapping[int, Tensor]
"""By partition, (K, 2) int64 of first and last ids, in order, with gaps between them."""


def join_intervals(intervals: Tensor, ids: Tensor) -> Tensor:
    """Intervals that hold `ids` too.

    Args:
        intervals: (K, 2) int64, first and last ids.
        ids: (N,) int64 ≥ 0.

    Returns:
        (L, 2) int64, in order, with gaps between them.

    Example:
        >>> join_intervals(torch.tensor([[0, 3], [9, 9]]), torch.tensor([5, 4, 7])).tolist()
        [[0, 5], [7, 7], [9, 9]]
    """
    every = torch.cat([intervals, ids.unsqueeze(1).expand(-1, 2)])
    if len(every) == 0:
        return every
    first, order = every[:, 0].sort()
    reach = every[order, 1].cummax(0).values
    begins = torch.ones_like(first, dtype=torch.bool)
    begins[1:] = first[1:] > reach[:-1] + 1
    ends = begins.roll(-1)  # an interval ends where the next begins
    return torch.stack([first[begins], reach[ends]], 1)


def in_intervals(intervals: Tensor, ids: Tensor) -> Tensor:
    """(N,) bool: the id is in one of the intervals (K, 2).

    Example:
        >>> in_intervals(torch.tensor([[0, 3], [9, 9]]), torch.tensor([3, 4, 9])).tolist()
        [True, False, True]
    """
    if len(intervals) == 0:
        return torch.zeros_like(ids, dtype=torch.bool)
    place = torch.searchsorted(intervals[:, 0].contiguous(), ids, right=True) - 1
    return (place >= 0) & (ids <= intervals[:, 1].index_select(0, place.clamp(min=0)))


def close_ids(closed: Closed, partition: Tensor, ids: Tensor) -> dict[int, Tensor]:
    """The closed ids, and these with them."""
    after = dict(closed)
    for name in partitions_in(partition):
        before = after.get(name, ids.new_empty(0, 2))
        after[name] = join_intervals(before, ids[partition == name])
    return after


def is_closed(closed: Closed, partition: Tensor, ids: Tensor) -> Tensor:
    """(N,) bool: the id of this partition is closed."""
    over = torch.zeros_like(ids, dtype=torch.bool)
    for name in partitions_in(partition):
        if name in closed:
            over |= (partition == name) & in_intervals(closed[name], ids)
    return over

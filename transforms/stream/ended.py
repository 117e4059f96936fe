"""Which rollouts have ended, and which rows come once more, whatever the order in which rows arrive."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.transforms.ids import any_by, first_row_of_pairs, is_first, reduce_by, sum_by


def comes_after(first: Tensor, flags: Tensor, least: Tensor) -> Tensor:
    """Per row, whether at least so many earlier rows of its id have the flag; (N,) bool.

    Args:
        first: (N,) int64, of :func:`first_row`.
        flags: (N,) bool.
        least: (N,) int64 ≥ 1.

    Example:
        >>> done, once = torch.tensor([True, True, False, True]), torch.ones(4, dtype=torch.int64)
        >>> comes_after(torch.tensor([0, 1, 0, 0]), done, once).tolist()
        [False, False, True, True]
    """
    position = torch.arange(len(first))
    after = position > reduce_by(first, torch.where(flags, position, len(first)), "amin")
    if not bool((after & (least > 1)).any()):
        return after
    ordered, order = first.sort(stable=True)
    before = flags[order].long().cumsum(0) - flags[order].long()
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    before = before - torch.where(begins, before, 0).cummax(0).values
    return torch.empty_like(before).scatter_(0, order, before) >= least


def comes_again(first: Tensor, done: Tensor, ends: Tensor, segment: Tensor | None) -> Tensor:
    """(N,) bool: the row's segment is there already, or its rollout has ended. The first to arrive stays.

    Without numbers of segments the rows of a rollout arrive in order, so that what comes after its end comes
    again. With them they may arrive in any order, and only another end or the same number does.

    Args:
        first: (N,) int64, the first row of each row's rollout; rows in the order of their arrival.
        done: (N,) bool, the rollout ends with this row, or its segment does.
        ends: (N,) int64, how many rows of the rollout are done when it has ended.
        segment: (N,) int64, the number of the row's segment; None: rows have none.

    Example:
        >>> done, once = torch.tensor([False, True, True]), torch.ones(3, dtype=torch.int64)
        >>> comes_again(torch.zeros(3, dtype=torch.int64), done, once, None).tolist()
        [False, False, True]
    """
    if segment is None:
        return comes_after(first, done, ends)
    again = ~is_first(first_row_of_pairs(first, segment))
    return again | (done & comes_after(first, done & ~again, ends))


def has_ended(
    first: Tensor, done: Tensor, ends: Tensor, segment: Tensor | None, begins: Tensor | None = None
) -> Tensor:
    """(N,) bool: the row's rollout is there up to its end. No row comes again (:func:`comes_again`).

    Args:
        first: (N,) int64, the first row of each row's rollout.
        done: (N,) bool, the rollout ends with this row, or its segment does.
        ends: (N,) int64, how many rows of the rollout are done when it has ended.
        segment: (N,) int64, the number of the row's segment, from 0; None: rows have none.
        begins: (N,) int64, 1 where the rollout begins with this row, or its segment does, −1 where nobody
            says; None: nobody does.

    Example:
        >>> first, once = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
        >>> has_ended(first, torch.tensor([True, False]), once, torch.tensor([2, 0])).tolist()
        [False, False]
    """
    ended = sum_by(first, done.long()) >= ends
    if segment is not None:
        last = last_segment(first, done, segment)
        ended &= (ends > 1) | (sum_by(first, torch.ones_like(first)) == last + 1)
    if begins is None:
        return ended
    order = torch.arange(len(first)) if segment is None else segment
    from_the_start = any_by(first, (begins == 1) & (order == reduce_by(first, order, "amin")))
    begun = (sum_by(first, begins) == ends) & ((ends > 1) | from_the_start)
    return ended & (begun | (begins < 0))


def last_segment(first: Tensor, done: Tensor, segment: Tensor) -> Tensor:
    """Per row, the number of the segment with which its rollout is done; −1 where none is."""
    return reduce_by(first, torch.where(done, segment, -1), "amax")

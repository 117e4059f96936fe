"""Arithmetic per id.

Ids are labels, in any order and with any gaps. They are never used to index. :class:`Ids` numbers them from
0, and computes sums, extremes and first rows per id.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class Ids:
    """Numbers 0 … n − 1 for the ids of rows, ascending by id, and arithmetic per id.

    Rows with `counts` False are left out of all sums, extremes and counts. A value per id is an (n,) tensor;
    :meth:`spread` maps it to the rows.

    Args:
        labels: (M,) int64, any labels; equal labels are one id.
        counts: (M,) bool; None: all rows count.

    Attributes:
        of: (M,) int64, the number of each row's id.
        n: number of distinct ids.
        ascending: whether the labels ascend, so that the rows of an id are contiguous.
        lowest: the lowest label; 0 without rows.

    Example:
        >>> ids = Ids(torch.tensor([7, 3, 7, 9]))
        >>> ids.of.tolist(), ids.n, ids.sum(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist()
        ([1, 0, 1, 2], 3, [2.0, 5.0, 8.0])
        >>> ids.spread(ids.count).tolist()
        [2, 1, 2, 1]
    """

    def __init__(self, labels: Tensor, counts: Tensor | None = None):
        self.labels, self.counts = labels, counts
        self.of, self.n, self.ascending, self.lowest = labels, 0, True, 0
        if len(labels) == 0:
            return
        seen = labels.cpu().numpy()
        if bool((seen[1:] > seen[:-1]).all()):  # each row has its own id
            self.of, self.n = torch.arange(len(seen), device=labels.device), len(seen)
        else:
            runs, self.of, length = labels.unique_consecutive(return_inverse=True, return_counts=True)
            seen, self.n = runs.cpu().numpy(), len(runs)
            self.ascending = bool((seen[1:] > seen[:-1]).all())
            if self.ascending and counts is None:
                self.count = length
        if self.ascending:
            self.lowest = int(seen[0])
            return
        self.lowest, high = (int(end) for end in labels.aminmax())
        if high - self.lowest < 8 * len(labels):  # a table over the range is cheaper than a sort
            slot = labels - self.lowest
            number = torch.bincount(slot).ne_(0).cumsum(0)
            self.of, self.n = number.index_select(0, slot) - 1, int(number[-1])
        else:
            found, self.of = labels.unique(return_inverse=True)
            self.n = len(found)

    def spread(self, per_id: Tensor) -> Tensor:
        """Map (n,) values per id to (M,) values per row."""
        if self.ascending and self.n == len(self.labels):
            return per_id
        return per_id.index_select(0, self.of)

    def sum(self, values: Tensor) -> Tensor:
        """(n,) sums of (M,) `values`: int64 for integers and bools, else float64.

        Floats are added in sorted order, so the sum does not depend on the order of the rows.
        """
        if self.counts is not None:
            values = torch.where(
                self.counts, values, torch.zeros((), dtype=values.dtype, device=values.device)
            )
        if not values.is_floating_point():
            return torch.zeros(self.n, dtype=torch.int64, device=values.device).scatter_add_(
                0, self.of, values.long()
            )
        values = values.double()
        if self.n == len(values):
            return torch.empty_like(values).scatter_(0, self.of, values)
        order = values.argsort()
        of, values = self.of.index_select(0, order), values.index_select(0, order)
        return torch.bincount(of, weights=values, minlength=self.n)

    def any(self, flags: Tensor) -> Tensor:
        """(n,) bool: whether the flag is True for some row of the id."""
        return self.sum(flags) > 0

    def all(self, flags: Tensor) -> Tensor:
        """(n,) bool: whether the flag is True for all rows of the id."""
        return self.sum(~flags) == 0

    def min(self, values: Tensor) -> Tensor:
        """(n,) smallest of (M,) `values`; the largest number of the dtype if no row counts."""
        return self._extreme(values, "amin")

    def max(self, values: Tensor) -> Tensor:
        """(n,) largest of (M,) `values`; the smallest number of the dtype if no row counts."""
        return self._extreme(values, "amax")

    def _extreme(self, values: Tensor, which: str) -> Tensor:
        if values.is_floating_point():
            nothing = float("inf") if which == "amin" else float("-inf")
        else:
            limits = torch.iinfo(values.dtype)
            nothing = limits.max if which == "amin" else limits.min
        if self.counts is not None:
            values = torch.where(self.counts, values, nothing)
        return values.new_full((self.n,), nothing).scatter_reduce_(0, self.of, values, which)

    @cached_property
    def count(self) -> Tensor:
        """(n,) int64, number of rows of each id that count."""
        if self.counts is None:
            return torch.bincount(self.of, minlength=self.n)
        return self.sum(self.counts)

    @cached_property
    def first(self) -> Tensor:
        """(n,) int64, index of each id's first row that counts, or of the last row if none counts."""
        if self.counts is None and self.ascending and self.n == len(self.of):
            return self.of
        rows = torch.arange(len(self.labels), device=self.labels.device)
        if self.counts is None and self.n == len(rows):
            return torch.empty_like(rows).scatter_(0, self.of, rows)
        return self.min(rows).clamp_max(len(rows) - 1)

    @cached_property
    def is_first(self) -> Tensor:
        """(M,) bool: True on each id's first row that counts."""
        if self.counts is None and self.n == len(self.labels):
            return torch.ones_like(self.labels, dtype=torch.bool)
        first = self.spread(self.first) == torch.arange(len(self.labels), device=self.labels.device)
        return first if self.counts is None else first & self.counts

    def paired_with(self, other: Ids) -> Ids:
        """The ids of pairs: two rows get the same id if both of their ids are equal."""
        return Ids(self.of * max(other.n, 1) + other.of, self.counts)

    def positions(self, by: Tensor | None = None) -> Tensor:
        """(M,) int64: index of each row among the rows of its id, sorted by (M,) `by`, else in row order."""
        order = torch.arange(len(self.of), device=self.of.device) if by is None else by.argsort(stable=True)
        order = order[self.of[order].argsort(stable=True)]
        size = torch.bincount(self.of, minlength=self.n)
        place = torch.arange(len(order), device=order.device) - (size.cumsum(0) - size)[self.of[order]]
        return torch.empty_like(place).scatter_(0, order, place)


def stable_order(values: Tensor) -> Tensor:
    """Compute ``values.argsort(stable=True)`` of (M,) integers or floats on the CPU.

    NumPy sorts 16-bit integers ten times faster than torch. Wider integers are sorted in steps of 16 bits.

    Example:
        >>> stable_order(torch.tensor([5, 3, 5, 1])).tolist()
        [3, 1, 0, 2]
    """
    if len(values) == 0 or values.is_floating_point():
        return torch.from_numpy(np.argsort(values.numpy(), kind="stable"))
    low, high = (int(end) for end in values.aminmax())
    digits, order = (values.long() - low).numpy(), None
    for shift in range(0, max((high - low).bit_length(), 1), 16):
        digit = (digits >> shift).astype(np.uint16)
        of_digit = (digit if order is None else digit[order]).argsort(kind="stable")
        order = of_digit if order is None else order[of_digit]
    return torch.from_numpy(order)


def add_up(values: Tensor) -> Tensor:
    """Add (M,) `values` in sorted order: () float64. Their order, and zeros among them, change no bit."""
    return torch.tensor(_sorted_sum(values), dtype=torch.float64)


def mean_of(values: Tensor) -> float:
    """The mean of (M,) `values`, from :func:`add_up`; 0 without values."""
    total = _sorted_sum(values) if values.is_floating_point() else float(values.sum())
    return total / max(len(values), 1)


def _sorted_sum(values: Tensor) -> float:
    ordered = np.sort(values.double().cpu().numpy())  # ten times faster than torch
    return float(np.add.accumulate(ordered)[-1]) if len(ordered) else 0.0


def first_row(ids: Tensor) -> Tensor:
    """Find the first row with the same id, for each row.

    Args:
        ids: (N,) int64, on any device.

    Returns:
        (N,) int64.

    Example:
        >>> first_row(torch.tensor([7, 3, 7, 3, 9])).tolist()
        [0, 1, 0, 1, 4]
    """
    numbered = Ids(ids)
    return numbered.spread(numbered.first)

"""The order of the rows of a group by their values, and what is counted and added up along it.

No shape depends on the data, and nothing is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sums import sum_in_any_order


class Ranking(NamedTuple):
    """Rows group by group, and in each from the smallest value to the largest.

    Row i stands at a place; ``order`` says which row stands at each. What is known by place comes back to the
    rows by :meth:`to_rows`.
    """

    order: Tensor
    """(N,) int64, the row at each place."""
    start: Tensor
    """(N,) int64, the place at which the group of each place begins."""

    def at_places(self, values: Tensor) -> Tensor:
        """What is known of rows, (N,), by place."""
        return values.index_select(0, self.order)

    def to_rows(self, values: Tensor) -> Tensor:
        """What is known of places, (N,), by row."""
        return torch.empty_like(values).scatter_(0, self.order, values)

    def before(self, counts: Tensor) -> Tensor:
        """(N,) by place: the sum of integers, given by place, over the places before it in its group."""
        counts = counts.long()
        total = counts.cumsum(0) - counts
        return total - total.index_select(0, self.start)

    def running(self, values: Tensor) -> Tensor:
        """(N,) by place: the sum of float64 numbers, given by place, up to it in its group.

        It is that of :mod:`~headrace.transforms.sums`: where other groups lie changes no bit of it.
        """
        terms = torch.full((), len(values), device=values.device)
        return sum_in_any_order(values, self._add, peak=lambda: values.abs().amax(), terms=terms)

    def _add(self, values: Tensor) -> Tensor:
        total = values.cumsum(0)
        return total - (total - values).index_select(0, self.start)


def rank_in_groups(groups: Tensor, values: Tensor, ties: Tensor | None = None) -> Ranking:
    """Order the rows of each group by a value.

    Args:
        groups: (N,) int64, any labels.
        values: (N,) float; NaN comes last.
        ties: (N,) int64, by which rows with equal values are ordered; None: as they come.

    Example:
        >>> ranking = rank_in_groups(torch.tensor([7, 3, 7, 7]), torch.tensor([2.0, 5.0, 1.0, 3.0]))
        >>> ranking.order.tolist(), ranking.start.tolist()
        ([1, 2, 0, 3], [0, 1, 1, 1])
        >>> ranking.to_rows(ranking.before(torch.ones(4))).tolist()  # how many of its group are below
        [1, 0, 0, 2]
    """
    place = torch.arange(len(groups), device=groups.device)
    order = place if ties is None else ties.sort(stable=True).indices
    for column in (values, groups):
        order = order.index_select(0, column.index_select(0, order).sort(stable=True).indices)
    labels = groups.index_select(0, order)
    begins = torch.ones_like(labels, dtype=torch.bool)
    begins[1:] = labels[1:] != labels[:-1]
    return Ranking(order, torch.where(begins, place, 0).cummax(0).values)

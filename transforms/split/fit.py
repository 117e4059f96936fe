"""Minibatches that fit a token budget on every rank, since whole units at their end are left out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from headrace.transforms.distributed import present_ranks
from headrace.transforms.errors import BatchError

from .balance import bins_within
from .cut_options import CutOptions
from .minibatches import Cut


def fit_budget(orders: Sequence[Cut], ids: Tensor | None, lengths: Tensor, cut: CutOptions) -> list[Cut]:
    """Leave out the last units of minibatches that need more micro-batches than some rank has rows for.

    A rank makes as many micro-batches as the others, and each needs a row. Of n rows a rank can make
    ⌊n / `multiple_of`⌋ · `multiple_of`, and all can make what the least of them can that has a row; whoever
    needs more to keep the budget leaves out one unit after the other, from the end of its order. Then ranks
    look again, since who left out rows has fewer. A minibatch of which nothing remains on some rank is none.

    Args:
        orders: one a pass.
        ids: (N,) int64 on the CPU, which rows are one unit; None: each is one.
        lengths: (N,) int64 on the CPU, tokens a row.
        cut: with `max_tokens`; ranks that share the batch call this together.

    Returns:
        The orders, with what was left out among their `left`.

    Raises:
        BatchError: no minibatch remains; on all ranks alike.
    """
    minibatches = [rows for order in orders for rows in order.order.split(order.sizes)]
    most: list[int] | None = None
    while True:
        fewest = _least([_capacity(rows, cut) for rows in minibatches])
        if fewest == most:
            break
        most = fewest
        minibatches = [
            _shorten(rows, ids, lengths, cut, limit) for rows, limit in zip(minibatches, most, strict=False)
        ]
    fitted, done = [], 0
    for order in orders:
        here = slice(done, done + len(order.sizes))
        kept = [rows for rows, limit in zip(minibatches[here], most[here], strict=True) if limit > 0]
        if order.sizes and not kept:
            raise BatchError(
                f"no minibatch has a row for each of its micro-batches, and remainder='drop' would leave out "
                f"all {len(order.order)} rows: raise max_tokens, or set remainder='pad'"
            )
        fitted.append(_keep(order, kept))
        done = here.stop
    return fitted


def _capacity(rows: Tensor, cut: CutOptions) -> int:
    """Micro-batches per rank that so many rows can make, none of them empty."""
    return len(rows) // cut.ranks // cut.multiple_of * cut.multiple_of


def _least(counts: list[int]) -> list[int]:
    """The smallest of each count over the ranks that share the batch and have as many counts."""
    if (ranks := present_ranks()) is None:
        return counts
    of_ranks = zip_longest(*ranks.gather_objects(counts))
    return [min(count for count in each if count is not None) for each in of_ranks]


def _shorten(rows: Tensor, ids: Tensor | None, lengths: Tensor, cut: CutOptions, limit: int) -> Tensor:
    """The first units of (n,) rows, those that keep the budget in `limit` micro-batches per rank."""
    units = torch.ones(len(rows), dtype=torch.int64) if ids is None else _unit_sizes(ids[rows])
    ends = [0, *units.cumsum(0).tolist()]
    kept = bisect_right(ends, limit, key=lambda end: _needed(rows[:end], lengths, cut)) - 1
    return rows[: ends[kept]]


def _unit_sizes(ids: Tensor) -> Tensor:
    return torch.unique_consecutive(ids, return_counts=True)[1]


def _needed(rows: Tensor, lengths: Tensor, cut: CutOptions) -> int:
    """Micro-batches per rank that these rows need."""
    bins = bins_within(lengths[rows], cut.max_tokens or 1)
    each = cut.ranks * cut.multiple_of
    return -(-bins // each) * cut.multiple_of


def _keep(order: Cut, minibatches: Sequence[Tensor]) -> Cut:
    """The order with these minibatches, and what else it had left out."""
    kept = torch.cat([order.order[:0], *minibatches])
    out = ~torch.isin(order.order, kept)
    return Cut(kept, [len(rows) for rows in minibatches], torch.cat([order.order[out], order.left]))

"""Rows by what they begin with: their lexicographic order, and how much neighbours in it share.

Equal is equal here, and no hash: entries become ranks, pairs of ranks become ranks, and so on, until one rank
stands for a whole row. That is log₂ T rounds of sorts, in which T · N + T · N/2 + … = 2 · T · N entries are
sorted in runs of N. No shape depends on the data, and nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .errors import BatchError

END = torch.iinfo(torch.int64).min  # what stands behind the last token of a row, and is no token
AT_ONCE = 1024  # columns that are ranked together, so that what a round needs stays small


class PrefixOrder(NamedTuple):
    """Rows in lexicographic order. A row that is the beginning of another comes before it."""

    order: Tensor
    """(N,) int64, the row at each place."""
    shared: Tensor
    """(N,) int64, by place: how many of its first labels a row shares with the one before it; 0 at first."""


def prefix_order(labels: Tensor, within: Tensor | None = None) -> PrefixOrder:
    """Order rows so that those that begin alike stand together.

    What two rows share that are not neighbours is the least of what lies between them.

    Args:
        labels: (N, T) int64, by :func:`left_aligned`.
        within: (N,) int64; rows that differ in it share nothing, and do not stand between one another.

    Example:
        >>> found = prefix_order(torch.tensor([[5, 1, 1], [5, 2, END], [5, 1, 3]]))
        >>> found.order.tolist(), found.shared.tolist()
        ([0, 2, 1], [0, 2, 1])
    """
    order = rank_rows(labels).sort(stable=True).indices
    if within is not None:
        order = order.index_select(0, within.index_select(0, order).sort(stable=True).indices)
    rows = labels.index_select(0, order)
    parted = (rows[1:] != rows[:-1]) | (rows[1:] == END)  # END is a label of no token
    if within is not None:
        home = within.index_select(0, order)
        parted = parted | (home[1:] != home[:-1])[:, None]
    parted = nn.functional.pad(parted, (0, 1), value=True)  # behind the last label, at the latest
    shared = parted.view(torch.uint8).argmax(1)  # the first of the largest
    return PrefixOrder(order, torch.cat([shared.new_zeros(min(len(order), 1)), shared]))


def rank_rows(labels: Tensor) -> Tensor:
    """(N,) int64: numbers in the lexicographic order of the rows of (N, T) int64; equal ones are equal.

    Example:
        >>> rank_rows(torch.tensor([[7, 9], [7, 2], [7, 9], [3, 4]])).tolist()
        [2, 1, 2, 0]
    """
    rows = len(labels)
    ranks = labels.t()
    while len(ranks) != 1:
        if len(ranks) == 0 or rows == 0:
            return labels.new_zeros(rows)
        pairs = []  # ranks of pairs of columns that follow one another
        for some in map(_dense, ranks.split(AT_ONCE)):
            even = some if len(some) % 2 == 0 else torch.cat([some, torch.zeros_like(some[:1])])
            pairs.append(even[0::2] * rows + even[1::2])
        ranks = torch.cat(pairs)
    return _dense(ranks)[0]


def _dense(columns: Tensor) -> Tensor:
    """The rank of each entry among the distinct ones of its column, (T, N), of (T, N)."""
    ordered, order = columns.sort(1)
    steps = torch.zeros_like(order)
    steps[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return ordered.scatter_(1, order, steps.cumsum(1))


def left_aligned(labels: Tensor, present: Tensor) -> Tensor:
    """(N, T) int64: those of each row that are present, from the left on, with `END` behind them.

    Example:
        >>> present = torch.tensor([[False, True, True]])
        >>> left_aligned(torch.tensor([[0, 7, 8]]), present)[0, :2].tolist()
        [7, 8]
    """
    width = labels.shape[1]
    place = torch.where(present, present.long().cumsum(1) - 1, width)
    room = labels.new_full((len(labels), width + 1), END)
    return room.scatter_(1, place, labels.masked_fill(~present, END))[:, :width]


def as_words(values: Tensor) -> Tensor:
    """Integers that are equal where values are, to the bit.

    Example:
        >>> as_words(torch.tensor([1.0, -0.0, 0.0])).tolist()
        [1065353216, -2147483648, 0]
    """
    if values.is_complex():
        raise BatchError(f"inputs are integers, floats or bools; found {values.dtype}")
    if values.is_floating_point():
        sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        values = values.contiguous().view(sizes[values.element_size()])
    return values.long()


def same_content(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """(N,) int64, equal where N tensors are, in shape and in every bit; they may be one, (N, ...).

    Example:
        >>> same_content([torch.zeros(2), torch.ones(2), torch.zeros(1, 2), torch.zeros(2)]).tolist()
        [0, 1, 2, 0]
    """
    if isinstance(rows, Tensor):
        return rank_rows(as_words(rows.detach()).reshape(len(rows), -1))
    shapes = list(dict.fromkeys(row.shape for row in rows))  # known without a read
    words = []
    for row in rows:
        content = as_words(row.detach()).reshape(-1)
        words.append(nn.functional.pad(content, (1, 0), value=shapes.index(row.shape)))
    return rank_rows(nn.utils.rnn.pad_sequence(words, batch_first=True))

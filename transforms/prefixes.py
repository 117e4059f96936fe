"""Rows by what they begin with: their lexicographic order, and how much neighbours in it share.

Equal is equal here, and no hash: rows are sorted as bytes, which Python compares one by one. A processor does
that some gigabytes a second, so rows from another device are copied to the host, by one read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .errors import BatchError

END = torch.iinfo(torch.int64).min  # what stands behind the last token of a row, and is no token


class PrefixOrder(NamedTuple):
    """Rows in lexicographic order. A row that is the beginning of another comes before it. On the CPU."""

    order: Tensor
    """(N,) int64, the row at each place."""
    shared: Tensor
    """(N,) int64, by place: how many of its first labels a row shares with the one before it; 0 at first."""


def prefix_order(labels: Tensor, within: Tensor | None = None, lengths: Tensor | None = None) -> PrefixOrder:
    """Order rows so that those that begin alike stand together. One device read.

    What two rows share that are not neighbours is the least of what lies between them.

    Args:
        labels: (N, T) int64, by :func:`left_aligned`.
        within: (N,) int64, on the CPU; rows that differ in it share nothing, and do not stand between one
            another.
        lengths: (N,) int64, on the CPU, labels of each row; None: those in front of the first ``END``.

    Example:
        >>> found = prefix_order(torch.tensor([[5, 1, 1], [5, 2, END], [5, 1, 3]]))
        >>> found.order.tolist(), found.shared.tolist()
        ([0, 2, 1], [0, 2, 1])
    """
    labels, (rows, width) = labels.cpu(), labels.shape
    order = torch.arange(rows)
    if rows > 1 and width:
        # Bytes are compared as numbers without a sign, of which that of END is the least.
        keys = (labels ^ END).numpy().astype(">i8").view(f"V{8 * width}").ravel().tolist()
        order = torch.tensor(sorted(range(rows), key=keys.__getitem__))
    if within is not None:
        order = order.index_select(0, within.index_select(0, order).sort(stable=True).indices)
    shared = torch.zeros_like(order)
    if rows > 1 and width:
        ordered = labels.index_select(0, order)
        differs = ordered[1:] != ordered[:-1]
        first = torch.from_numpy(differs.numpy().argmax(1))  # of the largest
        alike = (~differs.gather(1, first[:, None])).nonzero()[:, 0]
        if lengths is None:
            first[alike] = (ordered[1 + alike] != END).sum(1)
        else:
            first[alike] = lengths[order[1 + alike]]
        shared[1:] = first
    if within is not None:
        home = within.index_select(0, order)
        shared[1:].masked_fill_(home[1:] != home[:-1], 0)
    return PrefixOrder(order, shared)


class PrefixBranch(NamedTuple):
    """Tokens that the same rows have, and that follow one another."""

    first: int
    """By place in the order, the rows that have them: from here ..."""
    last: int
    """... to the one in front of this."""
    begin: int
    """Tokens in front of them in these rows."""
    end: int
    """The same, with them."""
    from_first: int
    """Which rows the branch parts from, its own among them, as above; none at a root."""
    from_last: int


def branches(shared: list[int], lengths: list[int]) -> list[PrefixBranch]:
    """The tree that rows make by what they share, in depth-first order: a branch, then those behind it.

    A row that ends where others go on, or as they do, has an empty branch of its own.

    Args:
        shared: by place, of :class:`PrefixOrder`; -1 where another tree begins.
        lengths: by place, tokens of a row.

    Example:
        >>> for branch in branches([-1, 2, 1], [3, 3, 2]):  # 5 1 1, 5 1 3, 5 2
        ...     print(*branch)
        0 3 0 1 0 0
        0 2 1 2 0 3
        0 1 2 3 0 2
        1 2 2 3 0 2
        2 3 1 2 0 3
    """
    found: list[PrefixBranch] = []
    forks: list[tuple[int, list[tuple[int, int, int]]]] = []  # on the way to a row: depth, branches so far
    for place, (length, common) in enumerate(zip(lengths, [*shared[1:], -1], strict=True)):
        branch = place, place + 1, length
        while forks and forks[-1][0] > common:  # the next row has parted before
            depth, parted = forks.pop()
            parted.append(branch)
            whole = parted[0][0], place + 1
            found += [PrefixBranch(first, last, depth, end, *whole) for first, last, end in parted]
            branch = *whole, depth
        if common < 0:
            first, last, end = branch
            found.append(PrefixBranch(first, last, 0, end, first, first))
        elif forks and forks[-1][0] == common:
            forks[-1][1].append(branch)
        else:
            forks.append((common, [branch]))
    return sorted(found, key=lambda branch: (branch.first, -branch.last))


def ways(tree: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Which branches each row goes along: (S,) int64 rows, from the first on, and the number of a branch.

    Args:
        tree: (B, K) int64, :func:`branches` that begin with ``first`` and ``last``.
        order: (N,) int64, of :class:`PrefixOrder`.

    Example:
        >>> ways(torch.tensor([[0, 2], [0, 1], [1, 2]]), torch.tensor([1, 0]))
        (tensor([0, 0, 1, 1]), tensor([0, 2, 0, 1]))
    """
    first, size = tree[:, 0], tree[:, 1] - tree[:, 0]
    branch = repeated(torch.arange(len(tree)), size)
    place = torch.arange(len(branch)) + (first - size.cumsum(0) + size).index_select(0, branch)
    row, along = order.index_select(0, place).sort(stable=True)
    return row, branch.index_select(0, along)


def repeated(values: Tensor, counts: Tensor) -> Tensor:
    """``torch.repeat_interleave`` on the CPU, in a tenth of its time: that makes an index for each entry.

    Example:
        >>> repeated(torch.tensor([7, 8]), torch.tensor([2, 1])).tolist()
        [7, 7, 8]
    """
    return torch.from_numpy(values.numpy().repeat(counts.numpy()))


def left_aligned(labels: Tensor, present: Tensor, count: Tensor | None = None) -> Tensor:
    """(N, T) int64: those of each row that are present, from the left on, with `END` behind them.

    Args:
        labels: (N, T) int64.
        present: (N, T) bool.
        count: ``present.cumsum(1)``, where that is known.

    Example:
        >>> present = torch.tensor([[False, True, True]])
        >>> left_aligned(torch.tensor([[0, 7, 8]]), present)[0, :2].tolist()
        [7, 8]
    """
    (rows, width), size = labels.shape, labels.numel()
    count = present.cumsum(1) if count is None else count
    place = count + (torch.arange(rows, device=labels.device) * width - 1)[:, None]
    place = place.masked_fill_(~present, size)  # behind the last row, where it falls off
    room = labels.new_full((size + 1,), END)
    return room.scatter_(0, place.view(-1), labels.reshape(-1))[:-1].view(rows, width)


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


def words_of(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """(N, W) int64, equal where N tensors are, in shape and in every bit; they may be one, (N, ...).

    Example:
        >>> words_of([torch.zeros(2), torch.ones(1), torch.zeros(1, 2)]).tolist()
        [[0, 0, 0], [1, 1065353216, 0], [2, 0, 0]]
    """
    if isinstance(rows, Tensor):
        return as_words(rows.detach()).reshape(len(rows), -1)
    shapes = list(dict.fromkeys(row.shape for row in rows))  # known without a read
    words = []
    for row in rows:
        content = as_words(row.detach()).reshape(-1)
        words.append(nn.functional.pad(content, (1, 0), value=shapes.index(row.shape)))
    return nn.utils.rnn.pad_sequence(words, batch_first=True)

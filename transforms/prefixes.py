"""Shared prefixes of rows: lexicographic order, prefix lengths of neighbours, and the tree they form.

Rows are compared exactly, not by hashes: they are sorted as bytes, on the CPU. Rows from another device are
copied by one device read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .errors import BatchError

END = torch.iinfo(torch.int64).min  # padding after the last token of a row


class PrefixOrder(NamedTuple):
    """Rows in lexicographic order. A row that is a prefix of another comes before it. On the CPU."""

    order: Tensor
    """(N,) int64, row indices in sorted order."""
    shared: Tensor
    """(N,) int64, in sorted order: length of the prefix shared with the previous row; 0 for the first row."""


def prefix_order(labels: Tensor, within: Tensor | None = None, lengths: Tensor | None = None) -> PrefixOrder:
    """Sort rows so that rows with equal prefixes are neighbours. One device read.

    The prefix shared by two rows that are not neighbours is the shortest prefix shared between them.

    Args:
        labels: (N, T) int64, from :func:`left_aligned`.
        within: (N,) int64, on the CPU; rows that differ in it share nothing and are sorted apart.
        lengths: (N,) int64, on the CPU, number of labels of each row; None: those before the first ``END``.

    Example:
        >>> found = prefix_order(torch.tensor([[5, 1, 1], [5, 2, END], [5, 1, 3]]))
        >>> found.order.tolist(), found.shared.tolist()
        ([0, 2, 1], [0, 2, 1])
    """
    labels, (rows, width) = labels.cpu(), labels.shape
    order = torch.arange(rows)
    if rows > 1 and width:
        # Bytes compare as unsigned numbers. The XOR makes END the smallest.
        keys = (labels ^ END).numpy().astype(">i8").view(f"V{8 * width}").ravel().tolist()
        order = torch.tensor(sorted(range(rows), key=keys.__getitem__))
    if within is not None:
        order = order.index_select(0, within.index_select(0, order).sort(stable=True).indices)
    shared = torch.zeros_like(order)
    if rows > 1 and width:
        ordered = labels.index_select(0, order)
        differs = ordered[1:] != ordered[:-1]
        first = torch.from_numpy(differs.numpy().argmax(1))  # index of the first difference
        alike = (~differs.gather(1, first[:, None])).nonzero()[:, 0]
        if lengths is None:
            first[alike] = (ordered[1 + alike] != END).sum(1)
        else:
            first[alike] = lengths[order[1 + alike]]
        shared[1:] = first
    if within is not None:
        part = within.index_select(0, order)
        shared[1:].masked_fill_(part[1:] != part[:-1], 0)
    return PrefixOrder(order, shared)


class PrefixBranch(NamedTuple):
    """A branch of the tree: consecutive tokens that are shared by the same rows."""

    first: int
    """Index in sorted order of the first row of the branch."""
    last: int
    """Index in sorted order after the last row of the branch."""
    begin: int
    """Index of the first token of the branch in these rows."""
    end: int
    """Index after the last token of the branch."""
    from_first: int
    """First row of the parent branch, as above; equal to `from_last` at a root."""
    from_last: int
    """Index after the last row of the parent branch."""


def branches(shared: list[int], lengths: list[int]) -> list[PrefixBranch]:
    """Build the tree of shared prefixes, in depth-first order: each branch is followed by its children.

    A row that is a prefix of another row, or equal to it, has its own empty branch.

    Args:
        shared: `shared` of :class:`PrefixOrder`, with -1 where another tree begins.
        lengths: number of tokens of each row, in sorted order.

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
        while forks and forks[-1][0] > common:  # the next row forks earlier
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
    """List the branches on the path of each row: (S,) int64 row indices, ascending, and (S,) branch indices.

    Args:
        tree: (B, K) int64, :func:`branches`, whose first columns are ``first`` and ``last``.
        order: (N,) int64, `order` of :class:`PrefixOrder`.

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
    """Compute ``torch.repeat_interleave`` on the CPU, ten times faster than torch.

    Example:
        >>> repeated(torch.tensor([7, 8]), torch.tensor([2, 1])).tolist()
        [7, 7, 8]
    """
    return torch.from_numpy(values.numpy().repeat(counts.numpy()))


def left_aligned(labels: Tensor, present: Tensor, count: Tensor | None = None) -> Tensor:
    """Move the present labels of each row to the left, and fill up with `END`: (N, T) int64.

    Args:
        labels: (N, T) int64.
        present: (N, T) bool.
        count: ``present.cumsum(1)``, if it is known.

    Example:
        >>> present = torch.tensor([[False, True, True]])
        >>> left_aligned(torch.tensor([[0, 7, 8]]), present)[0, :2].tolist()
        [7, 8]
    """
    (rows, width), size = labels.shape, labels.numel()
    count = present.cumsum(1) if count is None else count
    place = count + (torch.arange(rows, device=labels.device) * width - 1)[:, None]
    place = place.masked_fill_(~present, size)  # an extra entry that is cut off
    room = labels.new_full((size + 1,), END)
    return room.scatter_(0, place.view(-1), labels.reshape(-1))[:-1].view(rows, width)


def as_words(values: Tensor) -> Tensor:
    """Convert values to integers that are equal if the values are equal bit for bit.

    Example:
        >>> as_words(torch.tensor([1.0, -0.0, 0.0])).tolist()
        [1065353216, -2147483648, 0]
    """
    if values.is_complex():
        raise BatchError(f"inputs must be integers, floats or bools; found {values.dtype}")
    if values.is_floating_point():
        sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        values = values.contiguous().view(sizes[values.element_size()])
    return values.long()


def words_of(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """Convert N tensors, or one (N, ...), to (N, W) int64, equal rows for equal shapes and bits.

    Example:
        >>> words_of([torch.zeros(2), torch.ones(1), torch.zeros(1, 2)]).tolist()
        [[0, 0, 0], [1, 1065353216, 0], [2, 0, 0]]
    """
    if isinstance(rows, Tensor):
        return as_words(rows.detach()).reshape(len(rows), -1)
    shapes = list(dict.fromkeys(row.shape for row in rows))  # needs no device read
    words = []
    for row in rows:
        content = as_words(row.detach()).reshape(-1)
        words.append(nn.functional.pad(content, (1, 0), value=shapes.index(row.shape)))
    return nn.utils.rnn.pad_sequence(words, batch_first=True)

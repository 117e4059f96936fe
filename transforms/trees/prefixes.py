"""Shared prefixes of rows: lexicographic order, prefix lengths of neighbours, and the tree they form.

Rows are compared exactly, not by hashes: they are sorted as bytes, on the CPU. Rows from another device are
copied by one device read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.stages.sequences import END, repeated


class PrefixOrder(NamedTuple):
    """Rows in lexicographic order, on the CPU. A row comes before longer rows that begin with it."""

    order: Tensor
    """(N,) int64, row indices in sorted order."""
    shared: Tensor
    """(N,) int64, in sorted order: length of the prefix shared with the previous row; 0 for the first row."""


def prefix_order(labels: Tensor, within: Tensor | None = None, lengths: Tensor | None = None) -> PrefixOrder:
    """Sort rows so that rows with equal prefixes are neighbours. One device read.

    The prefix that two rows share is the shortest of the prefixes that neighbours between them share.

    Args:
        labels: (N, T) int64, from :func:`left_aligned`.
        within: (N,) int64, on the CPU; rows that differ in it share nothing and are sorted apart.
        lengths: (N,) int64, on the CPU, number of labels of each row; None: labels before ``END``.

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
    """Index in sorted order of the first row of the parent branch; equal to `from_last` at a root."""
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
    forks: list[tuple[int, list[tuple[int, int, int]]]] = []  # open forks: depth, branches so far
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

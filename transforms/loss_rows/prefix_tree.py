"""The tree of tokens that rows make where they begin alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.prefixes import END, prefix_order


class PrefixTree(NamedTuple):
    """The nodes of rows, depth first: a node, then all that come behind it, then its next sibling."""

    node: Tensor
    """(N, T) int64, the node of each token; anything where there is none."""
    row: Tensor
    """(M,) int64, a row that each node is on."""
    depth: Tensor
    """(M,) int64, tokens before it in its rows."""
    parent: Tensor
    """(M,) int64, the node of the token before it; −1 at a root."""
    end: Tensor
    """(M,) int64: the nodes behind node m, and m itself, are those from m to end[m] − 1."""
    tree: Tensor
    """(M,) int64, which tree it is in, from 0."""


def prefix_tree(labels: Tensor) -> PrefixTree:
    """Find the tokens that rows share: equal ones at equal places, with all before them equal, too.

    Rows are sorted (:func:`~headrace.transforms.prefixes.prefix_order`). Of each row those tokens are new
    that it does not share with the row before it; numbered in this order they are a depth-first order of the
    tree. What is sorted is 2 entries a token. One device read, the number of nodes.

    Args:
        labels: (N, T) int64 from the left on, with ``END`` behind; equal where tokens can be shared.

    Example:
        >>> tree = prefix_tree(torch.tensor([[5, 1, 1], [5, 2, END], [5, 1, 3]]))
        >>> tree.node.tolist(), tree.depth.tolist(), tree.parent.tolist(), tree.end.tolist()
        ([[0, 1, 2], [0, 4, 3], [0, 1, 3]], [0, 1, 2, 2, 1], [-1, 0, 1, 1, 0], [5, 4, 3, 4, 5])
    """
    (order, shared), width = prefix_order(labels), labels.shape[1]
    place = torch.arange(width, device=labels.device)
    length = (labels != END).sum(1)
    new = (place >= shared[:, None]) & (place < length.index_select(0, order)[:, None])
    count = new.sum(1).cumsum(0)
    at = new.flatten().nonzero().flatten()
    depth, parent = at % width, torch.full_like(at, -1)
    numbers = torch.arange(len(at), device=at.device)
    node = labels.new_full((labels.numel(),), -1).index_copy_(0, at, numbers).view(labels.shape)
    node = node.cummax(0).values  # what is not new is the node of the row above it
    parent = torch.where(depth == 0, -1, node.flatten().index_select(0, (at - 1).clamp_min(0)))
    by_row = torch.empty_like(node).index_copy_(0, order, node)
    behind = torch.empty_like(count).index_copy_(0, order, count)[:, None].expand_as(by_row)
    present = place < length[:, None]
    inside = torch.where(present, by_row, len(at))
    end = torch.zeros(len(at) + 1, dtype=torch.int64, device=at.device)
    end.scatter_reduce_(0, inside.flatten(), behind.flatten(), "amax")
    row = order.index_select(0, at // max(width, 1))
    return PrefixTree(by_row, row, depth, parent, end[:-1], (depth == 0).cumsum(0) - 1)

"""Trees of rows with common prefixes. Their shared tokens are computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.transforms.stages.sequences import left_aligned

from .prefixes import prefix_order


class Forest:
    """The rows of a batch, sorted by prefix. On the CPU.

    Rows of one tree share at least their first token.

    Args:
        order: (n,) int64, row numbers sorted by prefix (:func:`~headrace.transforms.trees.prefix_order`).
        shared: (n,) int64, the number of leading tokens that each row of `order` shares with the one before.
        lengths: (N,) int64, tokens per row.

    Example:
        >>> lengths = torch.tensor([3, 4, 3, 5])  # rows 0 and 3 share 2 tokens, rows 3 and 1 share 1
        >>> forest = Forest(torch.tensor([0, 3, 1, 2]), torch.tensor([0, 2, 1, 0]), lengths)
        >>> forest.shared(torch.arange(4)).tolist(), forest.shared(torch.tensor([0, 1])).tolist()
        ([0, 1, 0, 2], [0, 1])
    """

    def __init__(self, order: Tensor, shared: Tensor, lengths: Tensor):
        self.lengths, rows = lengths, len(order)
        # Two rows share the minimum of `shared` over all rows after the first of them, up to the second. To
        # look up such a range minimum, `least[k][p]` holds the minimum of the 2^k entries from p on.
        self.position = torch.zeros_like(lengths).scatter_(0, order, torch.arange(rows))
        least, step = [shared], 1
        while 2 * step <= rows:
            wider = least[-1].clone()
            wider[:-step] = torch.minimum(wider[:-step], least[-1][step:])
            least.append(wider)
            step *= 2
        self._least = torch.stack(least)

    def shared(self, rows: Tensor, part: Tensor | None = None) -> Tensor:
        """(n,) int64: how many leading tokens of each row an earlier row in prefix order already has.

        Args:
            rows: (n,) int64, row numbers. A row that is given twice shares all its tokens.
            part: (n,) int64, only rows of the same part share tokens; None: all rows do.
        """
        position = self.position.index_select(0, rows)
        order = position.sort(stable=True).indices
        if part is not None:
            order = order.index_select(0, part.index_select(0, order).sort(stable=True).indices)
        # Two runs of 2^power entries cover a range: one begins at its start, and one ends at its end.
        ascending = position.index_select(0, order)
        before, after = ascending[:-1], ascending[1:]
        size = after - before
        power = torch.frexp(size.clamp_min(1).double()).exponent.long() - 1  # ⌊log₂ size⌋
        start = (before + 1).clamp_max(max(self._least.shape[1] - 1, 0))
        common = torch.minimum(self._least[power, start], self._least[power, after + 1 - (1 << power)])
        common = torch.where(size == 0, self.lengths[rows[order[1:]]], common)
        if part is not None:
            sorted_part = part.index_select(0, order)
            common = torch.where(sorted_part[1:] == sorted_part[:-1], common, 0)
        found = torch.zeros_like(rows)
        found[order[1:]] = common
        return found

    def pieces(self, rows: Tensor, budget: int | None) -> tuple[Tensor, Tensor]:
        """Divide the rows of a minibatch into trees. Cut trees above the budget into pieces.

        Args:
            rows: (n,) int64, row numbers.
            budget: largest number of distinct tokens of a tree; None: no limit. A larger tree is cut in the
                order of prefixes, after as many rows as fit. Each piece computes its shared tokens again. A
                row that is longer than the budget is alone.

        Returns:
            - (n,) int64, the number of the tree or piece of each row.
            - (n,) int64, how many leading tokens of each row another row of its piece computes.
        """
        common = self.shared(rows)
        order = self.position.index_select(0, rows).sort(stable=True).indices
        number, used, pieces = -1, 0, []
        for length, shared in zip(self.lengths[rows[order]].tolist(), common[order].tolist(), strict=True):
            used += length - shared
            if shared == 0 or (budget is not None and used > budget):
                number, used = number + 1, length
            pieces.append(number)
        tree = torch.empty_like(rows).scatter_(0, order, torch.tensor(pieces, dtype=torch.int64))
        return tree, self.shared(rows, tree)


def prefix_ranks(tokens: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """(N, 2) int64: each row's index in prefix order, and how many tokens it shares with the row before.

    Args:
        tokens: (N, T) int64.
        mask: (N, T) bool, the tokens that a row has.
        ids: (N,) int64, only rows of one id share tokens.
    """
    order, shared = prefix_order(left_aligned(tokens, mask), ids)
    by_row = torch.empty(len(order), 2, dtype=torch.int64)
    by_row[order] = torch.stack([torch.arange(len(order)), shared], 1)
    return by_row


def forest_of(by_row: Tensor, rows_of_ranks: Sequence[Tensor], lengths: Tensor) -> Forest:
    """Make the forest of the rows of all ranks.

    Args:
        by_row: (N, 2) int64, the results of :func:`prefix_ranks`, computed for each rank alone.
        rows_of_ranks: the rows of each rank.
        lengths: (N,) int64, tokens per row.
    """
    rank, shared = by_row.unbind(1)
    order = torch.cat([own[rank[own].argsort()] for own in rows_of_ranks])
    return Forest(order, shared[order], lengths)

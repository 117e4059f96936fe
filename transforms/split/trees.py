"""Rows that begin alike, as trees whose shared tokens cost once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Tree = Literal["none", "rollout", "group"]


class Forest:
    """The rows of a batch in the order of their prefixes. On the CPU.

    Rows of one tree share their first token, at least.

    Args:
        order: (n,) int64, the row at each place, of :func:`~headrace.transforms.prefixes.prefix_order`.
        shared: (n,) int64, by place, the tokens that a row shares with the one before.
        lengths: (N,) int64, tokens a row.

    Example:
        >>> lengths = torch.tensor([3, 4, 3, 5])  # rows 0, 3 and 1 begin alike, with 2 and with 1 tokens
        >>> forest = Forest(torch.tensor([0, 3, 1, 2]), torch.tensor([0, 2, 1, 0]), lengths)
        >>> forest.shared(torch.arange(4)).tolist(), forest.shared(torch.tensor([0, 1])).tolist()
        ([0, 1, 0, 2], [0, 1])
    """

    def __init__(self, order: Tensor, shared: Tensor, lengths: Tensor):
        self.lengths, rows = lengths, len(order)
        self.place = torch.zeros_like(lengths).scatter_(0, order, torch.arange(rows))
        least, step = [shared], 1
        while 2 * step <= rows:  # least[k][p] is the least of 2^k entries from p on
            wider = least[-1].clone()
            wider[:-step] = torch.minimum(wider[:-step], least[-1][step:])
            least.append(wider)
            step *= 2
        self._least = torch.stack(least)

    def shared(self, rows: Tensor, part: Tensor | None = None) -> Tensor:
        """(n,) int64: of each row's first tokens, those that another in front of it has, by prefix.

        Args:
            rows: (n,) int64, row numbers; one that is there again shares all it has.
            part: (n,) int64; only rows of one part are computed together. None: all are.
        """
        place = self.place.index_select(0, rows)
        order = place.sort(stable=True).indices
        if part is not None:
            order = order.index_select(0, part.index_select(0, order).sort(stable=True).indices)
        stands = place.index_select(0, order)
        size = stands[1:] - stands[:-1]
        power = torch.frexp(size.clamp_min(1).double()).exponent.long() - 1
        ends = stands[1:] + 1 - (1 << power)
        low = (stands[:-1] + 1).clamp_max(max(self._least.shape[1] - 1, 0))
        common = torch.minimum(self._least[power, low], self._least[power, ends])
        common = torch.where(size == 0, self.lengths[rows[order[1:]]], common)
        if part is not None:
            home = part.index_select(0, order)
            common = torch.where(home[1:] == home[:-1], common, 0)
        return torch.zeros_like(rows).index_copy_(0, order[1:], common)

    def pieces(self, rows: Tensor, budget: int | None) -> tuple[Tensor, Tensor]:
        """Which rows of a minibatch are in one tree, or in one piece of a tree that is above the budget.

        Args:
            rows: (n,) int64, row numbers.
            budget: nodes of a tree at most. A larger one is cut behind as many of its rows as fit, in the
                order of their prefixes, so that what they share is computed once a piece; a row that is
                longer is alone.

        Returns:
            (n,) int64, a number for each piece; and (n,) int64, the tokens of each row that are another's.
        """
        common = self.shared(rows)
        order = self.place.index_select(0, rows).sort(stable=True).indices
        number, used, pieces = -1, 0, []
        for length, same in zip(self.lengths[rows[order]].tolist(), common[order].tolist(), strict=True):
            used += length - same
            if same == 0 or (budget is not None and used > budget):
                number, used = number + 1, length
            pieces.append(number)
        tree = torch.empty_like(rows).scatter_(0, order, torch.tensor(pieces, dtype=torch.int64))
        return tree, self.shared(rows, tree)

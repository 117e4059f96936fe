"""What is known of the rows that wait: a few numbers of each, by which all is decided."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeldRows(NamedTuple):
    """What is known of R rows, (R,) each, on the CPU, in the order of their arrival."""

    first: Tensor
    """int64: which of these rows is the first of the row's rollout; rows of a rollout leave together."""
    slot: Tensor
    """int64: the line of the row's group in the table of groups."""
    rollout: Tensor
    """int64: its rollout's id."""
    segment: Tensor
    """int64: the number of its segment; 0 without `segment_key`."""
    done: Tensor
    """bool: the rollout ends with this row, or its segment does."""
    begins: Tensor
    """int64: 1 where the rollout begins with this row, or its segment does; -1 where nobody says."""
    ends: Tensor
    """int64: how many rows of the rollout are done when it has ended."""
    status: Tensor
    """int64: :class:`Status`."""
    reward: Tensor
    """float64: its reward; 0 where nobody asks."""
    version: Tensor
    """int64: the policy version that acted; 0 where nobody asks."""
    arrival: Tensor
    """int64: rows that came before it. By this the row itself is found."""

    def take(self, rows: Tensor) -> HeldRows:
        """Some of the rows, by numbers or by a mask."""
        if rows.dtype is torch.bool:
            rows = rows.nonzero().flatten()
        taken = HeldRows(*(column.index_select(0, rows) for column in self))
        place = torch.zeros_like(self.first).index_copy_(0, rows, torch.arange(len(rows)))
        return taken._replace(first=place.index_select(0, taken.first))

    def followed_by(self, others: HeldRows) -> HeldRows:
        """These rows and behind them others, whose `first` counts these too."""
        return HeldRows(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    @classmethod
    def nothing(cls) -> HeldRows:
        """No rows."""
        types = {"done": torch.bool, "reward": torch.float64}
        return cls(*(torch.empty(0, dtype=types.get(name, torch.int64)) for name in cls._fields))


def is_among(values: Tensor, ascending: Tensor) -> Tensor:
    """(N,) bool: the value is one of those that ascend.

    Example:
        >>> is_among(torch.tensor([3, 9, 4]), torch.tensor([1, 3, 4])).tolist()
        [True, False, True]
    """
    if len(ascending) == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    place = torch.searchsorted(ascending, values).clamp_(max=len(ascending) - 1)
    return ascending[place] == values

"""The groups that are open: dispatched or begun, and not yet handed out or left."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.ids import first_row, first_row_of_pairs


class OpenGroups(NamedTuple):
    """What is known of G open groups, (G,) each, on the CPU, the oldest first."""

    partition: Tensor
    """int64"""
    group: Tensor
    """int64: its id; unique in its partition."""
    expected: Tensor
    """int64: rollouts with which it was dispatched."""
    refilled: Tensor
    """int64: rollouts that were asked for in place of those that failed or did not come."""
    refills: Tensor
    """int64: how often that was."""
    born_put: Tensor
    """int64: puts until its first row or announcement, that one included."""
    born_time: Tensor
    """float64: seconds on this process's clock."""
    order: Tensor
    """int64: groups that became whole before it did; −1 where it waits."""

    @property
    def ready(self) -> Tensor:
        """(G,) bool: it is whole, and waits for nothing but to be taken."""
        return self.order >= 0

    @property
    def dispatched(self) -> Tensor:
        """(G,) int64: rollouts that were asked for in all."""
        return self.expected + self.refilled

    def take(self, rows: Tensor) -> OpenGroups:
        """Some of the groups, by numbers or by a mask."""
        return OpenGroups(*(column[rows] for column in self))

    def with_new(
        self, partition: Tensor, group: Tensor, expected: Tensor, put: int, time: float
    ) -> OpenGroups:
        """These groups and behind them new ones, (K,) each."""
        zero = torch.zeros_like(group)
        new = (partition, group, expected, zero, zero, zero + put, zero.double() + time, zero - 1)
        return OpenGroups(*(torch.cat(pair) for pair in zip(self, new, strict=True)))

    @classmethod
    def nothing(cls) -> OpenGroups:
        """No groups."""
        types = {"born_time": torch.float64}
        return cls(*(torch.empty(0, dtype=types.get(name, torch.int64)) for name in cls._fields))


def number_groups(table: OpenGroups, partition: Tensor, group: Tensor) -> Tensor:
    """A label for the group of each row: its line in the table, or if it has none G plus its first row.

    Args:
        table: G open groups.
        partition: (N,) int64.
        group: (N,) int64.

    Returns:
        (N,) int64.
    """
    partitions, groups = torch.cat([table.partition, partition]), torch.cat([table.group, group])
    return first_row_of_pairs(first_row(partitions), groups)[len(table.group) :]

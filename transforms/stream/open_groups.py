"""The groups that are open: dispatched or begun, and not yet handed out or left."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.ids import first_row, first_row_of_pairs


class Dispatch(NamedTuple):
    """The groups of rows, (N,) each, on the CPU."""

    partition: Tensor
    group: Tensor
    expected: Tensor
    """How many rollouts the group was dispatched with."""
    label: Tensor
    """Of the group (:func:`number_groups`)."""

    def take(self, rows: Tensor) -> Dispatch:
        """Some of the rows, by numbers or by a mask."""
        return Dispatch(*(column[rows] for column in self))

    def begins(self, known: int) -> Tensor:
        """(N,) bool: the row is the first of a group that is not one of those `known`."""
        return self.label - known == torch.arange(len(self.label))


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

    def with_new(self, came: Dispatch, put: int, time: float) -> OpenGroups:
        """These groups and behind them K new ones."""
        zero = torch.zeros_like(came.group)
        new = (*came[:3], zero, zero, zero + put, zero.double() + time, zero - 1)
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
    return first_in_partition(partitions, groups)[len(table.group) :]


def first_in_partition(partition: Tensor, ids: Tensor) -> Tensor:
    """For each row, the first row with the same id in the same partition; (N,) int64 all, on the CPU."""
    if bool((partition == partition[:1]).all()):
        return first_row(ids)
    return first_row_of_pairs(first_row(partition), ids)


def partitions_in(partition: Tensor) -> list[int]:
    """The partitions there are; rows of one mostly come together."""
    return sorted(set(partition.unique_consecutive().tolist()))

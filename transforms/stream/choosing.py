"""Which whole groups go out, and the order of their rows, which does not depend on that of their arrival."""

from __future__ import annotations

import torch
from torch import Tensor

from .held import HeldRows
from .open_groups import OpenGroups, partitions_in


def choose(groups: OpenGroups, wanted: int | None) -> Tensor | None:
    """Lines of whole groups of one partition, in the order in which they became whole.

    Args:
        groups: the open groups.
        wanted: how many; None: all, and at least one.

    Returns:
        (K,) int64, of the partition in which as many became whole first; None where there are fewer.
    """
    lines = groups.ready.nonzero().flatten()
    lines = lines[groups.order[lines].argsort()]
    partitions = [lines[groups.partition[lines] == p] for p in partitions_in(groups.partition[lines])]
    enough = [lines[: wanted or len(lines)] for lines in partitions if len(lines) >= (wanted or 1)]
    return min(enough, key=lambda lines: int(groups.order[lines[-1]]), default=None)


def in_order(rows: HeldRows, chosen: Tensor) -> HeldRows:
    """The rows of some groups: groups as given, rollouts by id, segments by number or arrival.

    Args:
        rows: those that are held.
        chosen: (K,) int64, the lines of the groups.
    """
    place = torch.full((int(max(chosen.max(), rows.slot.max())) + 1,), -1)
    place[chosen] = torch.arange(len(chosen))
    rows = rows.take((place[rows.slot] >= 0).nonzero().flatten())
    order = torch.arange(len(rows.slot))
    for column in (rows.segment, rows.rollout, place[rows.slot]):  # each sort is stable: the last counts most
        order = order[column[order].argsort(stable=True)]
    return rows.take(order)

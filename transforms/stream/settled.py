"""Which groups are whole, and which never will be: those are settled, and nobody waits for them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.ids import any_by, first_row_of_pairs, is_first, places_by_turn, reduce_by
from headrace.transforms.schema import Status

from .ended import has_ended
from .held import HeldRows
from .open_groups import OpenGroups


class Tally(NamedTuple):
    """How far rollouts and groups are."""

    first: Tensor
    """(R,) int64: the first row of each row's rollout."""
    ended: Tensor
    """(R,) bool: the row's rollout has ended, and did not fail."""
    failed: Tensor
    """(R,) bool: a segment of it failed or was aborted."""
    have: Tensor
    """(G,) int64: the group's rollouts that have ended."""
    lost: Tensor
    """(G,) int64: those that failed."""


def tally(rows: HeldRows, groups: OpenGroups, *, has_segments: bool) -> Tally:
    """Count each group's rollouts, and never rows."""
    first = first_row_of_pairs(rows.slot, rows.rollout)
    failed = any_by(first, (rows.status == Status.FAILED) | (rows.status == Status.ABORTED))
    segment = rows.segment if has_segments else None
    ended = has_ended(first, rows.done, rows.ends, segment, rows.begins) & ~failed
    one, nobody = is_first(first), torch.zeros_like(groups.group)
    have, lost = (nobody.index_add(0, rows.slot, (one & which).long()) for which in (ended, failed))
    return Tally(first, ended, failed, have, lost)


def first_to_end(rows: HeldRows, count: Tally, size: Tensor) -> Tensor:
    """(R,) bool: the row's rollout is one of those of its group that ended first, `size` (G,) of them."""
    number = (is_first(count.first) & count.ended).nonzero().flatten()  # one row for each rollout that ended
    end = reduce_by(count.first, rows.arrival, "amax")[number]
    group = rows.slot[number]
    chosen = torch.zeros_like(count.ended)
    chosen[number] = places_by_turn(group, end).place < size[group]
    return chosen[count.first]


def describe_open_group(slot: int, rows: HeldRows, groups: OpenGroups, count: Tally, puts: int) -> str:
    """An open group in words."""
    mine = (rows.slot == slot) & is_first(count.first)
    worst = reduce_by(count.first, rows.status, "amax")
    over = (count.ended | count.failed)[mine].tolist()
    names = [
        Status(status).name.lower() if is_over else "unfinished"
        for status, is_over in zip(worst[mine].tolist(), over, strict=True)
    ]
    how = ", ".join(f"{number} {name}" for name, number in sorted(Counter(names).items())) or "no rows"
    where = f" of partition {partition}" if (partition := int(groups.partition[slot])) else ""
    have, dispatched = int(count.have[slot]), int(groups.dispatched[slot])
    age = puts - int(groups.born_put[slot])
    return f"group {int(groups.group[slot])}{where} has {have} of {dispatched} ({how}), {age} puts old"

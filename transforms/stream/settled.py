"""Which groups are whole, and which never will be: those are settled, and nobody waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.checks import few
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import any_by, is_first, places_by_turn, reduce_by
from headrace.transforms.schema import Status

from .ended import has_ended
from .held import HeldRows
from .open_groups import OpenGroups

Selector = Callable[[Tensor, int], "Tensor | Sequence[int]"]


class Tally(NamedTuple):
    """How far rollouts and groups are."""

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
    first = rows.first
    failed = any_by(first, (rows.status == Status.FAILED) | (rows.status == Status.ABORTED))
    segment = rows.segment if has_segments else None
    ended = has_ended(first, rows.done, rows.ends, segment, rows.begins) & ~failed
    one, nobody = is_first(first), torch.zeros_like(groups.group)
    have, lost = (nobody.index_add(0, rows.slot, (one & which).long()) for which in (ended, failed))
    return Tally(ended, failed, have, lost)


def first_to_end(rows: HeldRows, count: Tally, size: Tensor) -> Tensor:
    """(R,) bool: the row's rollout is one of those of its group that ended first, `size` (G,) of them."""
    if not bool((count.have > size).any()):
        return count.ended
    number = (is_first(rows.first) & count.ended).nonzero().flatten()  # one row for each rollout that ended
    end = reduce_by(rows.first, rows.arrival, "amax")[number]
    group = rows.slot[number]
    chosen = torch.zeros_like(count.ended)
    chosen[number] = places_by_turn(group, end).place < size[group]
    return chosen[rows.first]


def selected(
    rows: HeldRows, groups: OpenGroups, count: Tally, size: Tensor, ready: Tensor, selector: Selector
) -> Tensor:
    """(R,) bool: the row's rollout has ended, and where its group has more than enough it was selected.

    Args:
        rows: those that are held.
        groups: theirs.
        count: how far they are.
        size: (G,) int64, rollouts that a group is to have.
        ready: (G,) bool, groups for which to ask.
        selector: from the rewards (n,) of a group's rollouts, ordered by id, each that of its last
            segment, and k < n, to the k that stay, as indices (k,) or a mask (n,).

    Raises:
        BatchError: it does not select k.
    """
    rank = torch.empty_like(rows.arrival)
    rank[rows.segment.argsort(stable=True)] = torch.arange(len(rank))  # by number, then by arrival
    ends = (count.ended & (rank == reduce_by(rows.first, rank, "amax"))).nonzero().flatten()
    ends = ends[rows.rollout[ends].argsort()]
    chosen = torch.zeros_like(count.ended)
    chosen[rows.first[ends]] = True
    for slot in (ready & (count.have > size)).nonzero().flatten().tolist():
        of_group = ends[rows.slot[ends] == slot]
        k, answer = int(size[slot]), torch.as_tensor(selector(rows.reward[of_group], int(size[slot])))
        stays = answer.nonzero().flatten() if answer.dtype is torch.bool else answer.long().unique()
        if len(stays) != k or bool(((stays < 0) | (stays >= len(of_group))).any()):
            raise BatchError(
                f"on_surplus selects {k} of the {len(of_group)} rollouts of group {int(groups.group[slot])}, "
                f"as indices or as a mask; it returned {few(answer)}"
            )
        chosen[rows.first[of_group]] = False
        chosen[rows.first[of_group[stays]]] = True
    return chosen[rows.first]


def describe_open_group(slot: int, rows: HeldRows, groups: OpenGroups, count: Tally, puts: int) -> str:
    """An open group in words."""
    mine = (rows.slot == slot) & is_first(rows.first)
    worst = reduce_by(rows.first, rows.status, "amax")
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

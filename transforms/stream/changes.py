"""What becomes of what is held, as functions from one state to the next: who refuses has changed nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.transforms.checks import Rule

from .arriving import Arriving, begin_rule, dispatch_rules, end_rule, row_rules, sibling_rules
from .closed import Closed, close_ids, is_closed
from .ended import comes_again
from .held import HeldRows
from .open_groups import Dispatch, OpenGroups, first_in_partition
from .settled import Selector, Tally, first_to_end, selected

REASONS = ("late", "duplicate", "surplus", "failed", "timeout", "stale", "evicted", "unfinished")
"""Why rows leave; the code of a reason is its place here, from 1."""
LATE, DUPLICATE, SURPLUS, FAILED, TIMEOUT, STALE, EVICTED, UNFINISHED = range(1, len(REASONS) + 1)


class Stream(NamedTuple):
    """All that an assembler knows of what came, but the rows themselves."""

    rows: HeldRows
    groups: OpenGroups
    closed_groups: Closed
    closed_rollouts: Closed
    """Rollouts that ended or failed in groups that are closed."""
    counts: tuple[int, ...] = (0,) * len(REASONS)
    """Rows that left, by reason."""
    received: int = 0
    """Rows that came."""
    puts: int = 0
    idle: int = 0
    """Puts since a group became whole."""
    whole: int = 0
    """Groups that became whole, or were kept."""
    emitted: int = 0
    """Groups that were handed out."""

    @classmethod
    def nothing(cls) -> Stream:
        """What is known before the first row."""
        return cls(HeldRows.nothing(), OpenGroups.nothing(), {}, {})

    def to_plain(self, now: float) -> dict[str, Any]:
        """As dicts, tensors and lists; clocks as ages, since another process has another clock."""
        groups = self.groups._replace(born_time=now - self.groups.born_time)
        return self._asdict() | {"rows": self.rows._asdict(), "groups": groups._asdict()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], now: float) -> Stream:
        """What :meth:`to_plain` made dicts of."""
        groups = OpenGroups(**plain["groups"])
        groups = groups._replace(born_time=now - groups.born_time)
        tables = {"rows": HeldRows(**plain["rows"]), "groups": groups, "counts": tuple(plain["counts"])}
        return cls(**{**plain, **tables})


class Admission(NamedTuple):
    """Rows that come in, before anything is settled."""

    state: Stream
    leaves: Tensor
    """(N,) int64: 0 for rows that are held now, else the code of the reason why they are not."""
    rules: list[Rule]
    """What must hold of the rows for the state to mean anything."""


def admit(state: Stream, new: Arriving, now: float, group_size: int | None, has_segments: bool) -> Admission:
    """Put new rows behind those that wait; leave out those of closed groups, and those that come again.

    Args:
        state: what is known.
        new: rows whose arrival numbers follow those of all rows before.
        now: seconds on the clock.
        group_size: rollouts of a whole group; None: as many as were dispatched.
        has_segments: whether rows have numbers.
    """
    came, label, known = new.dispatch, new.rows.slot, len(state.groups.group)
    over_group = is_closed(state.closed_groups, came.partition, came.group)
    over_rollout = is_closed(state.closed_rollouts, came.partition, new.rows.rollout)
    held = len(state.rows.slot)
    every = state.rows.followed_by(new.rows)
    partition = torch.cat([state.groups.partition[state.rows.slot], came.partition])
    every = every._replace(first=first_in_partition(partition, every.rollout))
    again = comes_again(every.first, every.done, every.ends, every.segment if has_segments else None)[held:]
    waits = every.first[held:] < held  # the row's rollout is held
    again = torch.where(over_group, over_rollout, again)
    is_ready = torch.cat([state.groups.ready, torch.zeros_like(over_group)])[label]
    leaves = torch.zeros_like(label)
    surplus = is_ready & ~waits
    for code, which in ((DUPLICATE, again | is_ready), (SURPLUS, surplus), (LATE, over_group & ~again)):
        leaves = torch.where(which, code, leaves)
    rules = dispatch_rules(state.groups, came, group_size) + row_rules(new.rows)
    elsewhere = over_rollout & ~over_group
    rules += sibling_rules(every, state.groups, came, elsewhere)
    rules += [end_rule(every)] if has_segments else []
    fresh = (came.begins(known) & ~over_group).nonzero().flatten()
    groups = state.groups.with_new(came.take(fresh), state.puts + 1, now)
    line = torch.arange(known + len(label))
    line[known + fresh] = known + torch.arange(len(fresh))
    every = every._replace(slot=torch.cat([state.rows.slot, line[label]]))
    if bool(leaves.any()):
        every = every.take(torch.cat([torch.ones(held, dtype=torch.bool), leaves == 0]))
    rules.append(begin_rule(every))
    after = state._replace(rows=every, groups=groups, received=state.received + len(label))
    return Admission(count_out(after, leaves), leaves, rules)


class Fates(NamedTuple):
    """What becomes of open groups."""

    ready: Tensor
    """(G,) bool: it is whole now, or kept."""
    closed: Tensor
    """(G,) bool: it is given up."""
    refilled: Tensor
    """(G,) int64: rollouts to be asked for."""
    settled: Tensor
    """(G,) bool: all that can come is there, and not enough."""
    old: Tensor
    """(G,) bool: it has waited too long."""
    evicted: Tensor
    """(G,) bool: more groups wait than may, and it is one of the oldest."""
    leaves: Tensor
    """(R,) int64: the code of the reason why the row leaves; 0: it stays."""


def judge(
    state: Stream,
    count: Tally,
    *,
    size: Tensor,
    too_old: Tensor,
    enough: Tensor,
    may_refill: Tensor,
    actions: Mapping[int, str],
    most: int | None,
    selector: Selector | None = None,
) -> Fates:
    """Decide who is whole, who is given up, and which rows go with it.

    Args:
        state: what is known.
        count: how far its rollouts are.
        size: (G,) int64, rollouts of a whole group.
        too_old: (G,) bool, it has waited too long, if it waits.
        enough: (G,) bool, what it has is enough to be kept.
        may_refill: (G,) bool, more rollouts may be asked for.
        actions: by the codes FAILED and TIMEOUT, ``raise``, ``drop``, ``keep`` or ``refill``.
        most: groups that may wait; None: any number.
        selector: chooses among more rollouts than `size`, once all are there (:func:`selected`); None: those
            that ended first.
    """
    waits = ~state.groups.ready
    all_over = count.have + count.lost >= state.groups.dispatched
    whole = waits & (count.have >= size)
    if selector is not None:
        whole &= all_over | too_old
    settled = waits & (count.have < size) & all_over
    old = waits & ~whole & ~settled & too_old
    ready, closed, again = whole.clone(), torch.zeros_like(whole), torch.zeros_like(whole)
    why = torch.where(whole, SURPLUS, 0)
    for code, which in ((FAILED, settled), (TIMEOUT, old)):
        keeps = which & enough if actions[code] == "keep" else torch.zeros_like(which)
        asks = which & may_refill if actions[code] == "refill" else torch.zeros_like(which)
        ready, again, closed = ready | keeps, again | asks, closed | (which & ~keeps & ~asks)
        why = torch.where(which, code, why)
    waiting = waits & ~ready & ~closed
    evicted = waiting & (waiting.long().cumsum(0) <= waiting.sum() - (most or len(waiting)))  # oldest first
    closed, again = closed | evicted, again & ~evicted
    why = torch.where(evicted, EVICTED, why)
    slot = state.rows.slot
    if selector is None:
        chosen = first_to_end(state.rows, count, size)
    else:
        chosen = selected(state.rows, state.groups, count, size, ready, selector)
    left_over = ready[slot] & ~chosen
    leaves = torch.where(closed[slot] | left_over, why[slot], 0)
    leaves = torch.where(left_over & count.failed, FAILED, leaves)
    missing = torch.where(again, size - count.have, 0)
    return Fates(ready, closed, missing, settled, old, evicted, leaves)


def apply_fates(state: Stream, count: Tally, fates: Fates, now: float) -> Stream:
    """The state after what was decided."""
    slot, stays = state.rows.slot, fates.leaves == 0
    latest = torch.full_like(state.groups.group, -1)
    latest = latest.scatter_reduce(0, slot[stays], state.rows.arrival[stays], "amax")
    number = fates.ready.nonzero().flatten()
    number = number[latest[number].argsort(stable=True)]
    order = state.groups.order.index_copy(0, number, state.whole + torch.arange(len(number)))
    asked = fates.refilled > 0
    groups = state.groups._replace(
        order=order,
        refilled=state.groups.refilled + fates.refilled,
        refills=state.groups.refills + asked.long(),
        born_put=torch.where(asked, state.puts, state.groups.born_put),
        born_time=torch.where(asked, now, state.groups.born_time),
    )
    state = count_out(state._replace(groups=groups, whole=state.whole + len(number)), fates.leaves)
    return let_go(state, fates.closed, ~stays, count.ended | count.failed)


def count_out(state: Stream, leaves: Tensor) -> Stream:
    """Count rows that leave, by the codes of their reasons; 0 does not leave."""
    numbers = torch.bincount(leaves, minlength=len(REASONS) + 1).tolist()[1:]
    return state._replace(counts=tuple(a + b for a, b in zip(state.counts, numbers, strict=True)))


def let_go(state: Stream, closed: Tensor, gone: Tensor, over: Tensor) -> Stream:
    """Close groups, and hold some rows no longer; they are counted, or handed out, elsewhere.

    Args:
        state: what is known.
        closed: (G,) bool, groups of which nothing is awaited any more.
        gone: (R,) bool, rows that leave; those of closed groups all do.
        over: (R,) bool, the row's rollout ended or failed: if it comes again, that is no new one.
    """
    rows, groups = state.rows, state.groups
    if not bool(closed.any()):
        return state._replace(rows=rows.take(~gone)) if bool(gone.any()) else state
    leaving = closed[rows.slot]
    ends = (leaving & over).nonzero().flatten()
    line = (~closed).long().cumsum(0) - 1
    left = rows.take(~gone & ~leaving)
    over_in = groups.partition[rows.slot[ends]]
    return state._replace(
        rows=left._replace(slot=line[left.slot]),
        groups=groups.take(~closed),
        closed_groups=close_ids(state.closed_groups, groups.partition[closed], groups.group[closed]),
        closed_rollouts=close_ids(state.closed_rollouts, over_in, rows.rollout[ends]),
    )


def open_groups(state: Stream, came: Dispatch, now: float) -> Stream:
    """Groups that are announced wait from now on."""
    new = came.take(came.begins(len(state.groups.group)))
    return state._replace(groups=state.groups.with_new(new, state.puts, now))


def drop_older(state: Stream, version: int) -> Stream:
    """Let go of whole groups of which a row is older than this policy version."""
    oldest = torch.full_like(state.groups.group, torch.iinfo(torch.int64).max)
    oldest = oldest.scatter_reduce(0, state.rows.slot, state.rows.version, "amin")
    stale = state.groups.ready & (oldest < version)
    gone = stale[state.rows.slot]
    return let_go(count_out(state, torch.where(gone, STALE, 0)), stale, gone, gone)


def drop_all(state: Stream, over: Tensor) -> Stream:
    """Let go of all groups and rows; `over` as in :func:`let_go`."""
    left = count_out(state, torch.full_like(state.rows.slot, UNFINISHED))
    return let_go(left, torch.ones_like(state.groups.ready), torch.ones_like(over), over)

"""All that an assembler knows: groups that are open, ids that are closed, how many rows came and left.

What a put would change is first written down (:class:`StreamPlan`), and then made true at once
(:meth:`Stream.carry_out`): who refuses it has changed nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from .open_groups import NOWHERE, Change, Group, Key, Rollout, Row
from .pieces import RowPiece, let_go

REASONS = ("late", "duplicate", "surplus", "failed", "timeout", "stale", "evicted", "unfinished")
"""Why rows leave."""
LATE, DUPLICATE, SURPLUS, FAILED, TIMEOUT, STALE, EVICTED, UNFINISHED = REASONS

# What a state has of a stream, and of each group and row.
CLOSED = ("closed_groups", "late_groups", "closed_rollouts")
TOTALS = ("received", "puts", "idle", "whole", "emitted", "rejected")
GROUP_COLUMNS = (
    *("partition", "group", "expected", "born_put", "born_time"),
    *("refilled", "refills", "order", "left", "enough"),
)
ROW_COLUMNS = Row._fields[:8]
GONE_COLUMNS = Row._fields[:-1]


class Intervals:
    """Ids that are over. Those that follow one another take the room of two, however many they are.

    Args:
        pairs: (K, 2) int64, the first and the last ids, in order.

    Example:
        >>> ids = Intervals(torch.tensor([[0, 3], [9, 9]]))
        >>> for number in (5, 4, 7):
        ...     ids.add(number)
        >>> 4 in ids, 6 in ids, ids.to_tensor().tolist()
        (True, False, [[0, 5], [7, 7], [9, 9]])
    """

    def __init__(self, pairs: Tensor | None = None):
        # Where intervals begin, and where what is between them does: 0, 4, 9, 10.
        self._edges: list[int] = [] if pairs is None else (pairs + torch.tensor([0, 1])).flatten().tolist()

    def __contains__(self, number: int) -> bool:
        return bisect_right(self._edges, number) % 2 == 1

    def add(self, number: int) -> None:
        """One more."""
        edges, at = self._edges, bisect_right(self._edges, number)
        if at % 2 == 0:
            ends, begins = at > 0 and edges[at - 1] == number, edges[at : at + 1] == [number + 1]
            edges[at - ends : at + begins] = [number] * (not ends) + [number + 1] * (not begins)

    def to_tensor(self) -> Tensor:
        """(K, 2) int64, the first and the last ids, in order."""
        return torch.tensor(self._edges, dtype=torch.int64).view(-1, 2) - torch.tensor([0, 1])


@dataclass(slots=True, eq=False)
class StreamPlan:
    """What would become of all groups: by rows that come, announcements, or time that goes by."""

    stream: Stream
    puts: int
    """Puts, this one included."""
    now: float
    """Seconds on the clock."""
    came: int = 0
    """Rows that come."""
    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """Rows that leave, by reason."""
    changes: dict[Key, Change] = field(default_factory=dict)
    opened: dict[Key, Group] = field(default_factory=dict)
    gone: dict[Key, Rollout] = field(default_factory=dict)
    """Rollouts that have left, of which rows come."""

    def find(self, key: Key, expected: int) -> Change | None:
        """What would become of a group; None: it is closed. One that is new begins, or is announced."""
        stream, change = self.stream, self.changes.get(key)
        if change is not None:
            return change
        group = stream.waiting.get(key)
        if group is None:
            if (whole := stream.ready.get(key[0], OrderedDict()).get(key)) is not None:
                return self.of(whole)  # of which nothing changes
            if key[1] in stream.closed_groups[key[0]]:
                return None
            group = self.opened[key] = Group(*key, expected, self.puts, self.now)
        change = self.changes[key] = self.of(group)
        return change

    def leave(self, row: Row, rollout: Rollout, *, enough: bool) -> str:
        """Plan that a row of a rollout that has left, or is one too many, leaves as the others of it do.

        Args:
            row: that comes.
            rollout: its rollout, as far as it has come.
            enough: nothing is awaited of its group.

        Returns:
            The reason.
        """
        before = rollout.failed
        if before or enough:  # else it is late, and nothing more is known of it
            rollout = self.gone[row.partition, row.rollout] = rollout.copy()
            rollout.add(row._replace(piece=NOWHERE))
        if rollout.failed and not before:  # they were surplus
            self.left[SURPLUS] -= len(rollout.rows) - 1
            self.left[FAILED] += len(rollout.rows) - 1
        return FAILED if rollout.failed else SURPLUS if enough else LATE

    def of(self, group: Group) -> Change:
        """What would become of a group that is open."""
        return self.changes.get(group.key) or Change(group, group.have, group.lost)

    def waiting(self) -> Iterator[Change]:
        """Groups that would still wait, the oldest first."""
        groups = chain(self.stream.waiting.values(), self.opened.values())
        return (change for group in groups if (change := self.of(group)).waits)


class Stream:
    """All that is known of what came."""

    def __init__(self) -> None:
        # To find the first of a plain dict takes long where many have left.
        self.waiting: OrderedDict[Key, Group] = OrderedDict()
        """Groups that are not whole, in the order in which their time began."""
        self.ready: dict[int, OrderedDict[Key, Group]] = {}
        """Whole groups by partition, in the order in which they became whole."""
        self.homes: dict[Key, Key] = {}
        """The group of each rollout that is there, or has left while rows of it may come."""
        self.gone: dict[Key, Rollout] = {}
        """Rollouts that failed or were surplus, and left before all of their rows had come."""
        self.closed_groups: dict[int, Intervals] = defaultdict(Intervals)
        self.late_groups: dict[int, Intervals] = defaultdict(Intervals)
        """Ids by partition; and of these, those of groups that were closed while more of them was awaited."""
        self.closed_rollouts: dict[int, Intervals] = defaultdict(Intervals)
        """Ids by partition, of rollouts that have left and are complete."""
        self.dispatched = 0
        """Rollouts of open groups that were asked for."""
        self.counts = dict.fromkeys(REASONS, 0)
        """Rows that left, by reason."""
        self.received = self.held = 0
        """Rows that came, and those that are there."""
        self.puts = self.idle = 0
        """All of them, and those since a group became whole."""
        self.whole = self.emitted = 0
        """Groups that became whole, or were kept; and those that were handed out."""
        self.rejected = 0
        """Groups that were handed out, and are not trained."""

    def whole_groups(self) -> list[Group]:
        """Those that are ready."""
        return [group for groups in self.ready.values() for group in groups.values()]

    def carry_out(self, plan: StreamPlan) -> None:
        """Make a plan true."""
        gone: list[Row] = []
        for group in plan.opened.values():
            self._open(group)
        for change in plan.changes.values():
            group = change.group
            self.homes.update(((group.partition, number), group.key) for number in change.came)
            group.rollouts.update(change.came)
            group.have, group.lost = change.have, change.lost
            if change.fate == "closed":
                gone += self._close(group, awaited=change.reason != FAILED)
            elif change.fate == "refilled":
                self._refill(group, change.missing, plan)
        ready = [change for change in plan.changes.values() if change.fate == "ready"]
        for change in sorted(ready, key=lambda c: max(c.rollouts[each].last_arrival for each in c.stays)):
            group = change.group
            del self.waiting[group.key]
            self.ready.setdefault(group.partition, OrderedDict())[group.key] = group
            group.order, self.whole = self.whole, self.whole + 1
            group.enough, group.born_put = int(change.reason != TIMEOUT), plan.puts
            gone += self._leave(group, [number for number in group.rollouts if number not in change.stays])
        for (partition, number), rollout in plan.gone.items():
            self._remember(partition, number, rollout)
        self.idle = 0 if ready else self.idle + plan.puts - self.puts
        self.received, self.puts = self.received + plan.came, plan.puts
        self.held += plan.came - sum(plan.left.values())
        for reason, rows in plan.left.items():
            self.counts[reason] += rows
        let_go((row.piece, row.arrival) for row in gone)

    def close(self, groups: Iterable[Group], reason: str = "") -> int:
        """Let go of groups, whose rows are handed out, or counted under a reason, and return how many."""
        gone = [row for group in groups for row in self._close(group)]
        self.held -= len(gone)
        if reason:
            self.counts[reason] += len(gone)
        let_go((row.piece, row.arrival) for row in gone)
        return len(gone)

    def dispatch_again(self, group: Group, missing: int, plan: StreamPlan) -> None:
        """Let go of the rows of a whole group, counted as stale, and wait for as many rollouts anew."""
        del self.ready[group.partition][group.key]
        if not self.ready[group.partition]:
            del self.ready[group.partition]
        self.waiting[group.key] = group
        gone = self._leave(group, list(group.rollouts))
        self.held -= len(gone)
        self.counts[STALE] += len(gone)
        group.order, group.have, group.enough = -1, 0, 1
        group.left = group.lost = group.dispatched
        self._refill(group, missing, plan)
        let_go((row.piece, row.arrival) for row in gone)

    def choose(self, wanted: int | None, most: int | None, newest: int | None) -> list[Group]:
        """Whole groups of one partition, in the order in which they became whole.

        Args:
            wanted: how many; None: all, and at least one.
            most: no more than these.
            newest: the policy version beyond which none is; None: any.

        Returns:
            Those of the partition in which as many became whole first; none where there are fewer.
        """
        chosen = []
        for waiting in self.ready.values():
            groups: Iterable[Group] = waiting.values()
            if newest is not None:
                groups = (group for group in groups if group.newest <= newest)
            some = list(islice(groups, wanted if most is None else most))
            if len(some) >= (wanted or 1):
                chosen.append(some)
        return min(chosen, key=lambda groups: groups[-1].order, default=[])

    def _open(self, group: Group) -> None:
        self.waiting[group.key] = group
        self.dispatched += group.dispatched

    def _refill(self, group: Group, missing: int, plan: StreamPlan) -> None:
        """Ask for more and wait for it, though more than were dispatched failed; its time begins anew."""
        before = group.dispatched
        group.refilled = max(before, group.have + group.lost) + missing - group.expected
        group.refills += 1
        self.dispatched += group.dispatched - before
        group.born_put, group.born_time = plan.puts, plan.now
        self.waiting.move_to_end(group.key)

    def _close(self, group: Group, *, awaited: bool = True) -> list[Row]:
        """Nothing of it is awaited any more. What comes is late where it was awaited, else surplus."""
        if group.is_ready:
            del self.ready[group.partition][group.key]
            if not self.ready[group.partition]:
                del self.ready[group.partition]
            awaited = not group.enough
        else:
            del self.waiting[group.key]
        if awaited:
            self.late_groups[group.partition].add(group.group)
        self.dispatched -= group.dispatched
        self.closed_groups[group.partition].add(group.group)
        return self._leave(group, list(group.rollouts))

    def _leave(self, group: Group, rollouts: Iterable[int]) -> list[Row]:
        rows: list[Row] = []
        for number in rollouts:
            rollout = group.rollouts.pop(number)
            rows += rollout.rows.values()
            if rollout.complete or rollout.failed or (group.is_ready and group.enough):
                self._remember(group.partition, number, rollout)
            else:
                del self.homes[group.partition, number]  # what still comes of it is late
        return rows

    def _remember(self, partition: int, number: int, rollout: Rollout) -> None:
        """Know a rollout that has left again: by its id if all of it has come, else by its rows."""
        key = partition, number
        if rollout.complete:
            self.gone.pop(key, None)
            self.homes.pop(key, None)
            self.closed_rollouts[partition].add(number)
        else:
            self.gone[key] = rollout.without_rows()
            self.homes[key] = partition, next(iter(rollout.rows.values())).group

    # -- as dicts, tensors and lists ------------------------------------------------------------------------

    def to_plain(self, now: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What is known, and the rows; clocks as ages, since another process has another clock."""
        groups = [*self.waiting.values(), *self.whole_groups()]
        rows = sorted((row for group in groups for row in group.rows()), key=lambda row: row.arrival)
        slots = {group.key: slot for slot, group in enumerate(groups)}
        columns = {name: [getattr(row, name) for row in rows] for name in ("rollout", *ROW_COLUMNS)}
        columns["slot"] = [slots[row.partition, row.group] for row in rows]
        table = {name: [getattr(group, name) for group in groups] for name in GROUP_COLUMNS}
        table["born_time"] = [now - group.born_time for group in groups]
        gone = [row for rollout in self.gone.values() for row in rollout.rows.values()]
        state = {name: getattr(self, name) for name in TOTALS} | {
            name: {partition: ids.to_tensor() for partition, ids in getattr(self, name).items()}
            for name in CLOSED
        }
        state |= {
            "rows": {name: _tensor(name, values) for name, values in columns.items()},
            "groups": {name: _tensor(name, values) for name, values in table.items()},
            "gone": {name: _tensor(name, [getattr(row, name) for row in gone]) for name in GONE_COLUMNS},
            "counts": tuple(self.counts.values()),
        }
        return state, [piece.to_plain() for piece in dict.fromkeys(row.piece for row in rows)]

    @classmethod
    def from_plain(
        cls, state: Mapping[str, Any], pieces: Iterable[RowPiece], now: float, *, by_segment: bool
    ) -> Stream:
        """What :meth:`to_plain` made dicts of."""
        stream = cls()
        for name in TOTALS:
            setattr(stream, name, state[name])
        for name in CLOSED:
            closed = {partition: Intervals(pairs) for partition, pairs in state[name].items()}
            getattr(stream, name).update(closed)
        stream.counts = dict(zip(REASONS, state["counts"], strict=True))
        columns = [state["groups"][name].tolist() for name in GROUP_COLUMNS]
        groups = [Group(*values) for values in zip(*columns, strict=True)]
        homes = {arrival: piece for piece in pieces for arrival in piece.place}
        columns = [state["rows"][name].tolist() for name in ("slot", "rollout", *ROW_COLUMNS)]
        for slot, number, *values in zip(*columns, strict=True):
            group, piece = groups[slot], homes.pop(values[1])
            row = Row._make((*values, *group.key, number, group.expected, piece))
            stream.homes[group.partition, number] = group.key
            group.rollouts.setdefault(number, Rollout(row.ends, by_segment)).add(row)
            stream.held += 1
        let_go((piece, arrival) for arrival, piece in homes.items())  # who saved them held them no longer
        columns = [state["gone"][name].tolist() for name in GONE_COLUMNS]
        for fields in zip(*columns, strict=True):
            row = Row._make((*fields, NOWHERE))
            key = row.partition, row.rollout
            stream.homes[key] = row.partition, row.group
            stream.gone.setdefault(key, Rollout(row.ends, by_segment)).add(row)
        for group in sorted(groups, key=lambda group: (group.order, group.born_put)):
            group.have = sum(rollout.ended for rollout in group.rollouts.values())
            group.lost = group.left + sum(rollout.failed for rollout in group.rollouts.values())
            group.born_time = now - group.born_time
            stream._open(group)
            if group.is_ready:
                stream.ready.setdefault(group.partition, OrderedDict())[group.key] = stream.waiting.pop(
                    group.key
                )
        return stream


def _tensor(name: str, values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64 if name in ("born_time", "reward") else torch.int64)

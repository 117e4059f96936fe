"""All that an assembler knows: groups that are open, ids that are closed, how many rows came and left.

What a put would change is first written down (:class:`StreamPlan`), and then made true at once
(:meth:`Stream.carry_out`): who refuses it has changed nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from headrace.transforms.schema import Origin

from .open_groups import NOWHERE, Group, Key, Lane, Rollout, Row
from .pieces import RowPiece, joined_plain, let_go, numbers_column

REASONS = ("late", "duplicate", "surplus", "failed", "timeout", "stale", "evicted", "unfinished", "lost")
"""Why rows leave."""
LATE, DUPLICATE, SURPLUS, FAILED, TIMEOUT, STALE, EVICTED, UNFINISHED, LOST = REASONS

# What a state has of a stream, and of each group. Of a row it has the row itself, which is read again.
CLOSED = ("closed_groups", "late_groups", "closed_rollouts")
TOTALS = ("received", "puts", "idle", "whole", "emitted", "rejected", "lost", "lanes", "passed")
OF_GROUP = ("partition", "group", "expected", "born_put", "refilled", "refills", "order", "left", "enough")


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

    def remove(self, number: int) -> None:
        """One less."""
        edges, at = self._edges, bisect_right(self._edges, number)
        if at % 2 == 1:
            first, last = edges[at - 1] == number, edges[at] == number + 1
            edges[at - first : at + last] = [number] * (not first) + [number + 1] * (not last)

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
    piece: RowPiece = NOWHERE
    """Where those of them are that stay."""
    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """Rows that leave, by reason."""
    groups: dict[Key, Group] = field(default_factory=dict)
    """Copies of groups that change, and new ones."""
    opened: int = 0
    """How many are new."""
    gone: dict[Key, Rollout] = field(default_factory=dict)
    """Rollouts that have left, of which rows come."""
    homes: dict[Key, Key] = field(default_factory=dict)
    """The group of each rollout of which rows come."""
    origins: dict[int, Origin] = field(default_factory=dict)
    """Of the rows that come, by their arrival, where it is stamped on them."""
    rollouts: dict[Lane, set[int]] = field(default_factory=dict)
    """By environment, those of which rows come, and the newest before."""
    lanes: dict[Lane, int] = field(default_factory=dict)
    """The newest rollout of each environment that has gone on to another one."""
    moved: dict[Key, tuple[Row, Origin]] = field(default_factory=dict)
    """By partition and worker, a row of those of which an environment has gone on to another rollout."""
    passed: dict[Key, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """Rollouts that are lost, in words."""
    lost_rows: list[Row] = field(default_factory=list)

    def leave_as_lost(self, rows: Iterable[Row]) -> None:
        """Plan that rows of a group that waits leave."""
        before = len(self.lost_rows)
        self.lost_rows += rows
        self.left[LOST] += len(self.lost_rows) - before

    def find(self, key: Key, expected: int) -> Group | None:
        """A group to change; None: it is closed. One that is new begins, or is announced."""
        stream = self.stream
        if key in self.groups:
            return self.groups[key]
        if key in stream.waiting:
            self.groups[key] = stream.waiting[key].copy()
        elif key in stream.ready.get(key[0], ()):
            return stream.ready[key[0]][key]  # of which nothing changes
        elif key[1] in stream.closed_groups[key[0]]:
            return None
        else:
            self.groups[key] = Group(*key, expected, self.puts, self.now)
            self.opened += 1
        return self.groups[key]

    def leave(self, row: Row, rollout: Rollout, *, enough: bool) -> str:
        """Plan that a row of a rollout that has left, or is one too many, leaves as the others of it do.

        Args:
            row: that comes.
            rollout: its rollout, as far as it has come.
            enough: nothing is awaited of its group.

        Returns:
            The reason.
        """
        before = rollout.failed or rollout.lost
        if before or enough:  # else it is late, and nothing more is known of it
            rollout = self.gone[row.partition, row.rollout] = rollout.copy()
            rollout.add(row._replace(piece=NOWHERE))
        if rollout.failed and not before:  # they were surplus
            self.left[SURPLUS] -= len(rollout.rows) - 1
            self.left[FAILED] += len(rollout.rows) - 1
        return LOST if rollout.lost else FAILED if rollout.failed else SURPLUS if enough else LATE

    def waiting(self) -> Iterator[Group]:
        """Groups that would still wait, the oldest first."""
        every = {**self.stream.waiting, **self.groups}
        return (group for group in every.values() if group.waits)


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
        self.pieces: dict[RowPiece, None] = {}
        """Where rows are, in the order in which they came."""
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
        self.open: OrderedDict[Key, int] = OrderedDict()
        """Rollouts that have begun and not ended, oldest first, and the puts until their first row."""
        self.ended = self.longest = 0
        """Rollouts that ended, and how many puts one took at most from its first row to its last."""
        self.lost = 0
        """Rollouts that were lost on their way."""
        self.lanes: dict[Lane, int] = {}
        """The newest rollout of each environment of which a row has come."""
        self.passed: dict[Key, int] = {}
        """By partition and worker, how many rollouts all environments have left behind, as dispatched."""

    def whole_groups(self) -> list[Group]:
        """Those that are ready."""
        return [group for groups in self.ready.values() for group in groups.values()]

    def carry_out(self, plan: StreamPlan) -> None:
        """Make a plan true."""
        gone: list[Row] = plan.lost_rows
        if plan.piece.place:
            self.pieces[plan.piece] = None
        for key, group in plan.groups.items():
            if key not in self.waiting:
                self.dispatched += group.dispatched
            self.waiting[key] = group
            self.homes.update(((group.partition, number), key) for number in group.came)
            self._age(group, plan.puts)
            if group.fate == "closed":
                gone += self._close(group, awaited=group.reason not in (FAILED, LOST))
            elif group.fate == "refilled":
                self._refill(group, group.missing, plan)
        ready = [group for group in plan.groups.values() if group.fate == "ready"]
        for group in sorted(ready, key=lambda g: max(g.rollouts[each].last_arrival for each in g.stays)):
            del self.waiting[group.key]
            self.ready.setdefault(group.partition, OrderedDict())[group.key] = group
            group.order, self.whole = self.whole, self.whole + 1
            group.enough, group.born_put = group.reason != TIMEOUT, plan.puts
            gone += self._leave(group, [number for number in group.rollouts if number not in group.stays])
        for (partition, number), rollout in plan.gone.items():
            self._remember(partition, number, rollout)
        self.lost += len(plan.lost)
        self.lanes |= plan.lanes
        self.passed |= plan.passed
        self.idle = 0 if ready else self.idle + plan.puts - self.puts
        self.received, self.puts = self.received + plan.came, plan.puts
        self.held += plan.came - sum(plan.left.values())
        for reason, rows in plan.left.items():
            self.counts[reason] += rows
        self._let_go(gone)

    def close(self, groups: Iterable[Group], reason: str = "") -> int:
        """Let go of groups, whose rows are handed out, or counted under a reason, and return how many."""
        gone = [row for group in groups for row in self._close(group)]
        self.held -= len(gone)
        if reason:
            self.counts[reason] += len(gone)
        self._let_go(gone)
        return len(gone)

    def take_back(self, groups: Iterable[Group], rejected: int) -> None:
        """Hold whole groups again that were handed out, of which so many were rejected."""
        for group in groups:
            partition = group.partition
            self.closed_groups[partition].remove(group.group)
            self.late_groups[partition].remove(group.group)
            for number in group.rollouts:
                self.closed_rollouts[partition].remove(number)
                self.homes[partition, number] = group.key
            for row in group.rows():
                self.pieces[row.piece] = None
                self.held += 1
            others = [*self.ready.get(partition, {}).values(), group]
            ordered = sorted(others, key=attrgetter("order"))
            self.ready[partition] = OrderedDict((each.key, each) for each in ordered)
            self.dispatched += group.dispatched
            self.emitted -= 1
        self.rejected -= rejected

    def dispatch_again(self, group: Group, missing: int, plan: StreamPlan) -> None:
        """Let go of the rows of a whole group, counted as stale, and wait for as many rollouts anew."""
        gone = self._leave(group, list(group.rollouts))
        self._no_longer_ready(group)
        self.held -= len(gone)
        self.counts[STALE] += len(gone)
        group = self.waiting[group.key] = group.copy()  # of which no plan says that it is whole
        group.order, group.have, group.enough = -1, 0, True
        group.left = group.lost = group.dispatched
        self._refill(group, missing, plan)
        self._let_go(gone)

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

    def _let_go(self, gone: Iterable[Row]) -> None:
        for piece in let_go((row.piece, row.arrival) for row in gone):
            del self.pieces[piece]

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
            self._no_longer_ready(group)
            awaited = not group.enough
        else:
            del self.waiting[group.key]
        if awaited:
            self.late_groups[group.partition].add(group.group)
        self.dispatched -= group.dispatched
        self.closed_groups[group.partition].add(group.group)
        return self._leave(group, list(group.rollouts))

    def _no_longer_ready(self, group: Group) -> None:
        del self.ready[group.partition][group.key]
        if not self.ready[group.partition]:
            del self.ready[group.partition]

    def _age(self, group: Group, puts: int) -> None:
        """Note which of the rollouts of which rows come have begun, and which have ended."""
        for number in group.came:
            rollout, key = group.rollouts.get(number), (group.partition, number)
            if rollout is None or rollout.complete or rollout.failed:
                born = self.open.pop(key, puts)
                if rollout is not None and rollout.ended:
                    self.ended, self.longest = self.ended + 1, max(self.longest, puts - born)
            else:
                self.open.setdefault(key, puts)

    def _leave(self, group: Group, rollouts: Iterable[int]) -> list[Row]:
        rows: list[Row] = []
        for number in rollouts:
            rollout = group.rollouts.pop(number)
            rows += rollout.rows.values()
            if rollout.complete or rollout.failed or (group.is_ready and group.enough):
                self._remember(group.partition, number, rollout)
            else:
                self.open.pop((group.partition, number), None)
                del self.homes[group.partition, number]  # what still comes of it is late
        return rows

    def _remember(self, partition: int, number: int, rollout: Rollout) -> None:
        """Know a rollout that has left again: by its id if all of it has come, else by its rows."""
        key = partition, number
        self.open.pop(key, None)
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
        state: dict[str, Any] = {name: copy(getattr(self, name)) for name in TOTALS} | {
            "groups": {name: numbers_column(map(attrgetter(name), groups)) for name in OF_GROUP},
            "gone": [list(row[:-1]) for rollout in self.gone.values() for row in rollout.rows.values()],
            "gone_lost": [key for key, rollout in self.gone.items() if rollout.lost],
            "counts": tuple(self.counts.values()),
        }
        ages = [now - group.born_time for group in groups]
        state["groups"]["born_time"] = torch.tensor(ages, dtype=torch.float64)
        for name in CLOSED:
            state[name] = {partition: ids.to_tensor() for partition, ids in getattr(self, name).items()}
        return state, joined_plain(self.pieces)

    @classmethod
    def from_plain(
        cls, state: Mapping[str, Any], rows: Iterable[Row], now: float, *, by_segment: bool
    ) -> Stream:
        """What :meth:`to_plain` made dicts of, with the rows that were read again, in order of arrival."""
        stream = cls()
        for name in TOTALS:
            setattr(stream, name, state.get(name, getattr(stream, name)))  # older ones knew no lost rollouts
        for name in CLOSED:
            closed = {partition: Intervals(pairs) for partition, pairs in state[name].items()}
            getattr(stream, name).update(closed)
        stream.counts |= dict(zip(REASONS, state["counts"]))  # noqa: B905
        known = state["groups"]  # by column; an earlier version saved a dict a group
        if not isinstance(known, list):
            lines = zip(*(column.tolist() for column in known.values()), strict=True)
            known = [dict(zip(known, line, strict=True)) for line in lines]
        groups = {group.key: group for group in (Group(**each) for each in known)}
        for row in rows:
            key = row.partition, row.group
            rollouts = groups[key].rollouts
            if row.rollout not in rollouts:
                rollouts[row.rollout] = Rollout(row.ends, by_segment)
                stream.homes[row.partition, row.rollout] = key
            rollouts[row.rollout].add(row)
            stream.pieces[row.piece] = None
            stream.held += 1
        for values in state["gone"]:
            row = Row._make((*values, NOWHERE))
            stream.homes[row.partition, row.rollout] = row.partition, row.group
            stream.gone.setdefault((row.partition, row.rollout), Rollout(row.ends, by_segment)).add(row)
        for key in state.get("gone_lost", ()):
            stream.gone[key].lost = True
        for group in sorted(groups.values(), key=lambda group: (group.order, group.born_put)):
            group.have = sum(rollout.ended for rollout in group.rollouts.values())
            begun = (number for number, rollout in group.rollouts.items() if not rollout.complete)
            stream.open.update(((group.partition, number), stream.puts) for number in begun)
            group.lost = group.left + sum(rollout.failed for rollout in group.rollouts.values())
            group.born_time, group.enough = now - group.born_time, bool(group.enough)
            stream.dispatched += group.dispatched
            if group.is_ready:
                stream.ready.setdefault(group.partition, OrderedDict())[group.key] = group
            else:
                stream.waiting[group.key] = group
        return stream

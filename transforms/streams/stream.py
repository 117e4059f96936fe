"""The state of an assembler: open groups, closed ids, and counts of rows.

A put first plans its changes (:class:`StreamPlan`), and then applies them all (:meth:`Stream.carry_out`). So
an error while planning changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.table.schema import Origin

from .draws import Draw, dispatched_again, draws_from_plain, plain_draws
from .open_groups import NOWHERE, Group, Key, Lane, Rollout, Row
from .pieces import PUT, Place, RowPiece, joined_plain, let_go, numbers_column
from .steps import Steps
from .survival import Survival

REASONS = (
    *("late", "duplicate", "surplus", "failed", "timeout", "stale", "evicted", "unfinished"),
    *("lost", "undone"),
)
"""Why rows leave."""
LATE, DUPLICATE, SURPLUS, FAILED, TIMEOUT, STALE, EVICTED, UNFINISHED, LOST, UNDONE = REASONS

# The attributes of a stream and of a group in a state dict. Row attributes are read again from the rows.
CLOSED = ("closed_groups", "late_groups", "closed_rollouts")
TOTALS = (
    *("received", "puts", "idle", "whole", "emitted", "lost", "workers", "lanes", "passed"),
    *("renamed", "lost_groups"),
)
OF_GROUP = (
    *("partition", "group", "expected", "born_put", "refilled", "refills", "order", "left"),
    *("enough", "born"),
)


class Intervals:
    """A set of integers, stored as intervals: consecutive ids take two numbers, however many they are.

    Args:
        pairs: (K, 2) int64, the first and the last id of each interval, ascending.

    Example:
        >>> ids = Intervals(torch.tensor([[0, 3], [9, 9]]))
        >>> ids.update([5, 4, 7])
        >>> 4 in ids, 6 in ids, ids.to_tensor().tolist()
        (True, False, [[0, 5], [7, 7], [9, 9]])
    """

    def __init__(self, pairs: Tensor | None = None):
        # Alternating: the first id of an interval, and the first id after it, such as 0, 4, 9, 10.
        self._edges: list[int] = [] if pairs is None else (pairs + torch.tensor([0, 1])).flatten().tolist()

    def __contains__(self, number: int) -> bool:
        return bisect_right(self._edges, number) % 2 == 1

    def add(self, number: int) -> None:
        """Add an id."""
        self._set(number, number + 1, held=True)

    def update(self, numbers: Collection[int]) -> None:
        """Add ids; consecutive ids are added at once."""
        if numbers:
            ordered = sorted(numbers)
            first = after = ordered[0]
            for number in ordered:
                if number > after:
                    self._set(first, after, held=True)
                    first = number
                after = number + 1
            self._set(first, after, held=True)

    def remove(self, number: int) -> None:
        """Remove an id."""
        self._set(number, number + 1, held=False)

    def _set(self, first: int, after: int, *, held: bool) -> None:
        """Add or remove the ids from `first` up to the one before `after`."""
        edges = self._edges
        left, right = bisect_left(edges, first), bisect_right(edges, after)
        edges[left:right] = [first] * (left % 2 != held) + [after] * (right % 2 != held)

    def to_tensor(self) -> Tensor:
        """(K, 2) int64, the first and the last id of each interval, ascending."""
        return torch.tensor(self._edges, dtype=torch.int64).view(-1, 2) - torch.tensor([0, 1])


@dataclass
class StreamPlan:
    """The planned changes to groups, because of new rows, announcements or timeouts."""

    stream: Stream
    puts: int
    """Number of puts, this one included."""
    now: float
    """Seconds on the clock."""
    new: int = 0
    """Number of new rows."""
    piece: RowPiece = NOWHERE
    """The new rows that are taken in."""
    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """Number of rows that leave, by reason."""
    groups: dict[Key, Group] = field(default_factory=dict)
    """Copies of groups that change, and new groups."""
    opened: int = 0
    """Number of new groups."""
    gone: dict[Key, Rollout] = field(default_factory=dict)
    """Rollouts that have left and get new rows."""
    came: dict[Key, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By group: the rollouts that have taken in new rows, without `singles`."""
    singles: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By partition: the group of each new rollout that is held as one number."""
    homes: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By partition: the group of each other rollout of new rows, also if the rows leave."""
    origins: dict[int, Origin] = field(default_factory=dict)
    """The origin of each new row, by arrival, if it is stamped."""
    rollouts: dict[Lane, set[int]] = field(default_factory=dict)
    """By environment: the rollouts with new rows, and the newest rollout before this put."""
    lanes: dict[Lane, int] = field(default_factory=dict)
    """The newest rollout of each environment that has started a rollout in this put."""
    moved: dict[Key, tuple[Row, Origin]] = field(default_factory=dict)
    """By partition and worker: a new row of a worker with an environment in `lanes`."""
    workers: int = 0
    """Number of workers, if the rows are stamped; else 0."""
    passed: dict[Key, int] = field(default_factory=dict)
    """New values for :attr:`Stream.passed`."""
    lost: list[str] = field(default_factory=list)
    """Descriptions of the lost rollouts."""
    lost_rows: list[Row] = field(default_factory=list)
    """Rows of lost rollouts."""

    def leave_as_lost(self, rows: Iterable[Row]) -> None:
        """Plan that rows of a waiting group leave as lost."""
        before = len(self.lost_rows)
        self.lost_rows += rows
        self.left[LOST] += len(self.lost_rows) - before

    def find(self, key: Key, expected: int) -> Group | None:
        """Find a group to change, or open a new one; None if the group is closed."""
        stream = self.stream
        if key in self.groups:
            return self.groups[key]
        if (waiting := stream.waiting.get(key)) is not None:
            self.groups[key] = waiting.copy()
        elif key in stream.ready.get(key[0], ()):
            return stream.ready[key[0]][key]  # not copied: a ready group does not change
        elif key[1] in stream.closed_groups[key[0]]:
            return None
        else:
            self.groups[key] = Group(*key, expected, self.puts, self.now, stream.by_put)
            self.opened += 1
        return self.groups[key]

    def leave(self, row: Row, rollout: Rollout, *, enough: bool) -> str:
        """Plan that a new row leaves, because its rollout has left or its group needs no more rollouts.

        Args:
            row: the new row.
            rollout: the rows of its rollout so far.
            enough: its group needs no more rollouts.

        Returns:
            The reason, the same for all rows of the rollout.
        """
        before = rollout.failed or rollout.lost
        if before or enough:  # otherwise the row is late, and the rollout need not be remembered
            rollout = self.gone[row.partition, row.rollout] = rollout.copy()
            rollout.add(row._replace(piece=NOWHERE))
        if rollout.failed and not before:  # its earlier rows were counted as surplus
            self.left[SURPLUS] -= len(rollout.rows) - 1
            self.left[FAILED] += len(rollout.rows) - 1
        return LOST if rollout.lost else FAILED if rollout.failed else SURPLUS if enough else LATE

    def waiting(self) -> Iterator[Group]:
        """The groups that still wait after this plan, oldest first."""
        every = {**self.stream.waiting, **self.groups}
        return (group for group in every.values() if group.waits)


class Stream:
    """The state of an assembler, without its options."""

    def __init__(self) -> None:
        # An OrderedDict finds its first item fast after many deletions; a plain dict does not.
        self.waiting: OrderedDict[Key, Group] = OrderedDict()
        """Groups that are not whole, in the order in which their timeouts started."""
        self.ready: dict[int, OrderedDict[Key, Group]] = {}
        """Whole groups by partition, in the order in which they became whole."""
        self.homes: dict[int, dict[int, int]] = defaultdict(dict)
        """By partition: the group of each rollout that is held, or has left before all its rows arrived."""
        self.pieces: dict[RowPiece, int] = {}
        """The held rows, in order of arrival, and the number of their put; 0: rows of several puts."""
        self.by_put: dict[int, RowPiece] = {}
        """The held rows of each put, and the rows of a put that is planned."""
        self.gone: dict[Key, Rollout] = {}
        """Failed, surplus and lost rollouts that left before all their rows arrived."""
        self.closed_groups: dict[int, Intervals] = defaultdict(Intervals)
        """Ids of closed groups, by partition."""
        self.late_groups: dict[int, Intervals] = defaultdict(Intervals)
        """Ids of groups that were closed while rollouts were missing, by partition."""
        self.closed_rollouts: dict[int, Intervals] = defaultdict(Intervals)
        """Ids of rollouts that left after all their rows had arrived, by partition."""
        self.counts = dict.fromkeys(REASONS, 0)
        """Number of rows that left, by reason."""
        self.lost_groups: dict[str, int] = {}
        """Number of groups that left without being taken, also those without rows, by reason."""
        self.received = self.held = 0
        """Number of rows that arrived, and that are held."""
        self.puts = self.idle = 0
        """Number of puts, and of puts since a group became whole."""
        self.whole = self.emitted = 0
        """Number of groups that became whole or were kept, and that were taken."""
        self.owed: set[Key] | None = None
        """Announced groups of an earlier process; None: none, or :meth:`unfinished` has returned them."""
        self.renamed = 0
        """Number of rollouts that were dispatched again with a new id."""
        self.steps = Steps()
        """The steps that have taken groups."""
        self.survival = Survival()
        """Counts of trained and lost groups by latency, turns, length and reward."""
        self.open: OrderedDict[Key, int] = OrderedDict()
        """Unfinished rollouts, oldest first, with the number of puts at their first row."""
        self.ended = self.longest = 0
        """Number of ended rollouts, and the greatest number of puts from the first row of one to its last."""
        self.lost = 0
        """Number of lost rollouts."""
        self.workers = 0
        """Number of workers, if rows were stamped; else 0."""
        self.lanes: dict[Lane, int] = {}
        """The newest rollout of each environment with a row."""
        self.passed: dict[Key, int] = {}
        """By partition and worker: how many rollouts, in order of dispatch, all environments are past."""

    def whole_groups(self) -> list[Group]:
        """The groups that are ready, of all partitions."""
        return [group for groups in self.ready.values() for group in groups.values()]

    def carry_out(self, plan: StreamPlan) -> None:
        """Apply a plan."""
        gone = [(row.piece, row.arrival) for row in plan.lost_rows]
        if plan.piece.place:
            self.pieces[plan.piece] = plan.puts
        for partition, singles in plan.singles.items():
            self.homes[partition].update(singles)
            self.ended += len(singles)
        self.survival.begin(plan.groups, plan.now)
        for key, group in plan.groups.items():
            self.waiting[key] = group
            for number in plan.came.get(key, ()):
                self.homes[group.partition][number] = group.group
                self._age(group, number, plan.puts)
            if group.fate == "closed":
                self._count_lost(group.reason)
                if settled := group.reason in (FAILED, LOST):
                    self.survival.end(group, plan.now)
                self.survival.leave([group], group.reason, plan.now)
                gone += self._close(group, awaited=not settled)
            elif group.fate == "refilled":
                self._refill(group, group.missing, plan)
        ready = [group for group in plan.groups.values() if group.fate == "ready"]
        for group in sorted(ready, key=attrgetter("last_arrival")):
            del self.waiting[group.key]
            self.ready.setdefault(group.partition, OrderedDict())[group.key] = group
            group.order, self.whole = self.whole, self.whole + 1
            group.enough, group.born_put = group.reason != TIMEOUT, plan.puts
            self.survival.end(group, plan.now)
            gone += self._leave(group, group.leaving) if group.leaving else []
        for (partition, number), rollout in plan.gone.items():
            self._remember(partition, number, rollout)
        self.lost += len(plan.lost)
        self.lanes |= plan.lanes
        self.workers = plan.workers or self.workers
        self.passed |= plan.passed
        self.idle = 0 if ready else self.idle + plan.puts - self.puts
        self.received, self.puts = self.received + plan.new, plan.puts
        self.held += plan.new - sum(plan.left.values())
        for reason, rows in plan.left.items():
            self.counts[reason] += rows
        self._let_go(gone)

    def close(self, groups: Iterable[Group], reason: str = "", *, stale: Collection[Key] = ()) -> int:
        """Close groups and return their number of rows. Count both under `reason`, if it is given.

        Args:
            groups: whole groups, or all at the end.
            reason: why the groups leave; empty: they are taken.
            stale: groups that are taken with rows that are masked as stale.
        """
        groups = list(groups)
        self.survival.leave(groups, reason, stale=stale)
        if reason:
            self._count_lost(reason, len(groups))
        return self._rows_leave([place for group in groups for place in self._close(group)], reason)

    def close_key(self, key: Key) -> None:
        """Close a group, which need not be held."""
        held = self.waiting if key in self.waiting else self.ready.get(key[0], self.waiting)
        if key in held:
            self._rows_leave(self._close(held[key]), "")
        else:
            self.closed_groups[key[0]].add(key[1])

    def _count_lost(self, reason: str, groups: int = 1) -> None:
        self.lost_groups[reason] = self.lost_groups.get(reason, 0) + groups

    def take_back(self, groups: Iterable[Group]) -> None:
        """Hold groups again that were taken."""
        for group in groups:
            partition = group.partition
            self.closed_groups[partition].remove(group.group)
            self.late_groups[partition].remove(group.group)
            for number in group.rollouts:
                self.closed_rollouts[partition].remove(number)
                self.homes[partition][number] = group.group
            for piece, _ in group.places():
                self.pieces[piece] = 0
                self.held += 1
            others = [*self.ready.get(partition, {}).values(), group]
            ordered = sorted(others, key=attrgetter("order"))
            self.ready[partition] = OrderedDict((each.key, each) for each in ordered)
            self.emitted -= 1

    def dispatch_again(self, group: Group, missing: int, plan: StreamPlan) -> None:
        """Drop the rows of a whole group as stale, and wait for `missing` new rollouts."""
        self._rows_leave(self._leave(group, list(group.members)), STALE)
        self._no_longer_held(group)
        group = self.waiting[group.key] = group.copy()  # a copy's fate is "waits"
        group.order, group.have, group.enough = -1, 0, True
        group.left = group.lost = group.dispatched
        self._refill(group, missing, plan)

    def knows(self, key: Key) -> bool:
        """Whether a group was announced, has rows, or is closed."""
        partition, group = key
        held = key in self.waiting or key in self.ready.get(partition, ())
        return held or group in self.closed_groups[partition]

    def begin(self, version: int | None) -> None:
        """Go on after a restart with the weights of this version; None: no row can be newer."""
        if version is not None:
            self.undo(version)
        for group in (*self.waiting.values(), *self.whole_groups()):
            group.born = min(group.born, self.steps.over)
        self.owed = {group.key for group in self.waiting.values() if group.draw is not None}
        self.survival = Survival(before=[*self.waiting, *(group.key for group in self.whole_groups())])

    def unfinished(self, key: NestedKey) -> list[TensorDictBase]:
        """The draws of owed rollouts that have not ended. Those that have rows get a new id.

        Args:
            key: key of the rollout ids.
        """
        owed, self.owed = self.owed or set(), None
        again: list[tuple[Draw, list[int], int]] = []
        for group in [group for group in self.waiting.values() if group.key in owed and group.draw]:
            draw, missing = cast(Draw, group.draw), group.dispatched - group.have - group.lost
            partition, seen = group.partition, group.rollouts
            unseen = [
                row
                for row, number in zip(draw.at, draw.rollouts, strict=True)
                if number not in seen
                and (partition, number) not in self.gone
                and number not in self.closed_rollouts[partition]
            ][:missing]
            self.drop(group, [n for n, each in seen.items() if not (each.complete or each.failed)], SURPLUS)
            again.append((draw, unseen, missing - len(unseen)))
        found = dispatched_again(again, key, self.renamed)
        self.renamed += sum(fresh for _, _, fresh in again)
        return found

    def undo(self, version: int) -> None:
        """Drop the rollouts with rows of newer versions, whose weights are gone. The rollouts are owed again.

        Groups that were announced after the step of these weights are forgotten: if all were dispatched at
        once, they could not be trained in time.
        """
        for group in [*self.waiting.values(), *self.whole_groups()]:
            if group.draw is not None and group.born > self.steps.over:
                self._forget(group)
                continue
            newer = [
                number
                for number, rollout in group.rollouts.items()
                if any(row.newest > version for row in rollout.rows.values())
            ]
            if newer and group.draw is None:
                self.close([group], UNDONE)
            elif newer:
                if group.is_ready:
                    self._no_longer_held(group)
                    group.order, self.waiting[group.key] = -1, group
                self.drop(group, newer, UNDONE)
                group.have = sum(rollout.ended for rollout in group.rollouts.values())
                group.lost = group.left + sum(rollout.failed for rollout in group.rollouts.values())

    def _forget(self, group: Group) -> None:
        """Forget that a group was announced, and undo its rows."""
        self._rows_leave(group.places(), UNDONE)
        self._no_longer_held(group)
        drawn, partition = () if group.draw is None else group.draw.rollouts, group.partition
        for number in {*group.members, *drawn}:
            self.open.pop((partition, number), None)
            self.gone.pop((partition, number), None)
            self.homes[partition].pop(number, None)
            self.closed_rollouts[partition].remove(number)

    def forget_rows(self, now: float) -> None:
        """Drop all rows. Announced groups then have no rows, and other groups are forgotten."""
        for partition, homes in self.homes.items():
            closed = self.closed_groups[partition]
            for number in [number for number, group in homes.items() if group not in closed]:
                self.gone.pop((partition, number), None)
                del homes[number]
        for group in [*self.waiting.values(), *self.whole_groups()]:
            self._forget(group)
            if group.draw is not None:
                anew = Group(*group.key, group.expected, self.puts, now, self.by_put)
                anew.born, anew.draw = group.born, group.draw
                self.waiting[group.key] = anew

    def drop(self, group: Group, rollouts: Collection[int], reason: str) -> None:
        """Drop rollouts of a waiting group. They are replaced, so their further rows are surplus."""
        gone: list[Place] = []
        for number in rollouts:
            rollout = group.rollouts.pop(number)
            gone += ((row.piece, row.arrival) for row in rollout.rows.values())
            rollout.lost |= reason == UNDONE  # so a row that comes after all is not surplus
            self._remember(group.partition, number, rollout)
        self._rows_leave(gone, reason)

    def choose(
        self, wanted: int | None, most: int | None, newest: int | None, *, by_deadline: bool
    ) -> list[Group]:
        """Choose whole groups of one partition.

        Args:
            wanted: number of groups; None: all, at least one.
            most: upper limit; None: `wanted`.
            newest: newest allowed policy version; None: any.
            by_deadline: choose the groups with the earliest deadlines; else those that became whole first.

        Returns:
            The groups of the partition that had enough first; empty if no partition has enough.
        """
        candidates = []
        for ready in self.ready.values():
            groups: Iterable[Group] = ready.values()
            if newest is not None:
                groups = (group for group in groups if group.newest <= newest)
            groups = self.steps.in_order(groups) if by_deadline else groups
            first = list(islice(groups, wanted if most is None else most))
            if len(first) >= (wanted or 1):
                candidates.append(first)
        return min(candidates, key=lambda groups: groups[-1].order, default=[])

    def _rows_leave(self, gone: Collection[Place], reason: str) -> int:
        """Release rows, and return their number. Count them under `reason`, if it is given."""
        self.held -= len(gone)
        if reason:
            self.counts[reason] += len(gone)
        self._let_go(gone)
        return len(gone)

    def _let_go(self, gone: Iterable[Place]) -> None:
        for piece in let_go(gone):
            self.by_put.pop(self.pieces.pop(piece), None)

    def _refill(self, group: Group, missing: int, plan: StreamPlan) -> None:
        """Wait for `missing` more rollouts, and restart the timeout of the group.

        More rollouts than were dispatched may have failed or been lost.
        """
        group.refilled = max(group.dispatched, group.have + group.lost) + missing - group.expected
        group.refills += 1
        group.born_put, group.born_time = plan.puts, plan.now
        self.waiting.move_to_end(group.key)

    def _close(self, group: Group, *, awaited: bool = True) -> list[Place]:
        """Close a group. Its further rows are late if rollouts were missing (`awaited`), else surplus."""
        self._no_longer_held(group)
        if not group.enough if group.is_ready else awaited:
            self.late_groups[group.partition].add(group.group)
        self.closed_groups[group.partition].add(group.group)
        return self._leave(group, list(group.members))

    def _no_longer_held(self, group: Group) -> None:
        if not group.is_ready:
            del self.waiting[group.key]
            return
        del self.ready[group.partition][group.key]
        if not self.ready[group.partition]:
            del self.ready[group.partition]

    def _age(self, group: Group, number: int, puts: int) -> None:
        """Note whether a rollout with new rows has started, and whether it has ended."""
        rollout, key = group.rollout(number), (group.partition, number)
        if rollout is None or rollout.complete or rollout.failed:
            born = self.open.pop(key, puts)
            if rollout is not None and rollout.ended:
                self.ended, self.longest = self.ended + 1, max(self.longest, puts - born)
        else:
            self.open.setdefault(key, puts)

    def _leave(self, group: Group, rollouts: Iterable[int]) -> list[Place]:
        gone: list[Place] = []
        homes, over = self.homes[group.partition], []
        for number in rollouts:
            rollout = group.members.pop(number)
            if isinstance(rollout, int):
                gone.append((self.by_put[rollout // PUT], rollout))
                over.append(number)
                del homes[number]
                continue
            gone += ((row.piece, row.arrival) for row in rollout.rows.values())
            if rollout.complete or rollout.failed or (group.is_ready and group.enough):
                self._remember(group.partition, number, rollout)
            else:
                self.open.pop((group.partition, number), None)
                del homes[number]  # its further rows are late
        self.closed_rollouts[group.partition].update(over)
        return gone

    def _remember(self, partition: int, number: int, rollout: Rollout) -> None:
        """Remember a rollout that has left: only its id if all rows have arrived, else its rows as well."""
        key = partition, number
        self.open.pop(key, None)
        if rollout.complete:
            self.gone.pop(key, None)
            self.homes[partition].pop(number, None)
            self.closed_rollouts[partition].add(number)
        else:
            self.gone[key] = rollout.without_rows()
            self.homes[partition][number] = next(iter(rollout.rows.values())).group

    # -- as dicts, tensors and lists ------------------------------------------------------------------------

    def to_plain(self, now: float) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The state and the rows. Times are saved as ages, because another process has another clock."""
        groups = [*self.waiting.values(), *self.whole_groups()]
        state: dict[str, Any] = {name: copy(getattr(self, name)) for name in TOTALS} | {
            "groups": {name: numbers_column(map(attrgetter(name), groups)) for name in OF_GROUP},
            "gone": [list(row[:-1]) for rollout in self.gone.values() for row in rollout.rows.values()],
            "gone_lost": [key for key, rollout in self.gone.items() if rollout.lost],
            "counts": tuple(self.counts.values()),
            "steps": self.steps.to_plain(),
            "draws": plain_draws(group.draw for group in groups if group.draw is not None),
        }
        ages = [now - group.born_time for group in groups]
        state["groups"]["born_time"] = torch.tensor(ages, dtype=torch.float64)
        for name in CLOSED:
            state[name] = {partition: ids.to_tensor() for partition, ids in getattr(self, name).items()}
        return state, joined_plain(self.pieces)

    @classmethod
    def from_plain(
        cls, state: Mapping[str, Any], rows: Iterable[tuple[Any, ...]], now: float, options: Mapping[str, Any]
    ) -> Stream:
        """Restore the output of :meth:`to_plain`.

        Args:
            state: as it was saved.
            rows: the values of each held :class:`Row`, in order of arrival.
            now: seconds on the clock.
            options: the options of the assembler that decide how rows are read.
        """
        stream = cls()
        for name in TOTALS:
            setattr(stream, name, state[name])
        for name in CLOSED:
            closed = {partition: Intervals(pairs) for partition, pairs in state[name].items()}
            getattr(stream, name).update(closed)
        stream.counts = dict(zip(REASONS, state["counts"], strict=True))
        stream.steps = Steps.from_plain(state["steps"])
        names, columns = state["groups"].keys(), [column.tolist() for column in state["groups"].values()]
        lines = (dict(zip(names, line, strict=True)) for line in zip(*columns, strict=True))
        groups = {group.key: group for group in (Group(**line, pieces=stream.by_put) for line in lines)}
        for key, draw in draws_from_plain(state["draws"], options).items():
            groups[key].draw = draw
        by_segment = options["segment_key"] is not None
        for row in map(Row._make, rows):
            rollouts = groups[row.partition, row.group].rollouts
            if row.rollout not in rollouts:
                rollouts[row.rollout] = Rollout(row.ends, by_segment)
                stream.homes[row.partition][row.rollout] = row.group
            rollouts[row.rollout].add(row)
            stream.pieces[row.piece] = 0
            stream.held += 1
        for values in state["gone"]:
            row = Row._make((*values, NOWHERE))
            stream.homes[row.partition][row.rollout] = row.group
            stream.gone.setdefault((row.partition, row.rollout), Rollout(row.ends, by_segment)).add(row)
        for key in state["gone_lost"]:
            stream.gone[key].lost = True
        for group in sorted(groups.values(), key=lambda group: (group.order, group.born_put)):
            group.have = sum(rollout.ended for rollout in group.rollouts.values())
            begun = (number for number, rollout in group.rollouts.items() if not rollout.complete)
            stream.open.update(((group.partition, number), stream.puts) for number in begun)
            group.lost = group.left + sum(rollout.failed for rollout in group.rollouts.values())
            group.born_time, group.enough = now - group.born_time, bool(group.enough)
            if group.is_ready:
                stream.ready.setdefault(group.partition, OrderedDict())[group.key] = group
            else:
                stream.waiting[group.key] = group
        return stream

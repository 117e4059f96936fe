"""What is known of rows that wait, by group and rollout: a few numbers of each, by which all is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tensordict import TensorDict

from headrace.transforms.schema import Status

from .pieces import RowPiece

Key = tuple[int, int]
"""Of a group or a rollout: its partition and its id."""
NOWHERE = RowPiece(TensorDict({}, batch_size=[0]), ())
"""Where rows are that have left."""
Lane = tuple[int, int, int]
"""An environment: partition, worker, and its number in the worker."""


class Row(NamedTuple):
    """What is known of a row. Those of a rollout are in order as these are."""

    segment: int
    """The number of its segment; 0 where rows have none."""
    arrival: int
    """How many rows came before it. By this it is found in its piece."""
    done: int
    """1: the rollout ends with this row, or its segment does."""
    begins: int
    """1: the rollout begins with this row, or its segment does; −1: nobody says."""
    ends: int
    """How many rows of its rollout are done when that has ended."""
    status: int
    """:class:`Status`."""
    version: int
    """The policy version that acted; 0 where nobody asks."""
    reward: float
    """0 where nobody asks."""
    partition: int
    group: int
    rollout: int
    expected: int
    """Rollouts with which its group was dispatched."""
    piece: RowPiece
    """Where the row itself is."""


@dataclass(slots=True, eq=False)
class Rollout:
    """The rows of a rollout that are there."""

    ends: int
    """How many of them are done when it has ended."""
    by_segment: bool
    """They have numbers, and arrive in any order; else they arrive in theirs."""
    rows: dict[int, Row] = field(default_factory=dict)
    """By the number of their segment, or by their arrival."""
    dones: int = 0
    complete: bool = False
    """All of its rows have come."""
    failed: bool = False
    """A row of it failed or was aborted."""
    lost: bool = False
    """A row of it was lost on its way, and it has left."""

    def copy(self) -> Rollout:
        """The same, for more rows."""
        known = self.dones, self.complete, self.failed, self.lost
        return Rollout(self.ends, self.by_segment, dict(self.rows), *known)

    def without_rows(self) -> Rollout:
        """What is known of it, without the rows themselves."""
        twin = self.copy()
        twin.rows = {number: row._replace(piece=NOWHERE) for number, row in self.rows.items()}
        return twin

    @property
    def ended(self) -> bool:
        """All of it is there, and it has not failed."""
        return self.complete and not self.failed

    @property
    def last_arrival(self) -> int:
        """Of its rows."""
        return max(row.arrival for row in self.rows.values())

    def has(self, row: Row) -> bool:
        """Whether a row comes again: its rollout has ended, or its segment is there.

        Where rows have numbers, one that arrives behind the end may have been sent before it: only another
        end comes again, or the same number.
        """
        over = self.dones >= self.ends
        return row.segment in self.rows or (over and bool(row.done)) if self.by_segment else over

    def beyond(self, row: Row) -> tuple[int, int] | None:
        """A segment behind the one with which the rollout would end, and that one, by their numbers."""
        if not self.by_segment or self.dones + row.done < self.ends:
            return None
        rows = (row, *self.rows.values())
        last, highest = max(each.segment for each in rows if each.done), max(each.segment for each in rows)
        return (highest, last) if highest > last else None

    def begins_again(self, row: Row) -> bool:
        """Whether the rollout would begin more often than it ends."""
        return row.begins == 1 and sum(each.begins == 1 for each in self.rows.values()) >= self.ends

    def add(self, row: Row) -> None:
        """Take in a row that does not come again."""
        self.rows[row.segment if self.by_segment else row.arrival] = row
        self.dones += row.done
        self.failed |= row.status >= Status.ABORTED
        if self.dones < self.ends:
            return
        # Nothing is missing before the end: no segment, and not the beginning. Segments that end each by
        # themselves begin each by themselves, as many of them.
        rows, once = self.rows, self.ends == 1
        if self.by_segment and len(rows) <= max(rows):
            return
        begun = sum(each.begins for each in rows.values()) if row.begins >= 0 else self.ends
        self.complete = begun == self.ends and (row.begins < 0 or not once or rows[min(rows)].begins == 1)


@dataclass(slots=True, eq=False)
class Group:
    """A group that is dispatched or begun, and not yet handed out or given up; or what would become of it."""

    partition: int
    group: int
    """Its id; unique in its partition."""
    expected: int
    """Rollouts with which it was dispatched."""
    born_put: int
    """Puts until its first row or its announcement, that one included, or until more was asked for, or until
    it was whole."""
    born_time: float
    """The same in seconds, on this process's clock."""
    refilled: int = 0
    """Rollouts that were asked for in place of those that failed or did not come."""
    refills: int = 0
    """How often that was."""
    order: int = -1
    """Groups that became whole before it did; −1 where it waits."""
    left: int = 0
    """Rollouts that left: because they were lost, or too old when it was to be handed out."""
    enough: bool = True
    """Rollouts that come once it is whole are surplus; False: it is kept since it was too old, and they are
    late."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    have: int = 0
    """Rollouts that have ended."""
    lost: int = 0
    """Those that failed or left."""
    came: set[int] = field(default_factory=set)
    """In a plan, rollouts of which rows come."""
    fate: Literal["waits", "ready", "closed", "refilled", "refused"] = "waits"
    """In a plan, what becomes of it."""
    reason: str = ""
    """Why rows leave, if any do."""
    stays: Collection[int] = ()
    """Rollouts that stay where it is ready."""
    missing: int = 0
    """Rollouts to ask for."""

    @property
    def key(self) -> Key:
        """By which it is found."""
        return self.partition, self.group

    @property
    def dispatched(self) -> int:
        """Rollouts that were asked for in all."""
        return self.expected + self.refilled

    @property
    def is_ready(self) -> bool:
        """It is whole, or kept, and waits for nothing but to be taken."""
        return self.order >= 0

    @property
    def waits(self) -> bool:
        """In a plan, whether it waits on."""
        return self.fate in ("waits", "refilled")

    @property
    def newest(self) -> int:
        """The newest policy version of a row."""
        return max(row.version for rollout in self.rollouts.values() for row in rollout.rows.values())

    def copy(self) -> Group:
        """The same, for a plan."""
        known = self.partition, self.group, self.expected, self.born_put, self.born_time
        asked = self.refilled, self.refills, self.order, self.left, self.enough
        return Group(*known, *asked, dict(self.rollouts), self.have, self.lost)

    def moved_to(self, piece: RowPiece) -> Group:
        """The same, with its rows in another piece."""
        twin = self.copy()
        for number, rollout in self.rollouts.items():
            twin.rollouts[number] = rollout.copy()
            moved = {name: row._replace(piece=piece) for name, row in rollout.rows.items()}
            twin.rollouts[number].rows = moved
        return twin

    def rows(self) -> list[Row]:
        """Its rows, in the order in which they go out, whatever that of their arrival."""
        rollouts = (self.rollouts[number] for number in sorted(self.rollouts))
        return [row for rollout in rollouts for row in sorted(rollout.rows.values())]

    def add(self, row: Row, *, by_segment: bool) -> None:
        """Plan to take in a row."""
        if row.rollout not in self.came:
            before = self.rollouts.get(row.rollout)
            self.rollouts[row.rollout] = Rollout(row.ends, by_segment) if before is None else before.copy()
            self.came.add(row.rollout)
        rollout = self.rollouts[row.rollout]
        ended, failed = rollout.ended, rollout.failed
        rollout.add(row)
        self.have += rollout.ended - ended
        self.lost += rollout.failed - failed

    def describe(self, puts: int) -> str:
        """The group in words."""
        names = (
            Status(max(row.status for row in rollout.rows.values())).name.lower()
            if rollout.ended or rollout.failed
            else "unfinished"
            for rollout in self.rollouts.values()
        )
        counts = [*sorted(Counter(names).items()), *([("lost or too old", self.left)] if self.left else [])]
        how = ", ".join(f"{number} {name}" for name, number in counts) or "no rows"
        where = f" of partition {self.partition}" if self.partition else ""
        has = f"{self.have} of {self.dispatched}"
        return f"group {self.group}{where} has {has} ({how}), {puts - self.born_put} puts old"

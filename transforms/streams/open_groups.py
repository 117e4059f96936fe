"""The ids and flags of held rows, by group and rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from math import fsum, isfinite, nan
from operator import attrgetter
from typing import Literal, NamedTuple, cast

from tensordict import TensorDict

from headrace.transforms.table import count_of
from headrace.transforms.table.schema import Status

from .draws import Draw
from .pieces import PUT, Place, RowPiece

Key = tuple[int, int]
"""The partition and the id of a group or a rollout."""
NOWHERE = RowPiece(TensorDict({}, batch_size=[0]), ())
"""The piece of rows that have left."""
NEVER = -(2**62)
"""The birth of groups that were not announced. A birth before the first step is negative."""
Lane = tuple[int, int, int]
"""An environment: its partition, its worker, and its number in the worker."""


class Row(NamedTuple):
    """The ids and flags of a row. Rows of a rollout sort by segment, then by arrival."""

    segment: int
    """Number of the row's segment; 0 without `segment_key`."""
    arrival: int
    """The number of the row's put, times `PUT`, plus its index in the put. `piece` finds the row by it."""
    done: int
    """1: the row's rollout, or its segment, ends with this row."""
    begins: int
    """1: the row's rollout, or its segment, begins with this row; −1: unknown."""
    ends: int
    """Number of done rows that the rollout has at its end."""
    status: int
    """:class:`Status`."""
    version: int
    """Policy version that sampled the row's oldest token; 0 if it is not read."""
    newest: int
    """Policy version that sampled the row's newest token."""
    reward: float
    """0 if it is not read."""
    partition: int
    group: int
    rollout: int
    expected: int
    """Number of rollouts with which the row's group was dispatched."""
    piece: RowPiece
    """The piece that holds the row itself."""


@dataclass(slots=True)
class Rollout:
    """The rows of a rollout that have arrived."""

    ends: int
    """Number of done rows of the rollout at its end."""
    by_segment: bool
    """True: rows have segment numbers and arrive in any order. False: rows arrive in order."""
    rows: dict[int, Row] = field(default_factory=dict)
    """The rollout's rows, by segment number or by arrival."""
    dones: int = 0
    """Number of done rows so far."""
    complete: bool = False
    """All rows have arrived."""
    failed: bool = False
    """The status of a row is failed or aborted."""
    lost: bool = False
    """A row was lost before it arrived, and the rollout has left."""

    def copy(self) -> Rollout:
        """A copy to which rows can be added."""
        known = self.dones, self.complete, self.failed, self.lost
        return Rollout(self.ends, self.by_segment, dict(self.rows), *known)

    def without_rows(self) -> Rollout:
        """A copy that does not keep the rows themselves in memory."""
        twin = self.copy()
        twin.rows = {number: row._replace(piece=NOWHERE) for number, row in self.rows.items()}
        return twin

    @property
    def ended(self) -> bool:
        """Whether all rows have arrived and none has failed."""
        return self.complete and not self.failed

    @property
    def last_arrival(self) -> int:
        """The arrival of the row that arrived last."""
        return next(reversed(self.rows.values())).arrival  # rows are added as they arrive

    def has(self, row: Row) -> bool:
        """Whether a row is a duplicate.

        Without segment numbers, every row after the end is a duplicate. With them, rows that were sent before
        the end may arrive after it. Then only a second end, or a segment number that has arrived already, is
        a duplicate.
        """
        at_end = self.dones >= self.ends
        return row.segment in self.rows or (at_end and bool(row.done)) if self.by_segment else at_end

    def beyond(self, row: Row) -> tuple[int, int] | None:
        """The highest segment number, and the number that ends the rollout; None if this is the highest."""
        if not self.by_segment or self.dones + row.done < self.ends:
            return None
        rows = (row, *self.rows.values())
        last, highest = max(each.segment for each in rows if each.done), max(each.segment for each in rows)
        return (highest, last) if highest > last else None

    def begins_again(self, row: Row) -> bool:
        """Whether the rollout would begin more often than it ends."""
        return row.begins == 1 and sum(each.begins == 1 for each in self.rows.values()) >= self.ends

    def add(self, row: Row) -> None:
        """Add a row that is not a duplicate."""
        self.rows[row.segment if self.by_segment else row.arrival] = row
        self.dones += row.done
        self.failed |= row.status >= Status.ABORTED
        if self.dones < self.ends:
            return
        # Complete if no segment is missing and the beginning has arrived. If segments end independently, each
        # has its own beginning.
        rows, single_end = self.rows, self.ends == 1
        if self.by_segment and len(rows) <= max(rows):
            return
        begun = sum(each.begins for each in rows.values()) if row.begins >= 0 else self.ends
        first_begins = row.begins < 0 or not single_end or rows[min(rows)].begins == 1
        self.complete = begun == self.ends and first_begins


@dataclass(slots=True)
class Group:
    """An open group: it was announced or has rows, and was not taken or closed yet. A plan holds copies."""

    partition: int
    group: int
    """The group's id, unique in its partition."""
    expected: int
    """Number of rollouts with which the group was dispatched."""
    born_put: int
    """Number of the put in which the group's timeout started, by its first row, announcement or refill. Once
    the group is whole, number of the put that made it whole.
    """
    born_time: float
    """The time at which the group's timeout started, in seconds on this process's clock."""
    pieces: Mapping[int, RowPiece]
    """The held rows of all groups, by the number of their put."""
    refilled: int = 0
    """Rollouts that were dispatched in addition, by refills."""
    refills: int = 0
    """Number of refills."""
    order: int = -1
    """Number of groups that became whole before this one; −1 while the group waits."""
    left: int = 0
    """Rollouts that left because they were lost or stale."""
    enough: bool = True
    """Once the group is ready, whether further rollouts are surplus; after a timeout they are late."""
    born: int = NEVER
    """The step at which the group was dispatched, which a refill does not change."""
    draw: Draw | None = None
    """The group's rows in the announcement."""
    members: dict[int, int | Rollout] = field(default_factory=dict)
    """The group's rollouts by id. A rollout of a single ended row is stored as the row's arrival until
    :attr:`rollouts` is read. So it needs no object, which Python's garbage collector would visit repeatedly.
    """
    have: int = 0
    """Rollouts that have ended."""
    lost: int = 0
    """Rollouts that have failed or left."""
    fate: Literal["waits", "ready", "closed", "refilled", "refused"] = "waits"
    """In a plan: what happens to the group."""
    reason: str = ""
    """In a plan: the reason of the group's rows that leave."""
    leaving: Collection[int] = ()
    """In a plan: rollouts that leave the group when it becomes ready."""
    missing: int = 0
    """In a plan: rollouts to refill."""

    @property
    def key(self) -> Key:
        """The partition and the id of the group."""
        return self.partition, self.group

    @property
    def dispatched(self) -> int:
        """Rollouts that were dispatched, with refills."""
        return self.expected + self.refilled

    @property
    def announced(self) -> bool:
        """Whether the group was announced."""
        return self.born > NEVER

    @property
    def is_ready(self) -> bool:
        """Whether the group is whole or kept, so that it can be taken."""
        return self.order >= 0

    @property
    def waits(self) -> bool:
        """In a plan: whether the group still waits for rollouts."""
        return self.fate in ("waits", "refilled")

    @property
    def rollouts(self) -> dict[int, Rollout]:
        """The rollouts of the group, each as an object."""
        for number in self.members:
            self.rollout(number)
        return cast(dict[int, Rollout], self.members)

    def rollout(self, number: int) -> Rollout | None:
        """One rollout of the group, as an object."""
        member = self.members.get(number)
        if isinstance(member, int):
            piece = self.pieces[member // PUT]
            row = Row(**piece.read(member), arrival=member, piece=piece)
            member = self.members[number] = Rollout(row.ends, piece.by_segment)
            member.add(row)
        return member

    @property
    def versions(self) -> list[int]:
        """The policy versions of the group's rows, in the order of :meth:`rows`."""
        found = []
        for number in sorted(self.members):
            member = self.members[number]
            if isinstance(member, int):
                found.append(self.pieces[member // PUT].version(member))
            else:
                found += [row.version for row in sorted(member.rows.values())]
        return found

    @property
    def oldest(self) -> int:
        """The oldest policy version of the group's rows."""
        return min(self.versions)

    @property
    def newest(self) -> int:
        """The newest policy version of the group's rows and of their tokens."""
        found = [
            self.pieces[member // PUT].newest(member)
            if isinstance(member, int)
            else max(row.newest for row in member.rows.values())
            for member in self.members.values()
        ]
        return max(found)

    @property
    def last_arrival(self) -> int:
        """The arrival of the group's last row, except rows of rollouts that are leaving."""
        return max(
            member if isinstance(member, int) else member.last_arrival
            for number, member in self.members.items()
            if number not in self.leaving
        )

    def measures(self) -> dict[str, float]:
        """The greatest ``turns`` and ``length`` of a rollout, and the mean ``reward`` of ended rollouts.

        Turns are rows, at least 1. The length is in tokens of the loss mask. The reward of a rollout is that
        of its last row. Length and reward are left out if rows do not have them. Rewards that are not finite
        are left out, too.
        """
        turns, longest, rewards = 1, -1, []
        for member in self.members.values():
            if isinstance(member, int):
                piece = self.pieces[member // PUT]
                at = piece.place[member]
                length, reward = piece.lengths[at], piece.rewards[at]
            else:
                rows = [(row.piece, row.piece.place[row.arrival]) for row in sorted(member.rows.values())]
                turns, length = max(turns, len(rows)), sum(piece.lengths[at] for piece, at in rows)
                piece, at = rows[-1]
                reward = piece.rewards[at] if member.ended else nan
            if length > longest:
                longest = length
            rewards.append(reward)
        found: dict[str, float] = {"turns": turns}
        if longest >= 0:
            found["length"] = longest
        if rewards := list(filter(isfinite, rewards)):
            found["reward"] = fsum(rewards) / len(rewards)
        return found

    def copy(self) -> Group:
        """A copy of the group for a plan."""
        twin = Group(*KNOWN(self))
        twin.members = self.members.copy()
        return twin

    def moved_to(self, piece: RowPiece) -> Group:
        """A copy of the group with its rows in another piece."""
        twin = self.copy()
        for number, rollout in self.rollouts.items():
            moved = twin.members[number] = rollout.copy()
            moved.rows = {name: row._replace(piece=piece) for name, row in rollout.rows.items()}
        return twin

    def rows(self) -> list[Row]:
        """The rows of the group, sorted by rollout id, segment and arrival."""
        rollouts = (self.rollouts[number] for number in sorted(self.rollouts))
        return [row for rollout in rollouts for row in sorted(rollout.rows.values())]

    def places(self) -> list[Place]:
        """Where the group's rows are, sorted by rollout id, segment and arrival."""
        found = []
        for number in sorted(self.members):
            member = self.members[number]
            if isinstance(member, int):
                found.append((self.pieces[member // PUT], member))
            else:
                found += [(row.piece, row.arrival) for row in sorted(member.rows.values())]
        return found

    def add(self, row: Row, came: set[int], *, by_segment: bool) -> None:
        """Plan to take in a row. `came` has the rollouts that the plan has copied."""
        before = self.rollout(row.rollout)
        rollout = Rollout(row.ends, by_segment) if before is None else before
        if row.rollout not in came:
            rollout = self.members[row.rollout] = rollout.copy()
            came.add(row.rollout)
        ended, failed = rollout.ended, rollout.failed
        rollout.add(row)
        self.have += rollout.ended - ended
        self.lost += rollout.failed - failed

    def describe(self, puts: int) -> str:
        """Describe the group for messages."""
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
        return f"group {self.group}{where} has {has} ({how}), {count_of(puts - self.born_put, 'put')} old"


NAMES = [each.name for each in fields(Group)]
KNOWN = attrgetter(*NAMES[: NAMES.index("fate")])
"""Gets the attributes that a group has outside of a plan."""

"""What the rows of a batch say of themselves, and what must hold of them beside those that wait."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.errors import NUMBER_WORKERS
from headrace.transforms.ids import as_ids, sum_by
from headrace.transforms.schema import (
    EXPECTED_SEGMENTS,
    INIT,
    Status,
    has_key,
    read_column,
    read_flags,
    read_status,
)

from .closed import Closed, is_closed
from .ended import last_segment
from .held import HeldRows
from .open_groups import Dispatch, OpenGroups, number_groups

READER = "GroupAssembler"


class Reads(NamedTuple):
    """By which columns rows say what they are; None: they do not say."""

    group_key: NestedKey
    rollout_key: NestedKey
    expected_key: NestedKey
    partition_key: NestedKey | None
    segment_key: NestedKey | None
    done_key: NestedKey | None
    status_key: NestedKey | None
    version_key: NestedKey | None
    reward_key: NestedKey | None
    group_size: int | None
    """Rollouts of a group that does not say how many it was dispatched with."""

    def numbers(self, batch: TensorDictBase, option: str) -> Tensor:
        """The integers in the column of an option, (N,) int64 on the CPU; 0 where nobody says."""
        key = getattr(self, option, option)
        if key is None:
            return torch.zeros(len(batch), dtype=torch.int64)
        return as_ids(read_column(batch, key, reader=READER, option=option), str(key)).cpu()

    def rewards(self, batch: TensorDictBase) -> Tensor:
        """The rewards, (N,) float64 on the CPU; 0 where nobody asks."""
        if self.reward_key is None:
            return torch.zeros(len(batch), dtype=torch.float64)
        return read_column(batch, self.reward_key, reader=READER, option="reward_key").cpu().double()


class Arriving(NamedTuple):
    """Rows that come, (N,) each, on the CPU."""

    dispatch: Dispatch
    rows: HeldRows
    """Their `slot` is the label of their group."""


def read_dispatch(batch: TensorDictBase, reads: Reads, groups: OpenGroups) -> Dispatch:
    """Read the groups of rows.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: it holds no integers, or more than one a row.
    """
    partition, group = reads.numbers(batch, "partition_key"), reads.numbers(batch, "group_key")
    if reads.group_size is None or has_key(batch, reads.expected_key):
        expected = reads.numbers(batch, "expected_key")
    else:
        expected = torch.full_like(group, reads.group_size)
    return Dispatch(partition, group, expected, number_groups(groups, partition, group))


def read_arriving(batch: TensorDictBase, reads: Reads, groups: OpenGroups, received: int) -> Arriving:
    """Read what rows say of themselves, as :func:`read_dispatch`; `received` rows came before."""
    dispatch = read_dispatch(batch, reads, groups)
    status = read_status(batch, reads.status_key, reader=READER)
    done, ends = torch.ones(len(batch), dtype=torch.bool), torch.ones(len(batch), dtype=torch.int64)
    begins = -ends
    if reads.done_key is not None:
        done = read_flags(batch, reads.done_key, reader=READER, option="done_key").cpu()
        if has_key(batch, INIT):
            begins = read_flags(batch, INIT, reader=READER, option="where rollouts begin").cpu().long()
        if has_key(batch, EXPECTED_SEGMENTS):
            ends = reads.numbers(batch, EXPECTED_SEGMENTS)
    rows = HeldRows(
        first=torch.zeros_like(ends),  # known when they stand behind those that wait
        slot=dispatch.label,
        rollout=reads.numbers(batch, "rollout_key"),
        segment=reads.numbers(batch, "segment_key"),
        done=done,
        begins=begins,
        ends=ends,
        status=torch.zeros_like(ends) if status is None else as_ids(status, "status").cpu(),
        reward=reads.rewards(batch),
        version=reads.numbers(batch, "version_key"),
        arrival=received + torch.arange(len(batch)),
    )
    return Arriving(dispatch, rows)


def dispatch_rules(groups: OpenGroups, came: Dispatch, group_size: int | None) -> list[Rule]:
    """Ids are set, and rows of a group agree on how many rollouts it has."""
    least = group_size or 1
    agreed = torch.cat([groups.expected, came.expected])[came.label]
    return [
        set_rule(came.partition, "partition", "its groups could not be told from others"),
        set_rule(came.group, "group_id", "rows without an id would be compared with one another"),
        Rule(
            (came.expected < least) | (agreed != came.expected),
            lambda row: (
                f"group {int(came.group[row])}: {sorted({int(came.expected[row]), int(agreed[row])})}"
            ),
            f"expected_rollouts is one number ≥ {least} per group; found {{found}}. Do workers disagree?",
        ),
    ]


def announce_rules(groups: OpenGroups, closed: Closed, came: Dispatch, group_size: int | None) -> list[Rule]:
    """What must hold of groups that are announced: they are new."""
    known = came.label < len(groups.group)
    known |= is_closed(closed, came.partition, came.group)
    message = "groups are announced once, before their first row; found {found}. Are ids reused?"
    rule = Rule(known, lambda row: str(int(came.group[row])), message)
    return [*dispatch_rules(groups, came, group_size), rule]


def row_rules(rows: HeldRows) -> list[Rule]:
    """Ids are set and statuses known."""
    return [
        set_rule(rows.rollout, "rollout_id", "rows without an id would be taken for one rollout"),
        set_rule(rows.segment, "segment number", "a rollout has segments 0, 1, …"),
        Rule(
            (rows.status < min(Status)) | (rows.status > max(Status)),
            lambda row: f"{int(rows.status[row])} at row {row}",
            f"status must be one of {', '.join(f'{s.value} {s.name}' for s in Status)}; found {{found}}",
        ),
    ]


def begin_rule(rows: HeldRows) -> Rule:
    """A rollout that waits has begun once, or where its segments end each by themselves as often as they."""
    return Rule(
        sum_by(rows.first, (rows.begins == 1).long()) > rows.ends,
        lambda row: f"rollout {int(rows.rollout[row])}",
        "a rollout begins once (is_init); begun again before it ended: {found}. Its rewards would be added "
        f"up. {NUMBER_WORKERS}",
    )


def end_rule(rows: HeldRows) -> Rule:
    """No segment is behind the one with which its rollout ends."""
    last = last_segment(rows.first, rows.done, rows.segment)
    return Rule(
        (rows.ends == 1) & (last >= 0) & (rows.segment > last),
        lambda row: (
            f"segment {int(rows.segment[row])} of rollout {int(rows.rollout[row])}, "
            f"which ends with {int(last[row])}"
        ),
        f"a rollout ends with its last segment; found {{found}}. Are ids reused? {NUMBER_WORKERS}",
    )


def sibling_rules(rows: HeldRows, homes: OpenGroups, came: Dispatch, over: Tensor) -> list[Rule]:
    """A rollout belongs to one group, also of those that wait, and its rows agree on where it ends.

    Args:
        rows: those that wait and behind them N that come.
        homes: groups of those that wait.
        came: groups of those that come.
        over: (N,) bool, the new row's rollout ended in a group that is closed, and this is another.
    """
    first, waiting = rows.first, len(rows.slot) - len(over)
    torn = rows.slot[first] != rows.slot
    torn[waiting:] |= over

    def group_of(row: int) -> int:
        return int(homes.group[rows.slot[row]] if row < waiting else came.group[row - waiting])

    def groups_of(row: int) -> str:
        homes = sorted({group_of(int(first[row])), group_of(row)})
        closed = " and in one that is closed" if row >= waiting and over[row - waiting] else ""
        return f"rollout {int(rows.rollout[row])} in groups {homes}{closed}"

    def ends_of(row: int) -> str:
        of = first == first[row]
        return f"rollout {int(rows.rollout[row])} ({rows.ends[of].tolist()[:8]})"

    return [
        Rule(
            torn,
            groups_of,
            f"a rollout belongs to one group; found {{found}}. Are ids reused? {NUMBER_WORKERS}",
        ),
        Rule(
            (rows.ends < 1) | (rows.ends[first] != rows.ends),
            ends_of,
            "expected_segments must be one number ≥ 1 per rollout; found {found}",
        ),
    ]

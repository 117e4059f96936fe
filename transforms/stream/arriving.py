"""What the rows of a batch say of themselves, and what must hold of them beside those that wait."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.ids import as_ids, first_row, first_row_of_pairs
from headrace.transforms.schema import (
    EXPECTED_SEGMENTS,
    Status,
    has_key,
    read_column,
    read_flags,
    read_status,
)

from .ended import last_segment
from .held import HeldRows
from .open_groups import OpenGroups, number_groups

READER = "GroupAssembler"


INIT = "is_init"  # True where a rollout begins, by TorchRL's InitTracker


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


class Dispatch(NamedTuple):
    """The groups of rows, (N,) each, on the CPU."""

    partition: Tensor
    group: Tensor
    expected: Tensor
    """How many rollouts the group was dispatched with."""
    label: Tensor
    """Of the group (:func:`number_groups`)."""

    def take(self, rows: Tensor) -> Dispatch:
        """Some of the rows, by numbers or by a mask."""
        return Dispatch(*(column[rows] for column in self))


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
    done = begins = torch.ones(len(batch), dtype=torch.bool)
    ends = torch.ones(len(batch), dtype=torch.int64)
    if reads.done_key is not None:
        done = read_flags(batch, reads.done_key, reader=READER, option="done_key").cpu()
        if has_key(batch, INIT):
            begins = read_flags(batch, INIT, reader=READER, option="where rollouts begin").cpu()
        if has_key(batch, EXPECTED_SEGMENTS):
            ends = reads.numbers(batch, EXPECTED_SEGMENTS)
    rows = HeldRows(
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


def dispatch_rules(
    groups: OpenGroups, came: Dispatch, group_size: int | None, *, announced: bool = False
) -> list[Rule]:
    """Ids are set, rows of a group agree on how many rollouts it has, and it is announced before it comes."""
    known, least = len(groups.group), group_size or 1
    agreed = torch.cat([groups.expected, came.expected])[came.label]
    odd = (came.expected < least) | (agreed != came.expected)
    rules = [
        set_rule(came.partition, "partition", "its groups could not be told from others"),
        set_rule(came.group, "group_id", "rows without an id would be compared with one another"),
        Rule(
            odd,
            lambda row: (
                f"group {int(came.group[row])}: {sorted({int(came.expected[row]), int(agreed[row])})}"
            ),
            f"expected_rollouts is one number ≥ {least} per group; found {{found}}. Do workers disagree?",
        ),
    ]
    if announced:
        message = "groups are announced once, before their first row; found {found}. Are ids reused?"
        rules.append(Rule(came.label < known, lambda row: str(int(came.group[row])), message))
    return rules


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


def sibling_rules(
    held: HeldRows, homes: OpenGroups, new: Arriving, over: Tensor, *, has_segments: bool
) -> list[Rule]:
    """A rollout belongs to one group, also of those that wait, and its rows agree on where it ends.

    Args:
        held: rows that wait.
        homes: their groups.
        new: rows that come.
        over: (N,) bool, the new row's rollout ended in a group that is closed, and this is another.
        has_segments: whether rows have numbers.
    """
    rows = held.followed_by(new.rows)
    partition = torch.cat([homes.partition[held.slot], new.dispatch.partition])
    group = torch.cat([homes.group[held.slot], new.dispatch.group])
    first = first_row_of_pairs(first_row(partition), rows.rollout)
    torn = rows.slot[first] != rows.slot
    torn[len(held.slot) :] |= over

    def groups_of(row: int) -> str:
        homes = sorted({int(group[first[row]]), int(group[row])})
        closed = " and in one that is closed" if row >= len(held.slot) and over[row - len(held.slot)] else ""
        return f"rollout {int(rows.rollout[row])} in groups {homes}{closed}"

    def ends_of(row: int) -> str:
        of = first == first[row]
        return f"rollout {int(rows.rollout[row])} ({rows.ends[of].tolist()[:8]})"

    rules = [
        Rule(torn, groups_of, "a rollout belongs to one group; found {found}. Are ids reused?"),
        Rule(
            (rows.ends < 1) | (rows.ends[first] != rows.ends),
            ends_of,
            "expected_segments must be one number ≥ 1 per rollout; found {found}",
        ),
    ]
    if has_segments:
        last = last_segment(first, rows.done, rows.segment)
        rules.append(
            Rule(
                (rows.ends == 1) & (last >= 0) & (rows.segment > last),
                lambda row: (
                    f"segment {int(rows.segment[row])} of rollout {int(rows.rollout[row])}, "
                    f"which ends with {int(last[row])}"
                ),
                "a rollout ends with its last segment; found {found}. Are ids reused by two workers?",
            )
        )
    return rules

"""Which groups lack rollouts: unique rollouts are counted, and never rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.checks import Rule, enforce, few, identity_rules, same_length
from headrace.transforms.errors import BatchError, listing
from headrace.transforms.ids import any_by, as_ids, first_row, is_first, sum_by
from headrace.transforms.schema import Status

from .finished import Ends, as_ends, finish_rules, finished

STATUSES = [status.value for status in Status]  # as numbers, since enums are not traced
ABORTED, FAILED = Status.ABORTED.value, Status.FAILED.value
NAMES = ", ".join(f"{status.value} {status.name}" for status in Status)


class Presence(NamedTuple):
    """Who is there, per row. Not read yet."""

    present: Tensor
    """(N,) bool: the row's rollout is finished, and no segment of it failed or was aborted."""
    lost: Tensor
    """(N,) bool: a segment of the row's rollout failed or was aborted."""
    have: Tensor
    """(N,) int64: present rollouts of the row's group."""
    expected: Tensor
    """(N,) int64: rollouts with which the row's group was dispatched."""
    is_first: Tensor
    """(N,) bool: one row of each group, its first."""
    rules: list[Rule]
    """What must hold of the rows for these numbers to mean anything."""


class IncompleteGroups(NamedTuple):
    """Groups that lack rollouts, (K,) int64 each."""

    group_id: Tensor
    have: Tensor
    expected: Tensor
    """-1 for a group without rows where the number per group is not known."""


def count_present(
    groups: Tensor, rollouts: Tensor, expected: Tensor, status: Tensor, ends: Ends | None = None
) -> Presence:
    """Count each group's unique rollouts that are finished, and neither failed nor aborted. No device read.

    Args:
        groups: (N,) int64.
        rollouts: (N,) int64; rows that share one are one rollout.
        expected: (N,) int64, rollouts of the row's group when it was dispatched.
        status: (N,) int64, :class:`Status`.
        ends: where rollouts end; None: all are finished.
    """
    first, group_first = first_row(rollouts), first_row(groups)
    lost = any_by(first, (status == FAILED) | (status == ABORTED))
    present = ~lost if ends is None else ~lost & finished(ends, first)
    have = sum_by(group_first, (is_first(first) & present).long())
    sizes = expected.index_select(0, group_first)
    rules = [
        *identity_rules(rollouts, groups, first),
        *([] if ends is None else finish_rules(ends, rollouts, first)),
        Rule(
            (status < STATUSES[0]) | (status > STATUSES[-1]),
            lambda row: f"{int(status[row])} at row {row}",
            f"status must be one of {NAMES}; found {{found}}",
        ),
        Rule(
            (expected < 1) | (sizes != expected),
            lambda row: f"group {int(groups[row])}: {sorted({int(sizes[row]), int(expected[row])})}",
            "expected_rollouts must be one number ≥ 1 per group; found {found}",
        ),
        Rule(
            have > expected,
            lambda row: f"group {int(groups[row])} has {int(have[row])} of {int(expected[row])}",
            "a group cannot have more rollouts than were dispatched; found {found}. Is group_size right, or "
            "are group ids reused between steps?",
        ),
    ]
    return Presence(present, lost, have, expected, is_first(group_first), rules)


def incomplete_groups(
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int],
    *,
    group_size: int | None = None,
    expected_rollouts: Tensor | Sequence[int] | None = None,
    status: Tensor | Sequence[int] | None = None,
    expected_groups: Iterable[int] | None = None,
    done: Tensor | Sequence[bool] | None = None,
    begins: Tensor | Sequence[bool] | None = None,
    segment: Tensor | Sequence[int] | None = None,
    expected_segments: Tensor | Sequence[int] | None = None,
) -> IncompleteGroups:
    """Find the groups that lack rollouts, by counting unique rollout ids and never rows.

    Args:
        group_id: (N,) integers ≥ 0.
        rollout_id: (N,) integers ≥ 0; rows that share one are one rollout.
        group_size: rollouts that each group was dispatched with.
        expected_rollouts: (N,) integers ≥ 1, the same per group; used where `group_size` is None.
        status: (N,) :class:`Status`; failed and aborted rollouts do not count. None: all completed.
        expected_groups: ids that were dispatched; one without a row lacks everything.
        done: (N,) bool, True where a rollout ends; one that does not does not count. None: all have ended.
        begins: (N,) bool, True where a rollout begins; one that does not does not count. Read with `done`.
        segment: (N,) integers, the order of a rollout's segments, which may end each by themselves.
        expected_segments: (N,) integers ≥ 1, the same per rollout: how many of its segments end.

    Returns:
        The incomplete groups in the order of their first rows, then those without rows.

    Raises:
        BatchError: a negative id, a rollout in two groups or that ends twice, more rollouts than expected, an
            unknown status, a group that was not dispatched, nothing to count against. Each names the ids.

    Example:
        >>> short = incomplete_groups([0, 0, 0, 5], [1, 1, 2, 3], group_size=2)
        >>> short.group_id.tolist(), short.have.tolist()
        ([5], [1])
    """
    groups, rollouts, expected, states = as_columns(
        group_id, rollout_id, group_size, expected_rollouts, status
    )
    ends = as_ends(groups, done, begins, segment, expected_segments)
    rows, have = groups.new_empty(0), groups
    if len(groups):
        presence = count_present(groups, rollouts, expected, states, ends)
        enforce(presence.rules)
        have = presence.have
        rows = ((have < expected) & presence.is_first).nonzero().flatten()
    missing = groups.new_tensor(missing_groups(groups, expected_groups))
    nothing = torch.zeros_like(missing)
    return IncompleteGroups(
        torch.cat([groups[rows], missing]),
        torch.cat([have[rows], nothing]),
        torch.cat([expected[rows], nothing + (-1 if group_size is None else group_size)]),
    )


def as_columns(
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int],
    group_size: int | None,
    expected_rollouts: Tensor | Sequence[int] | None,
    status: Tensor | Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups, rollouts, expected rollouts and statuses, (N,) int64 each.

    Raises:
        BatchError: they are no integers or differ in length, or there is nothing to count against.
    """
    groups = as_ids(group_id, "group_id")
    rollouts = as_ids(rollout_id, "rollout_id", device=groups.device)
    if group_size is not None:
        expected = torch.full_like(groups, group_size)
    elif expected_rollouts is not None:
        expected = as_ids(expected_rollouts, "expected_rollouts", device=groups.device)
    else:
        raise BatchError(
            "how many rollouts a group should have is not known: give group_size, or the batch a column "
            "expected_rollouts"
        )
    completed = torch.full_like(groups, int(Status.COMPLETED))
    states = completed if status is None else as_ids(status, "status", device=groups.device)
    same_length(group_id=groups, rollout_id=rollouts, expected_rollouts=expected, status=states)
    return groups, rollouts, expected, states


def missing_groups(groups: Tensor, expected_groups: Iterable[int] | None) -> list[int]:
    """Ids that were dispatched and have no row. Reads the groups' ids, but for None.

    Raises:
        BatchError: a group has rows and was not dispatched.
    """
    if expected_groups is None:
        return []
    dispatched = dict.fromkeys(int(g) for g in expected_groups)
    seen = set(groups.unique().tolist())
    if unknown := sorted(seen - set(dispatched)):
        raise BatchError(
            f"the batch has groups that were not dispatched: {listing(map(str, unknown))}. "
            "Do batches of two steps mix?"
        )
    return [g for g in dispatched if g not in seen]


def describe_group(row: int, groups: Tensor, rollouts: Tensor, status: Tensor, presence: Presence) -> str:
    """The group of a row in words, with how its rollouts ended. Reads the group's rows."""
    rows = groups == groups[row]
    worst: dict[int, int] = {}
    for rollout, state in zip(rollouts[rows].tolist(), status[rows].tolist(), strict=True):
        worst[rollout] = max(state, worst.get(rollout, 0))
    unfinished = rollouts[rows & ~presence.present & ~presence.lost].unique()
    for rollout in unfinished.tolist():
        worst.pop(rollout)
    ends = Counter(Status(state).name.lower() for state in worst.values())
    how = [f"{count} {name}" for name, count in sorted(ends.items())]
    if len(unfinished):
        how.append(f"{len(unfinished)} unfinished: {few(unfinished)}")
    have, expected = int(presence.have[row]), int(presence.expected[row])
    return f"group {int(groups[row])} has {have} of {expected} ({', '.join(how)})"

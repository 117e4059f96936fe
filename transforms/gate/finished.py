"""Which rollouts are there from beginning to end: their rows say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.checks import Rule, describe_segments, end_rules, same_length
from headrace.transforms.errors import NUMBER_WORKERS, BatchError
from headrace.transforms.ids import any_by, as_ids, first_row_of_pairs, last_row, reduce_by, sum_by


class Ends(NamedTuple):
    """What rows say of where rollouts begin and end; (N,) each, None where they say nothing."""

    done: Tensor
    """bool: the rollout ends with this row, or its segment does."""
    begins: Tensor | None = None
    """bool: the rollout begins with this row, or its segment does."""
    segment: Tensor | None = None
    """int64: the number of the row's segment, in order; rows of one segment share it."""
    expected: Tensor | None = None
    """int64: how many segments of the row's rollout end, each by itself."""


def finished(ends: Ends, first: Tensor) -> Tensor:
    """(N,) bool: the row's rollout is there from its beginning to its end. No device read.

    A rollout has ended with its last row. Its segments end each by themselves where `expected` says how many
    there are, or where more than one of them has ended or begun; then all must have. What ends by itself has
    begun by itself: a rollout lacks as many beginnings as it has parts whose first rows are elsewhere.

    Args:
        ends: that break no rule of :func:`finish_rules`.
        first: (N,) int64, the first row of each row's rollout.
    """
    done, begins, segment, expected = ends
    number = sum_by(first, done.long())
    begun = number if begins is None else sum_by(first, begins.long())
    if expected is not None:
        return (number == expected) & (begun == expected)
    once = (number == 1) & (begun == 1)
    if segment is None:
        return once if begins is None else once & begins.index_select(0, first)
    piece = first_row_of_pairs(first, segment)
    each = ~any_by(first, ~any_by(piece, done))
    last = any_by(first, done & (segment == reduce_by(first, segment, "amax")))
    if begins is not None:
        each = each & ~any_by(first, ~any_by(piece, begins))
        last = last & any_by(first, begins & (segment == reduce_by(first, segment, "amin")))
    return each | (last & once)


def finish_rules(ends: Ends, rollouts: Tensor, first: Tensor) -> list[Rule]:
    """A rollout ends once, with its last row; segments that end each by themselves likewise.

    Args:
        ends: what rows say.
        rollouts: (N,) int64.
        first: (N,) int64, the first row of each row's rollout.
    """
    done, begins, segment, expected = ends
    rules = [] if begins is None else begin_rules(begins, rollouts, first, segment, expected)
    if expected is not None:
        rules.append(
            Rule(
                (expected < 1) | (expected.index_select(0, first) != expected),
                describe_segments(rollouts, expected),
                "expected_segments must be one number ≥ 1 per rollout; found {found}",
            )
        )
    rules += end_rules(rollouts, first, done=done, segment=segment, expected=expected)
    piece = first if segment is None else first_row_of_pairs(first, segment)
    beyond = done & (last_row(piece) != torch.arange(len(done), device=done.device))
    if expected is not None and segment is None:  # parts in any order: nothing is behind the last end
        complete = sum_by(first, done.long()) == expected
        beyond = complete & ~done.index_select(0, last_row(first))
    beyond_rule = Rule(
        beyond,
        describe_segments(rollouts, done),
        "a rollout ends with its last row; found rows behind the end (True) in {found}. Are ids reused by "
        f"two workers? {NUMBER_WORKERS}. If the rows are in another order, name the column that numbers them "
        "(segment_key)",
    )
    return [*rules, beyond_rule]


def begin_rules(
    begins: Tensor, rollouts: Tensor, first: Tensor, segment: Tensor | None, expected: Tensor | None
) -> list[Rule]:
    """A rollout begins once, or each of its segments does: a second attempt would be added to the first."""
    if expected is not None and segment is None:
        more = sum_by(first, begins.long()) > expected
    else:
        piece = first if segment is None else first_row_of_pairs(first, segment)
        more = begins & (sum_by(piece, begins.long()) > 1)
    message = (
        "a rollout begins once; found more beginnings (True) in {found}. Was it begun anew under the same "
        f"id? The rewards of both attempts would be added up. {NUMBER_WORKERS}. Where segments begin each by "
        "themselves, as sub-agents do, give the batch a column expected_segments, or name the gate's "
        "segment_key"
    )
    return [Rule(more, describe_segments(rollouts, begins), message)]


def as_ends(
    like: Tensor,
    done: Tensor | Sequence[bool] | None,
    begins: Tensor | Sequence[bool] | None = None,
    segment: Tensor | Sequence[int] | None = None,
    expected: Tensor | Sequence[int] | None = None,
) -> Ends | None:
    """What rows say of their ends, on the device of `like` (N,); None where they say nothing.

    Raises:
        BatchError: they are no bools or integers, or differ in length.
    """
    if done is None:
        return None
    ends = Ends(
        done=_flags(done, "done", like.device),
        begins=None if begins is None else _flags(begins, "begins", like.device),
        segment=None if segment is None else as_ids(segment, "segment", device=like.device),
        expected=None if expected is None else as_ids(expected, "expected_segments", device=like.device),
    )
    same_length(rollout_id=like, **ends._asdict())
    return ends


def _flags(values: Tensor | Sequence[bool], name: str, device: torch.device) -> Tensor:
    flags = values if isinstance(values, Tensor) else torch.tensor(values, device=device)
    if flags.dtype is not torch.bool and len(flags):
        raise BatchError(f"{name} must be bool, one a row; got {flags.dtype}")
    return flags.reshape(-1).bool()

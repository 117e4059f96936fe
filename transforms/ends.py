"""Where rollouts begin and end, as their rows say, and which are there from beginning to end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import NUMBER_WORKERS
from .ids import Ids
from .rows import Rows
from .schema import EXPECTED_SEGMENTS, FINISHED

MORE_ENDS = (
    "found more ends (True) in {found}. Are ids reused by two workers, or rows repeated by a sampler? Their "
    f"rewards would be added up. {NUMBER_WORKERS}."
)


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


def finished(ends: Ends, rollouts: Ids) -> Tensor:
    """(n,) bool: the rollout is there from its beginning to its end.

    A rollout has ended with its last row. Its segments end each by themselves where `expected` says how many
    there are, or where more than one of them has ended or begun; then all must have. What ends by itself has
    begun by itself: a rollout lacks as many beginnings as it has parts whose first rows are elsewhere.

    Args:
        ends: that :func:`require_ends` has accepted.
        rollouts: the ids of the rows.
    """
    done, begins, segment, expected = ends
    number = rollouts.sum(done)
    begun = number if begins is None else rollouts.sum(begins)
    if expected is not None:
        wanted = rollouts.max(expected)
        return (number == wanted) & (begun == wanted)
    once = (number == 1) & (begun == 1)
    if segment is None:
        return once if begins is None else once & begins[rollouts.first]
    piece = rollouts.paired_with(Ids(segment))
    each = rollouts.all(piece.spread(piece.any(done)))
    last = rollouts.any(done & (segment == rollouts.spread(rollouts.max(segment))))
    if begins is not None:
        each = each & rollouts.all(piece.spread(piece.any(begins)))
        last = last & rollouts.any(begins & (segment == rollouts.spread(rollouts.min(segment))))
    return each | (last & once)


def require_ends(rows: Rows, ends: Ends) -> None:
    """A rollout begins once and ends once, with its last row; segments that end by themselves likewise.

    Raises:
        BatchError: a rollout does not, with its rows.
    """
    done, begins, segment, expected = ends
    rollouts = rows.rollouts.everyone
    piece = rollouts if segment is None else rollouts.paired_with(Ids(segment))
    if begins is not None:
        begun = piece.spread(piece.sum(begins))
        together = expected is not None and segment is None
        rows.require(
            begun <= (expected if together else 1),
            "a rollout begins once; found more beginnings (True) in {found}. Was it begun anew under the "
            f"same id? The rewards of both attempts would be added up. {NUMBER_WORKERS}. Where segments "
            "begin each by themselves, as sub-agents do, give the batch a column expected_segments, or name "
            "the gate's segment_key",
            lambda row: rows.segments(row, begins),
        )
    if expected is not None:
        rows.require(
            (expected >= 1) & (rollouts.spread(rollouts.min(expected)) == expected),
            "expected_segments must be one number ≥ 1 per rollout; found {found}",
            lambda row: rows.segments(row, expected),
        )
    require_single_ends(rows, ends)
    last = torch.zeros(piece.n, dtype=torch.int64).scatter_reduce_(
        0, piece.of, torch.arange(len(done)), "amax", include_self=False
    )
    beyond = done & (piece.spread(last) != torch.arange(len(done)))
    if expected is not None and segment is None:  # parts in any order: nothing is behind the last end
        complete = rollouts.spread(rollouts.sum(done)) == expected
        beyond = complete & ~done[piece.spread(last)]
    rows.require(
        ~beyond,
        "a rollout ends with its last row; found rows behind the end (True) in {found}. Are ids reused by "
        f"two workers? {NUMBER_WORKERS}. If the rows are in another order, name the column that numbers them "
        "(segment_key)",
        lambda row: rows.segments(row, done),
    )


def require_single_ends(rows: Rows, ends: Ends) -> None:
    """A rollout ends once, but where its segments end each by themselves, and then each of them once.

    Raises:
        BatchError: one ends more often, with its rows.
    """
    done, _, segment, expected = ends
    rollouts = rows.rollouts.everyone

    def describe(row: int) -> str:
        return rows.segments(row, done)

    if expected is not None:
        rows.require(
            rollouts.spread(rollouts.sum(done)) <= expected,
            f"a rollout ends as often as expected_segments says; {MORE_ENDS}",
            describe,
        )
    if expected is None or segment is not None:
        piece = rollouts if segment is None else rollouts.paired_with(Ids(segment))
        rows.require(
            ~done | (piece.spread(piece.sum(done)) <= 1),
            f"a rollout ends once; {MORE_ENDS} Where segments end each by themselves, as sub-agents do, "
            "give the batch a column expected_segments, or name the gate's segment_key",
            describe,
        )


def require_unseen_ends(rows: Rows) -> None:
    """:func:`require_single_ends` of a batch that says where rollouts end, and that no gate has looked at."""
    if rows.has("done") and not rows.has(FINISHED):
        has_number = rows.has("expected_segments")
        expected = rows.integers("expected_segments", EXPECTED_SEGMENTS) if has_number else None
        require_single_ends(rows, Ends(rows.flags("done"), expected=expected))

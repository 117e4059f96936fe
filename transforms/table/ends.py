"""Ends of rollouts: which rollouts of a batch are finished, and checks of the columns that mark ends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import describe_rollout
from .errors import BatchError
from .ids import Ids
from .rows import Rows
from .schema import EXPECTED_SEGMENTS

MORE_ENDS = (
    "found more ends (True) in {found}. Are ids reused by two workers, or did a sampler repeat rows? Their "
    "rewards would be added up. {workers}."
)


class Ends(NamedTuple):
    """Columns that mark where rollouts begin and end; (N,) each, None if the batch has no such column."""

    done: Tensor
    """bool: the rollout, or its segment, ends with this row."""
    begins: Tensor | None = None
    """bool: the rollout, or its segment, begins with this row."""
    segment: Tensor | None = None
    """int64: number of the row's segment, in the order of the segments."""
    expected: Tensor | None = None
    """int64: number of segments of the row's rollout, each with its own end."""


def finished(ends: Ends, rollouts: Ids) -> Tensor:
    """Find the rollouts with all their rows in the batch: (n,) bool, one per rollout.

    A rollout is finished if its last row is done. Segments have their own ends if `expected` is given, or if
    more than one segment of the rollout has ended or begun. Then each segment must have ended and, with
    `begins`, begun.

    Args:
        ends: columns that :func:`require_ends` has accepted.
        rollouts: rollout ids of the rows.
    """
    done, begins, segment, expected = ends
    number = rollouts.sum(done)
    begun = number if begins is None else rollouts.sum(begins)
    if expected is not None:
        wanted = rollouts.max(expected)
        return (number == wanted) & (begun == wanted)
    once = number == 1 if begins is None else (number == 1) & (begun == 1)
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
    """Require that a rollout, or a segment of it, begins and ends at most once, and ends with its last row.

    Raises:
        BatchError: a rollout has too many beginnings or ends, rows after its end, or an invalid number of
            expected segments. The message lists the rollouts.
    """
    done, begins, segment, expected = ends
    rollouts = rows.rollouts
    if expected is None and rollouts.n == len(done):  # a rollout of one row can break no rule below
        return
    piece = rollouts if segment is None else rollouts.paired_with(Ids(segment))
    if begins is not None:
        begun = piece.spread(piece.sum(begins))
        together = expected is not None and segment is None
        rows.require(
            begun <= (expected if together else 1),
            "a rollout begins once; found several beginnings (True) in {found}. Was it restarted with the "
            "same id? The rewards of both attempts would be added up. {workers}. If segments have "
            "their own beginnings, such as those of sub-agents, give the batch a column expected_segments, "
            "or set segment_key of the gate",
            lambda row: describe_rollout(rows, row, begins),
            unit=rows.rollouts,
        )
    if expected is not None:
        rows.require(
            (expected >= 1) & (rollouts.spread(rollouts.min(expected)) == expected),
            "expected_segments must be one number ≥ 1 per rollout; found {found}",
            lambda row: describe_rollout(rows, row, expected),
            unit=rows.rollouts,
        )
    require_single_ends(rows, ends)
    last = torch.zeros(piece.n, dtype=torch.int64).scatter_reduce_(
        0, piece.of, torch.arange(len(done)), "amax", include_self=False
    )
    beyond = done & (piece.spread(last) != torch.arange(len(done)))
    if expected is not None and segment is None:  # segments in any order: no row may follow the last end
        complete = rollouts.spread(rollouts.sum(done)) == expected
        beyond = complete & ~done[piece.spread(last)]
    rows.require(
        ~beyond,
        "a rollout ends with its last row; found rows after the end (True) in {found}. Are ids reused by "
        "two workers? {workers}. If the rows are in another order, set segment_key to the column "
        "that numbers them",
        lambda row: describe_rollout(rows, row, done),
        unit=rows.rollouts,
    )


def require_single_ends(rows: Rows, ends: Ends) -> None:
    """Require that each rollout, or each segment with its own end, ends at most once.

    Raises:
        BatchError: a rollout has more ends. The message lists the rollouts and their rows.
    """
    done, _, segment, expected = ends
    rollouts = rows.rollouts

    def describe(row: int) -> str:
        return describe_rollout(rows, row, done)

    if expected is not None:
        rows.require(
            rollouts.spread(rollouts.sum(done)) <= expected,
            f"a rollout ends at most expected_segments times; {MORE_ENDS}",
            describe,
            unit=rollouts,
        )
    if expected is None or segment is not None:
        piece = rollouts if segment is None else rollouts.paired_with(Ids(segment))
        rows.require(
            ~done | (piece.spread(piece.sum(done)) <= 1),
            f"a rollout ends once; {MORE_ENDS} If segments have their own ends, such as those of sub-agents, "
            "give the batch a column expected_segments, or set segment_key of the gate",
            describe,
            unit=rollouts,
        )


def require_unseen_ends(rows: Rows) -> None:
    """Call :func:`require_single_ends` for the ends of a batch that no gate has checked."""
    has_number = rows.has("expected_segments")
    expected = rows.integers("expected_segments", EXPECTED_SEGMENTS) if has_number else None
    require_single_ends(rows, Ends(read_flags(rows, "done"), expected=expected))


def read_flags(rows: Rows, role: str) -> Tensor:
    """(M,) bool: a column of one bool per row.

    Raises:
        MissingKeyError: the column is missing.
        BatchError: its dtype is not bool.
    """
    column = rows.number(role)
    if column.dtype is not torch.bool:
        found = rows.table.dtypes[rows.key(role)]
        raise BatchError(
            f"{{reader}} needs one bool per row in {{column}}; found {found}", **rows.facts(role)
        )
    return column

"""The fault matrix as data: the rows that are sent, and the result that every source must give.

The stream has three groups of two rollouts, each of two segments, in pieces that end in the middle of
rollouts. A source, such as a collector or a queue, brings the pieces of a cell in order to an assembler, each
as one put.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple

import torch
from assembly import Line, batch_of_lines
from saving import as_saved
from tensordict import TensorDict, TensorDictBase

from headrace.pipeline import Pipeline, assembled, load_pipeline
from headrace.transforms import GroupAssembler

GROUPS, PIECE = 3, 3
SILENCE = 1.0  # seconds without rows after which a worker is taken for dead
LONGEST = 120.0  # seconds that a cell may take on a machine that starts processes slowly
LINES = [Line(g, 2 * g + r, s, s == 1) for g in range(GROUPS) for s in (0, 1) for r in (0, 1)]
ROWS = batch_of_lines(LINES)
BY_SEGMENT = {"segment_key": "segment"}


class Cell(NamedTuple):
    """A fault, and its required result."""

    pieces: list[TensorDict]
    whole: Set[tuple[int, int]] = frozenset({(0, 0), (0, 1), (0, 2)})
    """The groups that come out, each as (partition, id)."""
    options: Mapping[str, Any] = {}
    """Options of the assembler."""
    counts: Mapping[str, int] = {}
    """The number of rows that left, by reason."""
    error: str | None = None
    """A pattern of the error, or None if there is no error."""
    then: Literal["ends", "dies", "hangs"] = "ends"
    """What the worker does after the last piece. No other worker replaces the worker."""
    killed_at: int | None = None
    """Number of pieces after which a worker dies and another sends the rest. No effect with one process."""
    resumed_at: int | None = None
    """Number of pieces after which assembler and source are saved, and others continue from their state."""

    @property
    def sent(self) -> int:
        return sum(map(len, self.pieces))


class Carried(NamedTuple):
    """The result of a cell with one source."""

    batches: list[TensorDictBase]
    counts: Mapping[str, int]
    held: int
    """Number of rows in the assembler at the end."""
    came: int
    """Number of rows that the assembler accepted."""
    error: BaseException | None = None


Place = Callable[[Cell], Carried]


def cut(rows: TensorDict, size: int = PIECE) -> list[TensorDict]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def changed(row: int, key: Any, value: float) -> list[TensorDict]:
    """The stream with one changed number."""
    rows = ROWS.clone()
    rows[key][row] = value
    return cut(rows)


def of_partitions() -> list[TensorDict]:
    """The stream of two workers with equal ids, in turn."""
    both = torch.stack([ROWS.exclude("text"), ROWS.exclude("text")], 1)
    both["partition"][:, 1] = 1
    both["number"][:, 1] += len(ROWS)
    return cut(both.reshape(-1))


def without(*rows: int) -> list[TensorDict]:
    return cut(ROWS[[row for row in range(len(ROWS)) if row not in rows]])


SOME = {(0, 0), (0, 2)}  # groups (partition, id) without the fault
BEFORE = {(0, 0)}
AGAIN = [*cut(ROWS)[:3], ROWS[6:7], *cut(ROWS)[3:]]  # row 6, which ends rollout 2 of group 1, comes twice
SHORT = cut(ROWS)[:3]  # group 2 has one row
CELLS: dict[str, Cell] = {
    "none": Cell(cut(ROWS)),
    "lost": Cell(without(5), SOME, BY_SEGMENT, {"unfinished": 3}),
    "lost end": Cell(without(7), SOME, counts={"unfinished": 3}),
    "lost rollout": Cell(without(5, 7), SOME, counts={"unfinished": 2}),
    "duplicated": Cell(AGAIN, {(0, 0), (0, 1)}, error="end only once.*found again rollout 2 of group 1"),
    "duplicated, dropped": Cell(AGAIN, options={"on_duplicate": "drop"}, counts={"duplicate": 1}),
    "reordered": Cell(cut(ROWS[[11, 2, 7, 0, 9, 4, 1, 6, 3, 10, 5, 8]]), options=BY_SEGMENT),
    "reordered, without numbers": Cell(
        cut(ROWS[[0, 1, 2, 3, 6, 5, 4, 7, 8, 9, 10, 11]]), BEFORE, error="found again rollout 2 of group 1"
    ),
    "late": Cell(
        [*cut(ROWS[:7]), *cut(ROWS[8:]), ROWS[7:8]],
        SOME,
        {"timeout": 3},
        {"timeout": 3, "late": 1},
    ),
    "late, refused": Cell(
        [*cut(ROWS[:7]), *cut(ROWS[8:]), ROWS[7:8]],
        SOME,
        {"timeout": 3, "on_late": "raise"},
        {"timeout": 3},
        "too late: rollout 3 of group 1",
    ),
    "wrong group": Cell(
        changed(7, "group_id", 2), BEFORE, error=r"belongs to one group; found rollout 3 in groups \[1, 2\]"
    ),
    "unset id": Cell(changed(7, "rollout_id", -1), BEFORE, error="rollout_id ≥ 0; found -1 at row 1"),
    "NaN": Cell(changed(7, ("next", "reward"), torch.nan), SOME, error=r"found nan at row \d \(rollout 3\)"),
    "failed": Cell(changed(7, ("next", "status"), 3), SOME, counts={"failed": 4}),
    "failed, refused": Cell(
        changed(7, ("next", "status"), 3),
        BEFORE,
        {"on_failure": "raise"},
        error=r"group 1 has 1 of 2 \(1 completed, 1 failed\)",
    ),
    "killed": Cell(SHORT, {(0, 0), (0, 1)}, error="(silent|lost).*group 2 has 0 of 2", then="dies"),
    "hung": Cell(SHORT, {(0, 0), (0, 1)}, error="silent.*group 2 has 0 of 2", then="hangs"),
    "killed, another goes on": Cell(cut(ROWS), killed_at=3),
    "killed, all of it again": Cell(
        [*SHORT, *cut(ROWS[8:])],
        options={**BY_SEGMENT, "on_duplicate": "drop"},
        counts={"duplicate": 1},
        killed_at=3,
        resumed_at=3,
    ),
    "killed, lost": Cell([*SHORT, *cut(ROWS[9:11])], {(0, 0), (0, 1)}, counts={"unfinished": 3}, killed_at=3),
    "partitions": Cell(
        of_partitions(), {(p, g) for p in (0, 1) for g in range(GROUPS)}, {"partition_key": "partition"}
    ),
    "partitions, mixed": Cell(of_partitions(), set(), error="end only once.*found again rollout"),
    "resumed": Cell(cut(ROWS), resumed_at=2),  # row 6 ends rollout 2, which row 4 began
    "resumed, row by row": Cell(cut(ROWS, 1), resumed_at=5),
    "resumed, duplicated": Cell(
        AGAIN, {(0, 0), (0, 1)}, error="end only once.*found again rollout 2 of group 1", resumed_at=3
    ),
}


# The assembler detects faults of rows behind every source, so other sources need only a few of them.
ROWS_ELSEWHERE = ("none", "lost", "duplicated", "duplicated, dropped", "reordered", "late, refused", "failed")
WORKERS = ("killed", "hung", "killed, another goes on", "killed, all of it again", "killed, lost")
ELSEWHERE = (*ROWS_ELSEWHERE, "NaN", *WORKERS, "partitions", "resumed", "resumed, duplicated")


@functools.cache
def pipeline() -> Pipeline:
    words = ("pipeline=grpo", "pipeline.stages.collapse.reward=sum", "pipeline.stages.split.minibatches=1")
    return load_pipeline(*words, "~pipeline.stages.filter")


def trained(batch: TensorDictBase) -> dict[tuple[int, int], float]:
    """The advantage of each row by (partition, number)."""
    out = pipeline()(batch)
    keys = zip(out["partition"].tolist(), out["number"].tolist(), strict=True)
    return dict(zip(keys, out["advantage"].flatten().tolist(), strict=True))


def check(cell: Cell, carried: Carried) -> None:
    """Check that rows are trained once with the numbers of a faultless stream, or are counted or refused."""
    error, found, advantage = carried.error, [], {}
    for batch in carried.batches:
        try:
            numbers = trained(batch)
        except ValueError as err:  # the pipeline refuses a fault that the assembler lets through
            error = error or err
            continue
        assert not numbers.keys() & advantage.keys()
        advantage |= numbers
        found += set(zip(batch["partition"].tolist(), batch["group_id"].tolist(), strict=True))
        assert len(set(batch["partition"].tolist())) == 1
    assert len(found) == len(set(found))
    assert set(found) == cell.whole
    faultless = trained(ROWS)
    for (_, number), value in advantage.items():
        assert value == faultless[0, number % len(ROWS)]
    if cell.error is None and error is not None:
        raise error
    if cell.error is not None:
        assert re.search(cell.error, str(error).replace("\n", " ")), repr(error)
    assert {reason: rows for reason, rows in carried.counts.items() if rows} == cell.counts
    assert carried.came == sum(map(len, carried.batches)) + sum(carried.counts.values()) + carried.held
    if cell.error is None:
        assert (carried.held, carried.came) == (0, cell.sent)


class InterruptedHere(Exception):
    """Raised where the training process ends. Another process continues."""


class Counted:
    """A source with a state. If more rows are requested, the last were accepted, so they are counted."""

    def __init__(self, source: Any, stop_at: int | None):
        self.source, self.stop_at = source, stop_at
        self.came = self.pieces = 0

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        for piece in self.source:
            yield piece
            if piece is not None:
                self.came, self.pieces = self.came + len(piece), self.pieces + 1
                if self.pieces == self.stop_at:
                    raise InterruptedHere

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)


def carry(cell: Cell, open_dump: Callable[[], Any]) -> Carried:
    """Run an assembler over a source with a state until the source ends or an error is raised."""
    assembler, came, batches = GroupAssembler(**cell.options), 0, []
    counted = Counted(open_dump(), cell.resumed_at)
    error: BaseException | None = None
    while True:
        stream = assembled(counted, assembler, patience=LONGEST if cell.then == "ends" else SILENCE)
        try:
            for batch in stream:
                batches.append(batch)
        except InterruptedHere:
            came += counted.came
            assembler, counted = GroupAssembler(**cell.options), Counted(open_dump(), None)
            assembled(counted, assembler).load_state_dict(as_saved(stream.state_dict()))
            continue
        except Exception as err:
            error = err
        return Carried(batches, assembler.counts, assembler.held, came + counted.came, error)

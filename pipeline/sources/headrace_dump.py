"""Dumps of headrace itself: ``step_00000012.parquet`` or ``.jsonl``, a step a file, as ``write_dump`` writes.

Schema: :func:`headrace.pipeline.report.report_table`, version 1. Rows that a step carried in from the one
before are not read: they are in that step's file. A dump has the number of a row's tokens and not the tokens;
so a row has a loss mask of that length, and no tokens.

A row is named by its number in the step, ``row``: each number from 0 to the last is there once, those of
carried rows included. Rows lost after the last cannot be known of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tensordict import TensorDict

from headrace.transforms import Status

from .headrace_table import STATUSES, UNFINISHED, VERSION, check_no_gaps, read_step
from .jsonl import read_jsonl
from .malformed import SourceError
from .reading import Reading
from .record import Record, as_number_or_gap
from .sample import Sample


def read_headrace_dump(path: Path, reading: Reading) -> Iterator[Sample | tuple[int, TensorDict]]:
    """The step of one file: a batch of a Parquet file, samples of a JSONL file.

    Raises:
        SourceError: a file that is damaged or of another version, a column that is missing or of another
            type, an id or a reward that is null.
    """
    if path.suffix != ".parquet":
        yield from _read_lines(path, reading)
        return
    try:
        step = read_step(path)
    except SourceError as err:
        reading.skipped.note(err)
        return
    if step is not None:
        yield step


def _read_lines(path: Path, reading: Reading) -> Iterator[Sample]:
    """Samples of a JSONL file; at its end, whether all rows of its step were there."""
    places: dict[int, str] = {}
    steps: set[int] = set()
    skipped = reading.skipped.count

    def parse(record: Record, reading: Reading) -> list[Sample]:
        row = record.whole("row")
        if row in places:
            raise record.fail(f"a row's number is there once; it is at {places[row]} already. 'row'", row)
        samples = parse_row(record, reading)
        steps.add(record.whole("step"))
        if len(steps) > 1:
            raise record.fail("a file is one step", sorted(steps))
        places[row] = record.where
        return samples

    yield from read_jsonl(path, reading, parse)
    if places and reading.skipped.count == skipped:  # else it is known that rows are missing
        try:
            check_no_gaps(np.fromiter(places, np.int64), path)
        except SourceError as err:
            reading.skipped.note(err)


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """The sample of one line of a JSONL dump; none for a row that was carried in.

    Raises:
        SourceError: it is not as documented.
    """
    if record.whole("carried_in", optional=True):
        return []
    status = record.choice("status", STATUSES, default="completed")
    if (record.text("reason", optional=True) or "").endswith(UNFINISHED):
        status = Status.ABORTED
    if record.whole("schema", optional=True) not in (None, int(VERSION)):
        raise record.fail(f"'schema' must be {VERSION}, the one that is known", record.get("schema"))
    rewards = _named_rewards(record)
    advantage = record.number("advantage", optional=True)
    unrewarded = "rollout_reward" in record.data and record.data["rollout_reward"] is None
    return [
        Sample(
            group=record.whole("group_id"),
            rollout=record.whole("rollout_id"),
            group_label=record.text("group_label", optional=True),
            rollout_label=record.text("rollout_label", optional=True),
            reward=None if rewards else record.number("reward", optional=True),
            rewards=rewards,
            status=status,
            prompt=record.text("prompt", optional=True),
            response=record.text("response", optional=True),
            ground_truth=record.text("ground_truth", optional=True),
            response_length=record.whole("tokens", optional=True),
            policy_version=record.whole("policy_version", optional=True),
            step=record.whole("step"),
            advantage=math.nan if advantage is None else advantage,
            expected_rollouts=record.whole("expected_rollouts", optional=True),
            scored=record.text("reason", optional=True) in (None, "trained") and not unrewarded,
            where=record.where,
        )
    ]


def _named_rewards(record: Record) -> dict[str, float] | None:
    """The list ``rewards`` by the index of each; NaN where one is null; None where there is no list."""
    values = record.get("rewards", optional=True)
    if values is None:
        return None
    numbers = [as_number_or_gap(value) for value in values] if isinstance(values, list) else []
    if len(numbers) < 2 or None in numbers:
        raise record.fail("'rewards' must be a list of two or more finite numbers or nulls", values)
    return {str(i): number for i, number in enumerate(numbers) if number is not None}

"""Dumps of headrace itself: ``step_00000012.parquet`` or ``.jsonl``, a step a file, as ``write_dump`` writes.

Schema: :func:`headrace.pipeline.report.report_table`, version 1. Rows that a step carried in from the one
before are not read: they are in that step's file. A dump has the number of a row's tokens and not the tokens;
so a row has a loss mask of that length, and no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from tensordict import TensorDict

from headrace.transforms import Status

from .headrace_table import STATUSES, UNFINISHED, VERSION, read_step
from .jsonl import read_jsonl
from .malformed import SourceError
from .reading import Reading
from .record import Record
from .sample import Sample


def read_headrace_dump(path: Path, reading: Reading) -> Iterator[Sample | tuple[int, TensorDict]]:
    """The step of one file: a batch of a Parquet file, samples of a JSONL file.

    Raises:
        SourceError: a file that is damaged or of another version, a column that is missing or of another
            type, an id or a reward that is null.
    """
    if path.suffix != ".parquet":
        yield from read_jsonl(path, reading, parse_row)
        return
    try:
        step = read_step(path)
    except SourceError as err:
        reading.skipped.note(err)
        return
    if step is not None:
        yield step


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
    return [
        Sample(
            group=record.whole("group_id"),
            rollout=record.whole("rollout_id"),
            reward=None if rewards else record.number("reward", optional=True),
            rewards=rewards,
            status=status,
            prompt=record.text("prompt", optional=True),
            response=record.text("response", optional=True),
            response_length=record.whole("tokens", optional=True),
            policy_version=record.whole("policy_version", optional=True),
            step=record.whole("step"),
            advantage=math.nan if advantage is None else advantage,
            expected_rollouts=record.whole("expected_rollouts", optional=True),
            where=record.where,
        )
    ]


def _named_rewards(record: Record) -> dict[str, float] | None:
    """The list ``rewards`` by the index of each; NaN where one is null; None where there is no list."""
    values = record.get("rewards", optional=True)
    if values is None:
        return None
    numbers = isinstance(values, list) and all(v is None or type(v) in (int, float) for v in values)
    if not numbers or len(values) < 2:
        raise record.fail("'rewards' must be a list of two or more numbers", values)
    return {str(i): math.nan if v is None else float(v) for i, v in enumerate(values)}

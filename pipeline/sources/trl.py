"""Completions that TRL logs: one Parquet file a logging step.

Schema: trl 1.16.0, ``trl/trainer/grpo_trainer.py`` (``log``), ``log_completions=True``: the columns
``step``, ``prompt``, ``completion``, one for each reward function, what reward functions logged besides
(``log_extra``), and ``advantage`` last. Prompts and completions are strings or chat messages.

Columns of numbers between ``completion`` and ``advantage`` are taken as rewards, since nothing marks them;
where others were logged besides, name the rewards with ``reward_key``. A reward that a function did not
give is NaN, and a row without any (TRL: unscorable) failed. Groups are not dumped: give
``group_by="prompt"``. A file holds the last generated batch; where TRL logs more often than it generates,
two files hold the same rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.transforms import Status

from .malformed import SourceError
from .reading import Reading, parse_records
from .record import Record, as_number_or_gap
from .sample import Sample
from .text import read_text

ROWS = 256  # of a Parquet file in memory at a time
FIXED = ("step", "prompt", "completion", "advantage")


def read_trl(path: Path, reading: Reading) -> Iterator[Sample]:
    """Samples of one file, which is one step.

    Raises:
        SourceError: the file is damaged, its columns are not as documented, or a value is of another type.
    """
    try:
        names = reward_columns(read_schema(path), reading.reward_key, path)
    except SourceError as err:
        reading.skipped.note(err)
        return

    def parse(record: Record, reading: Reading) -> list[Sample]:
        return [parse_row(record, reading, names)]

    yield from parse_records(read_rows(path, reading), reading, parse)


def parse_row(record: Record, reading: Reading, names: list[str]) -> Sample:
    """One row of the table."""
    rewards = {}
    for name in names:
        value = as_number_or_gap(record.data.get(name))
        if value is None:
            raise record.fail(f"the reward {name!r} must be a finite number, or null", record.data[name])
        rewards[name] = value
    unscorable = all(math.isnan(value) for value in rewards.values())
    prompt = read_text(record, "prompt")
    only = rewards[names[0]] if len(names) == 1 else None
    return Sample(
        group=reading.group_of_prompt(prompt or "", record.where),
        rollout=record.line,
        reward=None if unscorable else only,
        rewards=rewards if len(names) > 1 and not unscorable else None,
        status=Status.FAILED if unscorable else Status.COMPLETED,
        prompt=prompt,
        response=read_text(record, "completion"),
        step=record.whole("step"),
        advantage=record.number("advantage"),
        expected=reading.group_size,
        where=record.where,
    )


def reward_columns(schema: pa.Schema, keys: tuple[str, ...] | None, path: Path) -> list[str]:
    """The columns that are rewards.

    Raises:
        SourceError: none, or not those that were named.
    """
    if lacking := [name for name in (*FIXED, *(keys or ())) if name not in schema.names]:
        raise SourceError(f"{path}: the columns {lacking} are required; found {schema.names}")
    if len(set(schema.names)) < len(schema.names):
        raise SourceError(f"{path}: a column's name is there once; found {schema.names}")
    names = list(keys) if keys else _between(schema)
    if not names:
        raise SourceError(f"{path}: at least one column of rewards is required; found {schema.names}")
    return names


def _between(schema: pa.Schema) -> list[str]:
    types = {field.name: field.type for field in schema}
    return [
        name
        for name in schema.names[schema.names.index("completion") + 1 : schema.names.index("advantage")]
        if name not in FIXED and (pa.types.is_floating(types[name]) or pa.types.is_integer(types[name]))
    ]


def read_schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file.

    Raises:
        SourceError: it is damaged.
    """
    try:
        return pq.read_schema(path)
    except Exception as err:  # a damaged file makes the decoder raise anything
        raise SourceError(f"{path}: a Parquet file is required; found {_reason(err)}") from err


def read_rows(path: Path, reading: Reading) -> Iterator[Record]:
    """The rows of a Parquet file, a few at a time.

    Raises:
        SourceError: it is damaged, or has no rows.
    """
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            size = path.stat().st_size
            for part in file.iter_batches(batch_size=ROWS):
                reading.position = size * number // max(1, file.metadata.num_rows)
                for data in part.to_pylist():
                    number += 1
                    yield Record(data, f"{path}, row {number}", number)
    except Exception as err:  # a damaged file makes the decoder raise anything
        reading.skipped.note(SourceError(f"{path}: a Parquet file must be readable; found {_reason(err)}"))
        return
    if not number:
        reading.skipped.note(SourceError(f"{path}: a dump has at least one row; found an empty table"))


def _reason(err: Exception) -> str:
    lines = str(err).strip().splitlines()
    return lines[0][:200] if lines else type(err).__name__

"""Read completions that TRL logs: one Parquet file per logging step.

Schema: trl 1.16.0, ``trl/trainer/grpo_trainer.py`` (``log``), ``log_completions=True``: the columns
``step``, ``prompt``, ``completion``, one for each reward function, others that reward functions logged
(``log_extra``), and ``advantage`` last. Prompts and completions are strings or chat messages.

- Columns of rewards are not marked. Columns of numbers between ``completion`` and ``advantage`` are read as
  rewards. If reward functions logged other numbers, too, name the rewards with ``reward_key``.
- If a function gave no reward, the column has NaN. A row without any reward (TRL: unscorable) failed.
  Truncated rollouts are not known, and tokens are not logged.
- Groups are not logged: set ``group_by="prompt"``. Rows are in the order in which prompts were repeated,
  before TRL shuffles them. So the rollouts of one draw are next to one another.
- A file holds the last generated batch. If TRL logs more often than it generates, two files hold the same
  rollouts. Rows have no names, so a row that occurs twice looks like two equal rollouts. ``group_size`` may
  detect this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from headrace.transforms import Status

from .batch import Sample
from .file_kinds import Format, Reading, parse_records, read_rows, read_schema
from .record import Record, SourceError, as_number_or_gap, read_texts

FIXED = ("step", "prompt", "completion", "advantage")


def read_trl(path: Path, reading: Reading) -> Iterator[Sample]:
    """Read the samples of one file, which is one step.

    Raises:
        SourceError: the file is damaged, its columns are not as documented, or a value is of another type.
    """
    names = reward_columns(read_schema(path), reading.reward_keys, path)
    return parse_records(read_rows(path, reading), reading, partial(parse_row, rewards=names))


def parse_row(record: Record, reading: Reading, *, rewards: Sequence[str]) -> list[Sample]:
    """Read the sample of one row of the table, with its rewards in the columns `rewards`.

    Raises:
        SourceError: a value is of another type.
    """
    values = {}
    for name in rewards:
        value = as_number_or_gap(record.data.get(name))
        if value is None:
            raise record.fail(f"the reward {name!r} must be a finite number, or null", record.data[name])
        values[name] = value
    unscorable = all(math.isnan(value) for value in values.values())
    texts = read_texts(record, "prompt", "completion")
    group = reading.group_of_prompt(record.data["prompt"], record.where, texts["prompt"])
    return [
        Sample(
            group=group,
            rollout=record.line,
            reward=values[rewards[0]] if len(values) == 1 and not unscorable else None,
            rewards=values if len(values) > 1 and not unscorable else None,
            status=Status.FAILED if unscorable else None,
            **texts,
            step=record.whole("step"),
            advantage=record.number("advantage"),
            place=record.line,
        )
    ]


def reward_columns(schema: pa.Schema, keys: Sequence[str], path: Path) -> list[str]:
    """The names of the reward columns: `keys`; without keys, the columns that look like rewards.

    Raises:
        SourceError: a documented column or one of `keys` is missing, a name occurs twice, or there are no
            rewards.
    """
    if lacking := [name for name in (*FIXED, *keys) if name not in schema.names]:
        raise SourceError(f"{path}: the columns {lacking} are required; found {schema.names}")
    if len(set(schema.names)) < len(schema.names):
        raise SourceError(f"{path}: each column's name must occur once; found {schema.names}")
    names = list(keys)
    if not names:
        types = {field.name: field.type for field in schema}
        between = schema.names[schema.names.index("completion") + 1 : schema.names.index("advantage")]
        numbers = [n for n in between if pa.types.is_floating(types[n]) or pa.types.is_integer(types[n])]
        names = [name for name in numbers if name not in FIXED]
    if not names:
        raise SourceError(f"{path}: at least one column of rewards is required; found {schema.names}")
    return names


FORMAT = Format(
    read_trl,
    files=("*.parquet", "completions/*.parquet"),
    keys=frozenset({"step", "prompt", "completion", "advantage"}),
    options=("group_by", "group_size", "reward_key", "tokenizer"),
    reward_keys="many",
    unsaid=("rollouts", "masks", "tokens"),
)

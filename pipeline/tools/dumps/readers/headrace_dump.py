"""Read the dumps that ``write_dump`` writes: ``step_00000012.parquet`` or ``.jsonl``, one step per file.

Schema: :func:`headrace.pipeline.tools.report.report_table`, version 1.

- ``row`` is the number of a row in its step. Each number from 0 to the last must occur once. So missing rows
  are detected, except at the end of a step.
- Rows that were carried in from the previous step are not read, because they are in the file of that step.
- A dump has the number of tokens of a row, but not the tokens. So a row gets a loss mask of that length, and
  no tokens. Without the number, a tokenizer can make tokens of the texts. ``response_parts`` says which parts
  of a response were sampled.
- A null status, or no column of statuses, means that the status is not known.
- The advantage and the weight with which a row was trained become ``logged_advantage`` and
  ``logged_weight``.
- The minibatch of a row becomes ``logged_minibatch``, and is −1 for a row in no minibatch. If rows were
  carried into a step, it is −1 for all rows: the carried rows are in its minibatches, and are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from tensordict import TensorDict

from headrace.transforms import Status
from headrace.transforms.table.schema import TRAINER_VERSION
from headrace.transforms.table.tensordicts import as_texts

from .batch import MAX_CELLS, MAX_ROWS, MAX_TOKENS, Sample, put_tokens
from .file_kinds import Format, Reading, read_lines, read_table
from .record import SourceError, as_text, first_line, quote, quote_some

REQUIRED = ("step", "row", "group_id", "rollout_id", "reward")
COUNTS = {"policy_version": ("next", "policy_version"), "expected_rollouts": "expected_rollouts"}
COUNTS |= {"trainer_version": TRAINER_VERSION}
TEXTS = {"prompt": "prompt_text", "response": "response_text"}
TEXTS_OF_TOKENS = ("prompt", "response", "response_parts")
TEXTS |= {name: name for name in ("group_label", "rollout_label", "ground_truth", "other_columns")}
TEXTS |= {"response_parts": "response_parts"}
STATUSES = {status.name.lower(): status for status in Status}
VERSION = "1"
UNFINISHED = "/unfinished"  # the end of a gate's reason for rows of a rollout that did not end in the step


def read_headrace_dump(path: Path, reading: Reading) -> Iterator[tuple[int, TensorDict]]:
    """Yield the step of one file and its batch ``[N]``; nothing if all rows of the file were carried in.

    Raises:
        SourceError: the file is damaged or of another version, a column is missing or of another type, or an
            id or a reward is null.
    """
    skipped = reading.skipped
    if path.suffix == ".parquet":
        table = read_table(path)
        version = (table.schema.metadata or {}).get(b"headrace.schema", b"").decode(errors="replace")
    else:
        records = [record.data for record in islice(read_lines(path, reading), MAX_ROWS + 1)]
        if not records:
            return
        if len(records) > MAX_ROWS:
            raise SourceError(f"{path}: a step has at most {MAX_ROWS} rows; found more")
        table = table_of_lines(records, path)
        found = pc.unique(table["schema"]).to_pylist() if "schema" in table.column_names else [int(VERSION)]
        version = ", ".join(map(str, found))
    if version != VERSION:
        raise SourceError(
            f"{path}: headrace.schema must be {VERSION}, the only known version; found {version!r}"
        )
    if lacking := [name for name in REQUIRED if name not in table.column_names]:
        raise SourceError(
            f"{path}: the columns {lacking} are required; found {quote_some(table.column_names)}"
        )
    try:
        if reading.skipped == skipped:  # otherwise rows are known to be missing
            check_no_gaps(_integers(table, "row", path), path)
        whole = len(table)
        if "carried_in" in table.column_names:
            table = table.filter(pc.equal(pc.fill_null(table["carried_in"], 0), 0))
        if len(table) < whole and "minibatch" in table.column_names:  # rows of its minibatches are not read
            place = table.column_names.index("minibatch")
            table = table.set_column(place, "minibatch", pa.nulls(len(table), pa.int64()))
        if not len(table):
            return
        steps = pc.unique(table["step"]).to_pylist()
        if len(steps) != 1 or not isinstance(steps[0], int) or steps[0] < 0:
            raise SourceError(f"{path}: a file is one step, a number ≥ 0; found {quote_some(steps, most=5)}")
        batch = _batch(table, path, reading)
    except SourceError:
        raise
    except Exception as err:  # if a column has an unexpected type, the conversion can raise any error
        raise SourceError(f"{path}: columns must be as documented; found {first_line(err)}") from None
    yield steps[0], batch


def table_of_lines(records: Sequence[dict[str, Any]], path: Path) -> pa.Table:
    """Convert the records of a JSONL file to a table like that of a Parquet file.

    Raises:
        SourceError: the values of a key have different types.
    """
    columns = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        try:
            kind = pa.array(values).type
            if pa.types.is_null(kind):  # for example, no row has a reward
                kind = pa.float64()
            if pa.types.is_list(kind):
                kind = pa.list_(kind.value_type, len(values[0] or ()))
            columns[name] = pa.array(values, kind)
        except Exception as err:  # Arrow raises many types, and a value may have no length
            raise SourceError(
                f"{path}: all values of {quote(name)} must be of one type; found {first_line(err)}"
            ) from None
    return pa.table(columns)


def check_no_gaps(rows: np.ndarray, path: Path) -> None:
    """Check that each row of a step occurs exactly once.

    Raises:
        SourceError: a number from 0 to the last is missing, or a number occurs twice.
    """
    numbers, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise SourceError(
            f"{path}: a row's number must occur once; found twice: {quote_some(numbers[counts > 1].tolist())}"
        )
    if len(numbers) and (gaps := int(numbers[-1]) + 1 - len(numbers)):
        missing_before = numbers - np.arange(len(numbers))
        first = int(np.argmax(missing_before > 0))
        raise SourceError(
            f"{path}: a step has all its rows, from 0 to the last; {gaps} are missing, the first of them "
            f"{numbers[first - 1] + 1 if first else 0}. Was the file cut? To leave rows out, use a filter"
        )


def _batch(table: pa.Table, path: Path, reading: Reading) -> TensorDict:
    batch = TensorDict({}, batch_size=[len(table)])
    for name in ("group_id", "rollout_id"):
        batch[name] = torch.from_numpy(_integers(table, name, path))
    status = np.full(len(table), -1)
    left = np.zeros(len(table), dtype=bool)  # rows out of the loss
    if "status" in table.column_names:
        words = table["status"].to_pylist()
        if unknown := [word for word in words if word is not None and word not in STATUSES]:
            raise SourceError(
                f"{path}: 'status' must be one of {', '.join(STATUSES)}, or null; found {unknown[0]!r}"
            )
        status = np.array([-1 if word is None else int(STATUSES[word]) for word in words])
    if "reason" in table.column_names:
        unfinished = pc.fill_null(pc.ends_with(table["reason"], UNFINISHED), False).to_numpy()
        status = np.where(unfinished, int(Status.ABORTED), status)  # the step had part of such a rollout
        left = np.array([word not in (None, "trained") for word in table["reason"].to_pylist()])
    if (status >= 0).any():
        batch["status"] = torch.from_numpy(status)
    # These rows may lack a reward: they failed, they left, or their rollout has none.
    unscored = np.isin(status, (Status.ABORTED, Status.FAILED)) | left
    if "rollout_reward" in table.column_names:
        unscored |= np.isnan(_floats(table, "rollout_reward", path))
    reward = torch.from_numpy(_rewards(table, unscored, path))
    exact = torch.equal(reward.float().double().nan_to_num(), reward.nan_to_num())
    batch["next", "reward"] = reward.float() if exact else reward
    for name, key in COUNTS.items():
        if _has_values(table, name):
            batch[key] = torch.from_numpy(_integers(table, name, path))
    if _has_values(table, "tokens"):
        tokens = _integers(table, "tokens", path)
        if tokens.max() > MAX_TOKENS or tokens.max() * len(table) > MAX_CELLS:
            raise SourceError(
                f"{path}: a row has at most {MAX_TOKENS} tokens, and a step {MAX_CELLS} with padding; "
                f"found {tokens.max()} tokens in one of {len(table)} rows"
            )
        width = int(max(tokens.max(), 1))
        in_loss = torch.arange(width) >= width - torch.from_numpy(tokens).unsqueeze(1)
        batch["masks", "all_assistant_mask"] = in_loss
    else:
        put_tokens(batch, _samples_of_texts(table, path, reading))
    if "advantage" in table.column_names:
        batch["logged_advantage"] = torch.from_numpy(_floats(table, "advantage", path)).float()
    if "loss_weight" in table.column_names:
        batch["logged_weight"] = torch.from_numpy(_floats(table, "loss_weight", path))
    if "minibatch" in table.column_names:
        minibatch = torch.from_numpy(_floats(table, "minibatch", path))
        batch["logged_minibatch"] = minibatch.nan_to_num(nan=-1.0).long()
    for name, key in TEXTS.items():
        if name in table.column_names and table[name].null_count == 0:
            if not pa.types.is_string(table.schema.field(name).type):
                raise SourceError(f"{path}: {name!r} must be text; found {table.schema.field(name).type}")
            batch[key] = as_texts(table[name].to_pylist())
    return batch


def _samples_of_texts(table: pa.Table, path: Path, reading: Reading) -> list[Sample]:
    """Samples with the texts of the rows and, with a tokenizer, their tokens."""
    none = [None] * len(table)
    texts = [table[name].to_pylist() if name in table.column_names else none for name in TEXTS_OF_TOKENS]
    where = (f"{path}, row {row}" for row in range(len(table)))
    rows = [
        Sample(
            0,
            row,
            prompt=as_text(prompt),
            response=as_text(response),
            response_parts=_parts(as_text(parts), path),
            where=place,
        )
        for row, (prompt, response, parts, place) in enumerate(zip(*texts, where, strict=True))
    ]
    reading.add_tokens(rows)
    return rows


def _parts(text: str | None, path: Path) -> list[tuple[bool, str]] | None:
    """The parts of a response: pairs of a boolean, whether the part was sampled, and its text."""
    if not text:
        return None
    parts = json.loads(text)
    if not all(type(sampled) is bool and as_text(each) is not None for sampled, each in parts):
        raise SourceError(
            f"{path}: 'response_parts' must be pairs of a boolean and a text; found {quote(parts)}"
        )
    return [(sampled, each) for sampled, each in parts]


def _has_values(table: pa.Table, name: str) -> bool:
    return name in table.column_names and table[name].null_count < len(table)


def _integers(table: pa.Table, name: str, path: Path) -> np.ndarray:
    """The values of a column, (N,) int64, all ≥ 0."""
    column = table[name]
    if not pa.types.is_integer(column.type) or column.null_count:
        raise SourceError(
            f"{path}: {name!r} must be an integer on every row; found {column.type} with "
            f"{column.null_count} nulls"
        )
    values = column.cast(pa.int64()).to_numpy()
    if (values < 0).any():
        row = int((values < 0).argmax())
        raise SourceError(f"{path}: {name!r} must be ≥ 0; found {values[row]} at row {row}")
    return values.copy()


def _floats(table: pa.Table, name: str, path: Path) -> np.ndarray:
    """The values of a column, (N,) float64; NaN for null."""
    column = table[name]
    if not _is_number(column.type):
        raise SourceError(f"{path}: {name!r} must be a number; found {column.type}")
    return pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy().copy()


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def _rewards(table: pa.Table, unscored: np.ndarray, path: Path) -> np.ndarray:
    """The rewards, (N, 1) float64, or (N, K) if rows have lists of K rewards; NaN for null."""
    if "rewards" not in table.column_names:
        rewards = _floats(table, "reward", path)[:, None]
    else:
        lists = table["rewards"].combine_chunks()
        fixed = pa.types.is_fixed_size_list(lists.type) and lists.type.list_size > 1 and not lists.null_count
        if not fixed or not _is_number(lists.type.value_type):
            raise SourceError(
                f"{path}: 'rewards' must be a list of two or more numbers, as many on every row; found "
                f"{lists.type} with {lists.null_count} nulls"
            )
        rewards = lists.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False)
        rewards = rewards.reshape(len(table), lists.type.list_size).copy()
    missing = np.isnan(rewards).all(1) & ~unscored
    if (bad := np.isinf(rewards).any(1) | missing).any():
        row = int(bad.argmax())
        raise SourceError(
            f"{path}: a rollout that did not fail needs a finite 'reward'; row {row} has none: "
            f"{quote_some(rewards[row].tolist())}"
        )
    return rewards


FORMAT = Format(
    read_headrace_dump,
    files=("step_*.parquet|step_*.jsonl", "rollouts/step_*.parquet|rollouts/step_*.jsonl"),
    keys=frozenset(REQUIRED),
    options=("tokenizer",),
)

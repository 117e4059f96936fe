"""Dumps of headrace itself: ``step_00000012.parquet`` or ``.jsonl``, a step a file, as ``write_dump`` writes.

Schema: :func:`headrace.pipeline.report.report_table`, version 1. Rows that a step had carried in from the
one before are left out: they are in that one's file. Of tokens there are numbers only, so a row has a loss
mask of as many tokens, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from tensordict import TensorDict

from headrace.transforms import Status

from .jsonl import read_jsonl
from .malformed import SourceError
from .reading import Reading
from .record import Record
from .sample import MAX_TOKENS, Sample

NEEDED = ("step", "row", "group_id", "rollout_id", "reward")
COUNTS = {"policy_version": ("next", "policy_version"), "expected_rollouts": "expected_rollouts"}
STATUS = {status.name.lower(): int(status) for status in Status}
VERSION = "1"
MAX_CELLS = 2**31  # of a loss mask, in bytes


def read_own(path: Path, reading: Reading) -> Iterator[Sample | tuple[int, TensorDict]]:
    """The step of one file: a batch of a Parquet file, samples of a JSONL file.

    Raises:
        SourceError: a file that is damaged or of another version, a column that is missing or of another
            type, an id or a reward that is null.
    """
    if path.suffix == ".parquet":
        try:
            yield from read_table(path)
        except SourceError as err:
            reading.skipped.note(err)
    else:
        yield from read_jsonl(path, reading, parse_row)


def read_table(path: Path) -> Iterator[tuple[int, TensorDict]]:
    """The batch of one Parquet file, column by column."""
    try:
        table = pq.read_table(path)
    except Exception as err:  # a damaged file makes the decoder raise anything
        raise SourceError(f"{path}: a Parquet file is required; found {str(err)[:200]}") from err
    version = (table.schema.metadata or {}).get(b"headrace.schema", b"").decode(errors="replace")
    if version != VERSION:
        raise SourceError(
            f"{path}: headrace.schema must be {VERSION}, the one that is known; found {version!r}"
        )
    if lacking := [name for name in NEEDED if name not in table.column_names]:
        raise SourceError(f"{path}: the columns {lacking} are required; found {table.column_names}")
    try:
        if "carried_in" in table.column_names:
            table = table.filter(pc.equal(pc.fill_null(table["carried_in"], 0), 0))
        if len(table):
            steps = pc.unique(table["step"]).to_pylist()
            if len(steps) != 1 or not isinstance(steps[0], int) or steps[0] < 0:
                raise SourceError(f"{path}: a file is one step, a number ≥ 0; found {steps[:5]}")
            yield steps[0], _batch(table, path)
    except SourceError:
        raise
    except Exception as err:  # a column of a stranger's making makes the conversion raise anything
        raise SourceError(f"{path}: columns must be as documented; found {str(err)[:200]}") from err


def _batch(table: pa.Table, path: Path) -> TensorDict:
    batch = TensorDict({}, batch_size=[len(table)])
    for name in ("group_id", "rollout_id"):
        batch[name] = torch.from_numpy(_integers(table, name, path, low=0))
    status = _status(table, path)
    batch["status"] = torch.from_numpy(status)
    lost = np.isin(status, (Status.ABORTED, Status.FAILED))
    reward = torch.from_numpy(_rewards(table, lost, path))
    exact = torch.equal(reward.float().double().nan_to_num(), reward.nan_to_num())
    batch["next", "reward"] = reward.float() if exact else reward
    for name, key in COUNTS.items():
        if name in table.column_names and table[name].null_count < len(table):
            batch[key] = torch.from_numpy(_integers(table, name, path, low=0))
    tokens = np.ones(len(table), dtype=np.int64)
    if "tokens" in table.column_names and table["tokens"].null_count < len(table):
        tokens = _integers(table, "tokens", path, low=0)
        if tokens.max() > MAX_TOKENS or tokens.max() * len(table) > MAX_CELLS:
            raise SourceError(
                f"{path}: a row has at most {MAX_TOKENS} tokens, and a step {MAX_CELLS} in rows × the "
                f"longest; found {tokens.max()} tokens in one of {len(table)} rows"
            )
    width = int(max(tokens.max(), 1))
    batch["masks", "all_assistant_mask"] = torch.arange(width) >= width - torch.from_numpy(tokens).unsqueeze(
        1
    )
    if "advantage" in table.column_names:
        batch["advantage_logged"] = torch.from_numpy(_floats(table, "advantage", path)).float()
    for name in ("prompt", "response"):
        if name in table.column_names and table[name].null_count == 0:
            if not pa.types.is_string(table.schema.field(name).type):
                raise SourceError(f"{path}: {name!r} must be text; found {table.schema.field(name).type}")
            batch[f"{name}_text"] = table[name].to_pylist()
    return batch


def _integers(table: pa.Table, name: str, path: Path, *, low: int) -> np.ndarray:
    column = table[name]
    if not pa.types.is_integer(column.type) or column.null_count:
        raise SourceError(
            f"{path}: {name!r} must be an integer on every row; found {column.type} with "
            f"{column.null_count} nulls"
        )
    values = column.cast(pa.int64()).to_numpy()
    if (values < low).any():
        row = int((values < low).argmax())
        raise SourceError(f"{path}: {name!r} must be ≥ {low}; found {values[row]} at row {row}")
    return values.copy()


def _floats(table: pa.Table, name: str, path: Path) -> np.ndarray:
    column = table[name]
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise SourceError(f"{path}: {name!r} must be a number; found {column.type}")
    return pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy().copy()


def _status(table: pa.Table, path: Path) -> np.ndarray:
    if "status" not in table.column_names:
        return np.zeros(len(table), dtype=np.int64)
    words = table["status"].to_pylist()
    if odd := [word for word in words if word not in STATUS]:
        raise SourceError(f"{path}: 'status' must be one of {', '.join(STATUS)}; found {odd[0]!r}")
    return np.array([STATUS[word] for word in words])


def _rewards(table: pa.Table, lost: np.ndarray, path: Path) -> np.ndarray:
    """(N, 1), or (N, K) of several."""
    reward = _floats(table, "reward", path)
    if "reason" in table.column_names:  # a row that a filter took out for it had none, too
        lost = lost | (np.array(table["reason"].to_pylist(), dtype=object) != "trained")
    if (bad := ~np.isfinite(reward) & ~lost).any() and "rewards" not in table.column_names:
        row = int(bad.argmax())
        raise SourceError(f"{path}: a rollout that did not fail needs a finite 'reward'; row {row} has none")
    if "rewards" not in table.column_names:
        return reward[:, None]
    lists = table["rewards"].combine_chunks()
    if not pa.types.is_fixed_size_list(lists.type) or lists.null_count:
        raise SourceError(
            f"{path}: 'rewards' must be a list of as many numbers on every row; found {lists.type}"
        )
    return lists.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(len(table), -1).copy()


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """One line of a JSONL dump."""
    if record.whole("carried_in", optional=True):
        return []
    status = record.text("status", optional=True) or "completed"
    if status not in STATUS:
        raise record.fail(f"'status' must be one of {', '.join(STATUS)}", status)
    if record.whole("schema", optional=True) not in (None, int(VERSION)):
        raise record.fail(f"'schema' must be {VERSION}, the one that is known", record.get("schema"))
    rewards = _several(record)
    tokens: Any = record.whole("tokens", optional=True)
    advantage = record.number("advantage", optional=True)
    return [
        Sample(
            group=record.whole("group_id"),
            rollout=record.whole("rollout_id"),
            reward=None if rewards else record.number("reward", optional=True),
            rewards=rewards,
            status=Status(STATUS[status]),
            prompt=record.text("prompt", optional=True),
            response=record.text("response", optional=True),
            response_length=tokens,
            policy_version=record.whole("policy_version", optional=True),
            step=record.whole("step"),
            advantage=float("nan") if advantage is None else advantage,
            expected=record.whole("expected_rollouts", optional=True),
            where=record.where,
        )
    ]


def _several(record: Record) -> dict[str, float] | None:
    """Several rewards by their place; NaN where one is null."""
    values = record.get("rewards", optional=True)
    if values is None:
        return None
    numbers = isinstance(values, list) and all(v is None or type(v) in (int, float) for v in values)
    if not numbers or len(values) < 2:
        raise record.fail("'rewards' must be a list of two or more numbers", values)
    return {str(i): float("nan") if v is None else float(v) for i, v in enumerate(values)}

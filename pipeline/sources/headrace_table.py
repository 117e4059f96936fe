"""The Parquet files of headrace's own dumps, column by column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from tensordict import TensorDict
from torch import Tensor

from headrace.transforms import Status
from headrace.transforms.rows import as_texts

from .malformed import SourceError, first_line, quote_some
from .parquet import read_table
from .sample import MAX_CELLS, MAX_TOKENS

REQUIRED = ("step", "row", "group_id", "rollout_id", "reward")
COUNTS = {"policy_version": ("next", "policy_version"), "expected_rollouts": "expected_rollouts"}
TEXTS = {"prompt": "prompt_text", "response": "response_text"}
TEXTS |= {name: name for name in ("group_label", "rollout_label", "ground_truth")}
STATUSES = {status.name.lower(): status for status in Status}
VERSION = "1"
UNFINISHED = "/unfinished"  # the end of a gate's reason; who left for it is not there when it is replayed


def read_step(path: Path) -> tuple[int, TensorDict] | None:
    """The step of a Parquet file and its batch ``[N]``; None where it has no rows but carried ones.

    Raises:
        SourceError: the file is damaged or of another version, or a column is missing or of another type.
    """
    table = read_table(path)
    version = (table.schema.metadata or {}).get(b"headrace.schema", b"").decode(errors="replace")
    if version != VERSION:
        raise SourceError(
            f"{path}: headrace.schema must be {VERSION}, the one that is known; found {version!r}"
        )
    if lacking := [name for name in REQUIRED if name not in table.column_names]:
        raise SourceError(
            f"{path}: the columns {lacking} are required; found {quote_some(table.column_names)}"
        )
    try:
        check_no_gaps(_integers(table, "row", path), path)
        if "carried_in" in table.column_names:
            table = table.filter(pc.equal(pc.fill_null(table["carried_in"], 0), 0))
        return (_step(table, path), _batch(table, path)) if len(table) else None
    except SourceError:
        raise
    except Exception as err:  # a column of an unexpected type makes the conversion raise anything
        raise SourceError(f"{path}: columns must be as documented; found {first_line(err)}") from None


def check_no_gaps(rows: np.ndarray, path: Path) -> None:
    """Check that the rows of a step are there, each once.

    Args:
        rows: (N,) int64 ≥ 0, their numbers, in any order.
        path: of the file, for the message.

    Raises:
        SourceError: a number from 0 to the last is missing, or one is there twice.
    """
    numbers, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise SourceError(
            f"{path}: a row's number is there once; found twice {quote_some(numbers[counts > 1].tolist())}"
        )
    if len(numbers) and (gaps := int(numbers[-1]) + 1 - len(numbers)):
        missing_before = numbers - np.arange(len(numbers))
        first = int(np.argmax(missing_before > 0))
        raise SourceError(
            f"{path}: a step has all its rows, from 0 to the last; {gaps} are missing, the first of them "
            f"{numbers[first - 1] + 1 if first else 0}. Was the file cut? To leave rows out, use a filter"
        )


def _step(table: pa.Table, path: Path) -> int:
    steps = pc.unique(table["step"]).to_pylist()
    if len(steps) != 1 or not isinstance(steps[0], int) or steps[0] < 0:
        raise SourceError(f"{path}: a file is one step, a number ≥ 0; found {quote_some(steps, most=5)}")
    return steps[0]


def _batch(table: pa.Table, path: Path) -> TensorDict:
    batch = TensorDict({}, batch_size=[len(table)])
    for name in ("group_id", "rollout_id"):
        batch[name] = torch.from_numpy(_integers(table, name, path))
    status = np.where(_unfinished(table), int(Status.ABORTED), _status(table, path))
    batch["status"] = torch.from_numpy(status)
    lost = np.isin(status, (Status.ABORTED, Status.FAILED))
    reward = torch.from_numpy(_rewards(table, lost, path))
    exact = torch.equal(reward.float().double().nan_to_num(), reward.nan_to_num())
    batch["next", "reward"] = reward.float() if exact else reward
    for name, key in COUNTS.items():
        if _has_values(table, name):
            batch[key] = torch.from_numpy(_integers(table, name, path))
    batch["masks", "all_assistant_mask"] = _loss_mask(table, path)
    if "advantage" in table.column_names:
        batch["logged_advantage"] = torch.from_numpy(_floats(table, "advantage", path)).float()
    for name, key in TEXTS.items():
        if name in table.column_names and table[name].null_count == 0:
            if not pa.types.is_string(table.schema.field(name).type):
                raise SourceError(f"{path}: {name!r} must be text; found {table.schema.field(name).type}")
            batch[key] = as_texts(table[name].to_pylist())
    return batch


def _loss_mask(table: pa.Table, path: Path) -> Tensor:
    """(N, T) bool: as many tokens at the end of each row as it had; one where that is not known."""
    tokens = np.ones(len(table), dtype=np.int64)
    if _has_values(table, "tokens"):
        tokens = _integers(table, "tokens", path)
        if tokens.max() > MAX_TOKENS or tokens.max() * len(table) > MAX_CELLS:
            raise SourceError(
                f"{path}: a row has at most {MAX_TOKENS} tokens, and a step {MAX_CELLS} in rows × the "
                f"longest; found {tokens.max()} tokens in one of {len(table)} rows"
            )
    width = int(max(tokens.max(), 1))
    return torch.arange(width) >= width - torch.from_numpy(tokens).unsqueeze(1)


def _has_values(table: pa.Table, name: str) -> bool:
    return name in table.column_names and table[name].null_count < len(table)


def _integers(table: pa.Table, name: str, path: Path) -> np.ndarray:
    """(N,) int64, all ≥ 0."""
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
    """(N,) float64, NaN for null."""
    column = table[name]
    if not _is_number(column.type):
        raise SourceError(f"{path}: {name!r} must be a number; found {column.type}")
    return pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy().copy()


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def _status(table: pa.Table, path: Path) -> np.ndarray:
    """(N,) int64; completed where there is no such column."""
    if "status" not in table.column_names:
        return np.full(len(table), int(Status.COMPLETED))
    words = table["status"].to_pylist()
    if unknown := [word for word in words if word not in STATUSES]:
        raise SourceError(f"{path}: 'status' must be one of {', '.join(STATUSES)}; found {unknown[0]!r}")
    return np.array([int(STATUSES[word]) for word in words])


def _unfinished(table: pa.Table) -> np.ndarray:
    """(N,) bool: rows of a rollout of which the step had only a part, with only a part of its reward."""
    if "reason" not in table.column_names:
        return np.zeros(len(table), dtype=bool)
    return pc.fill_null(pc.ends_with(table["reason"], UNFINISHED), False).to_numpy()


def _rewards(table: pa.Table, lost: np.ndarray, path: Path) -> np.ndarray:
    """(N, 1) float64, or (N, K) where there is a list of K rewards."""
    rewards = _reward_lists(table, path) if "rewards" in table.column_names else None
    if rewards is None:
        rewards = _floats(table, "reward", path)[:, None]
    if "reason" in table.column_names:  # a filter may have taken rows out because they had no reward
        lost = lost | np.array([word not in (None, "trained") for word in table["reason"].to_pylist()])
    if "rollout_reward" in table.column_names:  # the rollout was trained without one
        lost = lost | np.isnan(_floats(table, "rollout_reward", path))
    missing = np.isnan(rewards).all(1) & ~lost
    if (bad := np.isinf(rewards).any(1) | missing).any():
        row = int(bad.argmax())
        raise SourceError(
            f"{path}: a rollout that did not fail needs a finite 'reward'; row {row} has none: "
            f"{quote_some(rewards[row].tolist())}"
        )
    return rewards


def _reward_lists(table: pa.Table, path: Path) -> np.ndarray:
    """(N, K) float64, NaN for null."""
    lists = table["rewards"].combine_chunks()
    fixed = pa.types.is_fixed_size_list(lists.type) and lists.type.list_size > 1 and not lists.null_count
    if not fixed or not _is_number(lists.type.value_type):
        raise SourceError(
            f"{path}: 'rewards' must be a list of two or more numbers, as many on every row; found "
            f"{lists.type} with {lists.null_count} nulls"
        )
    return lists.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(len(table), -1).copy()

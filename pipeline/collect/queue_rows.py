"""Rows as TransferQueue stores them: flat columns, one key a row; and rows again."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    lazy_stack,
)
from torch import Tensor

from headrace.transforms import BatchError
from headrace.transforms.errors import listing

SEPARATOR = "."


def encode_rows(batch: TensorDictBase) -> tuple[TensorDict, dict[str, Any]]:
    """Columns of a batch as TransferQueue takes them, and a tag that its rows carry.

    Keys become one word, and ragged columns nested tensors. The tag says which columns there are, since a
    queue that is asked for rows with different ones returns those that all have, and whether the rows are of
    a lazy stack.

    Args:
        batch: TensorDict ``[N]`` or ``[envs, time]``, N ≥ 1, dense or a lazy stack.

    Raises:
        BatchError: a key has a dot.

    Example:
        >>> rows = TensorDict({("next", "reward"): torch.ones(2), "name": ["a", "b"]}, batch_size=[2])
        >>> columns, tag = encode_rows(rows)
        >>> sorted(columns.keys()), tag["lazy"]
        (['name', 'next.reward'], 0)
    """
    batch = batch.reshape(-1).detach().cpu()
    lazy = isinstance(batch, LazyStackedTensorDict)
    leaves = batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    keys = [(key,) if isinstance(key, str) else key for key in leaves]
    if dotted := [key for key in keys if any(SEPARATOR in part for part in key)]:
        raise BatchError(
            f"TransferQueue takes keys without dots; found {listing(map(str, dotted))}: rename them"
        )
    columns = TensorDict({}, batch_size=batch.batch_size)
    for key in keys:
        columns[SEPARATOR.join(key)] = _ragged(batch, key) if lazy else batch.get(key).clone()
    return columns, {"columns": _columns_of(columns), "lazy": int(lazy)}


def _ragged(batch: LazyStackedTensorDict, key: tuple[str, ...]) -> Any:
    rows = [row.get(key) for row in batch.unbind(0)]
    if not isinstance(rows[0], Tensor):
        return NonTensorStack(*(row.tolist() if hasattr(row, "tolist") else row for row in rows))
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def decode_rows(columns: TensorDictBase, tag: Mapping[str, Any]) -> TensorDictBase:
    """The rows of :func:`encode_rows`, whose tag they all have.

    Raises:
        BatchError: columns are missing.

    Example:
        >>> rows = TensorDict({("next", "reward"): torch.ones(2)}, batch_size=[2])
        >>> decode_rows(*encode_rows(rows))["next", "reward"].tolist()
        [1.0, 1.0]
    """
    if _columns_of(columns) != tag["columns"]:
        raise BatchError(
            f"TransferQueue returns all columns of rows that were put; found only {sorted(columns.keys())}"
        )
    count = columns.batch_size[0]
    if tag["lazy"]:
        each = {key: _unbound(columns.get(key)) for key in columns.keys()}
        return lazy_stack(
            [_nested({key: rows[row] for key, rows in each.items()}, []) for row in range(count)]
        )
    return _nested({key: _dense(columns.get(key)) for key in columns.keys()}, [count])


def _nested(columns: Mapping[str, Any], batch_size: Sequence[int]) -> TensorDict:
    batch = TensorDict({}, batch_size=batch_size)
    for key, column in columns.items():
        batch[tuple(key.split(SEPARATOR))] = column
    return batch


def _dense(column: Any) -> Any:
    """Dense columns come back as nested tensors, all of whose rows are alike."""
    return torch.stack(column.unbind()) if isinstance(column, Tensor) and column.is_nested else column


def _unbound(column: Any) -> Sequence[Any]:
    return column.unbind() if isinstance(column, Tensor) else column.tolist()


def _columns_of(columns: TensorDictBase) -> int:
    """Which columns there are, as a number."""
    return zlib.crc32("\n".join(sorted(columns.keys())).encode())

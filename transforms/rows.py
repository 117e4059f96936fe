"""Rows of a TensorDict: take some, in an order; take some out of the loss."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor


def take_rows(batch: TensorDictBase, rows: Tensor) -> TensorDictBase:
    """Gather rows, in the order given.

    `index_select` per dense leaf is what costs least; ``td.apply`` and ``td.gather`` would lose strings.

    Args:
        batch: TensorDict ``[N]``, dense or lazily stacked.
        rows: (M,) int64, row numbers.

    Returns:
        TensorDict ``[M]``, dense leaves copied, everything else indexed.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"x": torch.arange(3), "name": ["a", "b", "c"]}, batch_size=[3])
        >>> taken = take_rows(td, torch.tensor([2, 0]))
        >>> taken["x"].tolist(), list(taken["name"])
        ([2, 0], ['c', 'a'])
    """
    if len(rows) == 0:
        return batch[:0]  # lazy stacks and stacks of strings take no empty index, but a slice of nothing
    if isinstance(batch, LazyStackedTensorDict):
        return batch[rows]
    return TensorDict(
        {key: _take(batch.get(key), rows) for key in batch.keys()},
        batch_size=[len(rows), *batch.batch_size[1:]],
        device=batch.device,
    )


def _take(value: Any, rows: Tensor) -> Any:
    if isinstance(value, Tensor) and not value.is_nested:
        return value.index_select(0, rows)
    if isinstance(value, TensorDictBase):
        return take_rows(value, rows)
    return value[rows]


def silence_rows(batch: TensorDictBase, key: NestedKey, quiet: Tensor, value: float | bool) -> None:
    """Overwrite whole rows of a column, in place of the batch, never in place of the tensor.

    Args:
        batch: TensorDict ``[N]``; its entry `key` is replaced.
        key: a dense (N, ...) or ragged column.
        quiet: (N,) bool, rows to overwrite.
        value: what to write: False into a loss mask, NaN into log-probabilities.
    """
    if isinstance(batch, LazyStackedTensorDict):
        for td, silent in zip(batch.tensordicts, quiet.tolist(), strict=True):
            if silent:
                td.set(key, torch.full_like(td.get(key), value))
        return
    column = batch.get(key)
    wide = quiet.view(-1, *[1] * (column.ndim - 1))
    if column.dtype is torch.bool:
        # On CPU a broadcast `&` of bools costs ten times the same on bytes, which is the same bits.
        loud = (~wide).view(torch.uint8)
        batch.set(key, (column.contiguous().view(torch.uint8) & loud).view(torch.bool))
    else:
        batch.set(key, column.masked_fill(wide, value))


def device_of(batch: TensorDictBase) -> torch.device:
    """Where a batch lies: its own word, else that of its first tensor."""
    if batch.device is not None:
        return batch.device
    for value in batch.values(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")

"""Rows of a lazy stack as one TensorDict: per-token columns padded, all others stacked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
)
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.schema import has_key

from .padding import pad_left

Columns = dict[NestedKey, Tensor]


def stack_rows(
    batch: LazyStackedTensorDict,
    lengths: list[int],
    padding: Mapping[NestedKey, float | None],
    skip: Collection[NestedKey],
) -> tuple[TensorDict, Columns]:
    """Make dense columns of ragged rows.

    Args:
        batch: ``[N]``, N ≥ 1.
        lengths: of the rows, in tokens.
        padding: per-token columns, and what padding is in them (:func:`pad_left`). So is, whether it is named
            or not, every ragged column that is as long as the tokens in all rows.
        skip: columns to leave out.

    Returns:
        TensorDict ``[N]`` of what is not per token, texts and histories as they were; and the per-token
        columns (N, T, ...).

    Raises:
        BatchError: a column is on some rows only; a ragged one is not per token.
    """
    columns: Columns = {}
    rest = _stack(batch, lengths, padding, skip, (), columns)
    return rest, columns


def _stack(
    batch: Any,
    lengths: list[int],
    padding: Mapping[NestedKey, float | None],
    skip: Collection[NestedKey],
    prefix: tuple[str, ...],
    columns: Columns,
) -> TensorDict:
    rows = batch.unbind(0)
    rest = TensorDict({}, batch_size=[len(rows)], device=batch.device)
    for name in dict.fromkeys(name for row in rows for name in row.keys()):
        key: NestedKey = (*prefix, name) if prefix else name
        if key in skip or not has_key(batch, name):  # which raises where only some rows have it
            continue
        first = rows[0].get(name)
        if isinstance(first, Tensor):
            values = [row.get(name) for row in rows]
            if key in padding or len({value.shape for value in values}) > 1:
                _check_lengths(key, values, lengths)
                columns[key] = pad_left(values, padding.get(key))
            else:
                rest.set(name, torch.stack(values))
        elif _holds_tensors(first):
            inner = _stack(batch.get(name), lengths, padding, skip, (*prefix, name), columns)
            if not inner.is_empty():
                rest.set(name, inner)
        else:
            rest.set(name, batch.get(name))
    return rest


def _holds_tensors(value: Any) -> bool:
    """Whether something under a key has tensors in it, which texts and histories have not."""
    nested = is_tensor_collection(value) and not isinstance(value, NonTensorData | NonTensorStack)
    return nested and any(True for _ in value.keys(True, True))


def _check_lengths(key: NestedKey, values: list[Tensor], lengths: list[int]) -> None:
    """Refuse a ragged column that is not per token.

    Raises:
        BatchError: it is not as long as the tokens, or its rows differ in more than their length.
    """
    found = [value.shape[0] if value.ndim else 0 for value in values]
    wrong = [
        f"row {row} has {there} for {length} tokens"
        for row, (there, length) in enumerate(zip(found, lengths, strict=True))
        if there != length
    ]
    if wrong or len({value.shape[1:] for value in values}) > 1:
        shapes = listing(wrong) if wrong else f"shapes {[tuple(value.shape) for value in values[:4]]}"
        raise BatchError(
            f"a column that differs in length between rows has an entry per token; {key!r}: {shapes}. Were "
            "tokens cut off after it was written? Leave it out (batch.exclude) if it is not per token"
        )

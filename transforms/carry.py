"""Rows of several batches in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_tensor_collection,
    lazy_stack,
)

from .errors import BatchError


def join_rows(batches: Sequence[TensorDictBase], what: str) -> TensorDictBase:
    """Put the rows of batches one after the other; lazy stacks make a lazy stack.

    Args:
        batches: TensorDicts ``[n_k]``, with the same columns.
        what: what the message calls them.

    Raises:
        BatchError: they differ in columns, or in the widths of dense ones.

    Example:
        >>> from tensordict import TensorDict
        >>> parts = [TensorDict({"x": torch.ones(n)}, batch_size=[n]) for n in (2, 1)]
        >>> join_rows(parts, "parts").shape
        torch.Size([3])
    """
    first, *others = (
        set(batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)) for batch in batches
    )
    for other in others:
        if odd := sorted(map(str, first ^ other)):
            raise BatchError(f"{what} must have the same columns; only some have {', '.join(odd)}")
    try:
        return torch.cat(list(batches), 0)
    except RuntimeError as err:
        raise BatchError(
            f"{what} must have columns of the same width; pad them to one, or keep ragged rows in a lazy "
            f"stack: {err}"
        ) from err


def to_plain(batch: TensorDictBase | None) -> dict[str, Any] | None:
    """Rows as dicts of tensors and lists, which ``torch.load`` reads without trusting the file.

    Example:
        >>> rows = TensorDict({"x": torch.ones(2), "name": ["a", "b"]}, batch_size=[2])
        >>> list(from_plain(to_plain(rows))["name"])
        ['a', 'b']
    """
    if batch is None:
        return None
    if isinstance(batch, LazyStackedTensorDict):
        return {"rows": [to_plain(row) for row in batch.unbind(0)]}
    columns: dict[str, Any] = {}
    for key in batch.keys():
        value = batch.get(key)
        text = isinstance(value, NonTensorData | NonTensorStack)
        columns[key] = value.tolist() if text else to_plain(value) if is_tensor_collection(value) else value
    return {"columns": columns, "batch_size": list(batch.batch_size), "device": str(batch.device or "")}


def from_plain(plain: dict[str, Any] | None) -> TensorDictBase | None:
    """What :func:`to_plain` made dicts of."""
    if plain is None:
        return None
    if "rows" in plain:
        return lazy_stack([from_plain(row) for row in plain["rows"]])
    found = TensorDict({}, batch_size=plain["batch_size"], device=plain["device"] or None)
    for key, value in plain["columns"].items():
        found[key] = from_plain(value) if isinstance(value, dict) else value
    return found

"""Join batches of rows, and convert rows to dicts of tensors and lists, to save or send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

from headrace.transforms.table import BatchError
from headrace.transforms.table.tensordicts import as_texts, device_of, of_columns, stack_of_rows


def join_rows(batches: Sequence[TensorDictBase], what: str) -> TensorDictBase:
    """Put the rows of batches one after the other. Lazy stacks become one lazy stack.

    Args:
        batches: TensorDicts ``[n_k]``, with the same columns.
        what: name of the batches in messages.

    Raises:
        BatchError: the batches differ in columns, or in the widths of dense columns.

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
            raise BatchError(
                f"{what} must have the same columns; only some have {{found}}", found=", ".join(odd)
            )
    try:
        return torch.cat(list(batches), 0)
    except RuntimeError as err:
        raise BatchError(
            f"{what} must have columns of the same width; pad them, or keep ragged rows in a lazy stack: "
            "{why}",
            why=str(err),
        ) from err


def to_plain(batch: TensorDictBase | None) -> dict[str, Any] | None:
    """Rows as dicts of tensors and lists, which ``torch.load`` reads without trusting the file.

    Ragged rows with the same columns become one tensor per column, because thousands of small tensors take
    long to save and to send.

    Example:
        >>> rows = TensorDict({"x": torch.ones(2), "name": ["a", "b"]}, batch_size=[2])
        >>> list(from_plain(to_plain(rows))["name"])
        ['a', 'b']
        >>> ragged = stack_of_rows(*(TensorDict({"x": torch.ones(n)}) for n in (1, 2)))
        >>> to_plain(ragged)["packed"]["x"]
        {'flat': tensor([1., 1., 1.]), 'shapes': [(1,), (2,)]}
    """
    if batch is None:
        return None
    if isinstance(batch, LazyStackedTensorDict):
        rows = batch.unbind(0)
        if (columns := _packed(rows)) is None:
            return {"rows": [to_plain(row) for row in rows]}
        return {"packed": columns, "size": len(rows), "device": str(batch.device or "")}
    columns = {}
    if is_tensorclass(batch):  # get() of a tensorclass unwraps data
        batch = batch.to_tensordict()
    for key in batch.keys():
        value = batch.get(key)
        if isinstance(value, MetaData):  # one value for all rows
            columns[key] = {"meta": value.data, "batch_size": list(value.batch_size)}
        elif isinstance(value, NonTensorData | NonTensorStack):
            columns[key] = {"data": value.tolist(), "batch_size": list(value.batch_size)}
        else:
            columns[key] = to_plain(value) if is_tensor_collection(value) else value
    return {"columns": columns, "batch_size": list(batch.batch_size), "device": str(batch.device or "")}


def from_plain(plain: dict[str, Any] | None) -> TensorDictBase | None:
    """Restore the rows that :func:`to_plain` converted."""
    if plain is None:
        return None
    if "rows" in plain:
        return lazy_stack([from_plain(row) for row in plain["rows"]])
    batch: TensorDictBase
    if "packed" in plain:
        batch = stack_of_rows(*_unpacked(plain["packed"], plain["size"]))
        return batch.to(device_of(batch)) if plain["device"] else batch
    batch = TensorDict({}, batch_size=plain["batch_size"])
    for key, value in plain["columns"].items():
        if isinstance(value, dict) and "data" in value:
            value = _stack_data(value["data"], len(value["batch_size"]))
        elif isinstance(value, dict) and "meta" in value:
            value = MetaData(value["meta"], batch_size=value["batch_size"])
        batch[key] = from_plain(value) if isinstance(value, dict) else value
    # A state that was saved on a GPU may be read without a GPU. So the device is that of the tensors.
    return batch.to(device_of(batch)) if plain["device"] else batch


def _packed(rows: Sequence[Any]) -> dict[str, Any] | None:
    """Join the columns of single rows. Return None if rows differ in columns, or values cannot be joined."""
    columns = [row._tensordict for row in rows if type(row) is TensorDict and row.batch_dims == 0]
    if not columns or len(columns) < len(rows) or any(row.keys() != columns[0].keys() for row in columns):
        return None
    packed: dict[str, Any] = {}
    for name in columns[0]:
        values = [row[name] for row in columns]
        if all(type(value) is Tensor and value.dtype is values[0].dtype for value in values):
            flat = torch.cat([value.detach().reshape(-1) for value in values])
            packed[name] = {"flat": flat, "shapes": [tuple(value.shape) for value in values]}
        elif all(type(value) is NonTensorData for value in values):
            packed[name] = {"data": [value.data for value in values]}
        elif (inside := _packed(values)) is not None:
            packed[name] = {"inside": inside}
        else:
            return None
    return packed


def _unpacked(packed: Mapping[str, Any], size: int) -> list[TensorDict]:
    """Restore the single rows of :func:`_packed`, each in its own memory."""
    columns: list[dict[str, Any]] = [{} for _ in range(size)]
    for name, value in packed.items():
        each: Sequence[Any]
        if "flat" in value:
            flat = value["flat"].split([prod(shape) for shape in value["shapes"]])
            # A view would keep the memory of all rows, and a file with a view would have all rows.
            each = [row.clone().view(shape) for row, shape in zip(flat, value["shapes"], strict=True)]
        elif "data" in value:
            each = as_texts(value["data"]).tensordicts
        else:
            each = _unpacked(value["inside"], size)
        for row, entry in zip(columns, each, strict=True):
            row[name] = entry
    return [of_columns(row, [], None) for row in columns]


def _stack_data(data: Any, dims: int) -> Any:
    """Stack nested lists entry by entry, because TensorDict would make a tensor of a list of numbers."""
    return NonTensorStack(*(_stack_data(each, dims - 1) for each in data)) if dims else NonTensorData(data)

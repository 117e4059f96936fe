"""Pack rows into flat arrays, which are stored and sent without a copy of each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from torch import Tensor

from headrace.transforms.tensordicts import (
    as_texts,
    listed,
    of_columns,
    stack_of_rows,
    take_rows,
)

MOST_PARTS = 16  # largest number of parts of one put
LEAST_BYTES = 2**18  # smallest size of a part; a smaller one costs the same


class PackedColumn(NamedTuple):
    """A column of N rows, of one dtype."""

    dtype: torch.dtype
    numbers: Any
    """The bytes of all rows as one NumPy array."""
    shapes: Any
    """The shape of each row; of a dense column, its shape with all rows."""


class PackedRows(NamedTuple):
    """Packed rows. Each column is a :class:`PackedColumn`, a list of texts, or a mapping of these."""

    columns: Mapping[str, Any]
    size: int
    lazy: bool
    device: torch.device | None


def pack_rows(batch: TensorDictBase) -> PackedRows | TensorDictBase:
    """Pack rows into one array per column. Returns a plain copy if a column cannot be packed.

    Args:
        batch: TensorDict ``[N]`` on the CPU, dense or a lazy stack.

    Example:
        >>> rows = stack_of_rows(*(TensorDict({"x": torch.ones(n), "name": "a"}) for n in (1, 2)))
        >>> packed = pack_rows(rows)
        >>> packed.columns["x"].shapes, unpack_rows(packed)[1]["x"].tolist()
        ([(1,), (2,)], [1.0, 1.0])
    """
    lazy = type(batch) is LazyStackedTensorDict
    columns = _packed_rows(batch.tensordicts) if lazy and batch.stack_dim == 0 else _packed(batch)
    return batch.clone() if columns is None else PackedRows(columns, len(batch), lazy, batch.device)


def unpack_rows(packed: PackedRows | TensorDictBase) -> TensorDictBase:
    """Restore the rows of :func:`pack_rows`, in their own memory."""
    if isinstance(packed, TensorDictBase):
        return packed
    if not packed.lazy:
        return _dense(packed.columns, packed.size, packed.device)
    return stack_of_rows(*_rows(packed.columns, packed.size, packed.device))


def _bytes_of(column: Tensor) -> Any:
    flat = column.detach().contiguous().view(-1)
    if flat.stride() != (1,):  # a single number counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def _flat(column: PackedColumn) -> Tensor:
    if not len(column.numbers):
        return torch.empty(0, dtype=column.dtype)
    return torch.from_numpy(column.numbers.copy()).view(column.dtype)


def _packed(batch: Any) -> dict[str, Any] | None:
    """Pack the columns of a dense batch; None if a column cannot be packed."""
    if type(batch) is not TensorDict or batch.batch_dims != 1:
        return None
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        if type(value) is Tensor and not value.is_nested:
            columns[name] = PackedColumn(value.dtype, _bytes_of(value), tuple(value.shape))
        elif type(value) is NonTensorStack and value.batch_dims == 1:
            columns[name] = listed(value)
        elif (inner := _packed(value)) is not None:
            columns[name] = inner
        else:
            return None
    return columns


def _packed_rows(rows: Sequence[Any]) -> dict[str, Any] | None:
    """Pack the columns of single rows; None if their columns differ or cannot be packed."""
    plain = [dict(row.items()) for row in rows if type(row) is TensorDict and row.batch_dims == 0]
    names = plain[0].keys() if plain else ()
    if len(plain) < len(rows) or any(row.keys() != names for row in plain):
        return None
    columns: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in plain]
        first = values[0]
        if all(type(value) is Tensor and value.dtype is first.dtype for value in values):
            flat = torch.cat([value.detach().reshape(-1) for value in values])
            columns[name] = PackedColumn(
                first.dtype, _bytes_of(flat), [tuple(value.shape) for value in values]
            )
        elif all(type(value) is NonTensorData for value in values):
            columns[name] = [value.data for value in values]
        elif (inner := _packed_rows(values)) is not None:
            columns[name] = inner
        else:
            return None
    return columns


def _dense(columns: Mapping[str, Any], count: int, device: torch.device | None) -> TensorDict:
    made: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, PackedColumn):
            made[name] = _flat(value).view(value.shapes)
        else:
            made[name] = as_texts(value) if isinstance(value, list) else _dense(value, count, device)
    return of_columns(made, [count], device)


def _rows(columns: Mapping[str, Any], count: int, device: torch.device | None) -> list[TensorDict]:
    made: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in columns.items():
        each: Sequence[Any]
        if isinstance(value, PackedColumn):  # cloned, so that pickling one row does not pickle the others
            sizes = [math.prod(shape) for shape in value.shapes]
            flat = _flat(value).split(sizes)
            each = [row.clone().view(shape) for row, shape in zip(flat, value.shapes, strict=True)]
        else:
            texts = isinstance(value, list)
            each = as_texts(value).tensordicts if texts else _rows(value, count, device)
        for row, entry in zip(made, each, strict=True):
            row[name] = entry
    return [of_columns(row, [], device) for row in made]


def cut_by_group(rows: TensorDictBase, group: Tensor) -> tuple[list[TensorDictBase], Tensor]:
    """Cut rows into parts of whole groups: one group per part, or several if groups are many or small.

    Args:
        rows: TensorDict ``[N]``, N ≥ 1.
        group: (N,) int64, the group of each row.

    Returns:
        - At most `MOST_PARTS` parts, of about `LEAST_BYTES` or more.
        - (N, 2) int64: the index of each row's part, and of the row in its part.

    Example:
        >>> rows = TensorDict({"x": torch.arange(3 * LEAST_BYTES).view(3, -1)}, batch_size=[3])
        >>> parts, places = cut_by_group(rows, torch.tensor([5, 9, 5]))
        >>> [len(part) for part in parts], places.tolist()
        ([2, 1], [[0, 0], [1, 0], [0, 1]])
    """
    names, own = group.unique(return_inverse=True)
    count = max(1, min(len(names), MOST_PARTS, rows.bytes() // LEAST_BYTES))
    part = own * count // len(names)
    places, parts = torch.stack([part, part], 1), []
    for number in range(count):
        members = (part == number).nonzero().flatten()
        places[members, 1] = torch.arange(len(members))
        parts.append(rows if count == 1 else take_rows(rows, members, on_cpu=members, shared=True))
    return parts, places

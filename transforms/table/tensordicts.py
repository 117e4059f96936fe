"""Rows and columns of a TensorDict: take, join, mask, write and count them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from math import isfinite
from operator import attrgetter
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor, nn

from .errors import LISTED, BatchError, ColumnFact, listing

__all__ = [
    "ATTENTION",
    "ELSEWHERE",
    "FEW",
    "PROMPT",
    "RESPONSE",
    "any_row_has",
    "as_data",
    "as_texts",
    "bits_of",
    "bytes_of",
    "column_of",
    "count_in_loss",
    "count_true",
    "deep_copy",
    "describe_columns",
    "device_of",
    "entries_of",
    "fill_out_of_loss",
    "flat_rows",
    "leave_out",
    "leaves_of",
    "listed",
    "mask_tokens_of",
    "number_column",
    "number_of",
    "of_bits",
    "of_columns",
    "parts_of",
    "read_packed",
    "send_packed",
    "shallow_copy",
    "stack_of_rows",
    "stack_of_texts",
    "take_column",
    "take_rows",
    "without_rows",
    "write_column",
    "write_entry",
]

Column = tuple[NestedKey, torch.dtype, tuple[int, ...]]

PROMPT, RESPONSE = ("tokens", "prompt"), ("tokens", "response")  # as TorchRL's wrappers write them
ATTENTION = ("masks", "all_attention_mask")
ELSEWHERE = ("headrace", "elsewhere")
FEW = 2**16  # up to this many entries, a plain count is faster than adding eight bytes at a time
MOST = 255  # the sum of this many bytes of 0 or 1 still fits into a byte
FLOATS = {each for each in vars(torch).values() if isinstance(each, torch.dtype) and each.is_floating_point}
UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # torch can index them, and do little else
# dtype of a column of the table, by its dtype in the batch; any other is int64
KINDS = {torch.bool: torch.bool, **dict.fromkeys(FLOATS, torch.float64)}


def shallow_copy(batch: TensorDictBase) -> TensorDictBase:
    """Return the same columns in another TensorDict, also nested columns. Only references are copied.

    ``td.clone(recurse=False)`` does the same, but visits every string, which takes a quarter of a second for
    8,192 rows with two texts.

    Example:
        >>> td = TensorDict({"next": {"reward": torch.zeros(2)}}, batch_size=[2])
        >>> copy = shallow_copy(td)
        >>> copy["next", "done"] = torch.ones(2)
        >>> ("next", "done") in td.keys(True), copy["next", "reward"] is td["next", "reward"]
        (False, True)
    """
    if type(batch) is TensorDict:
        columns = batch._tensordict.copy()
        for key, value in columns.items():
            if type(value) is not Tensor and is_nested(value):
                columns[key] = shallow_copy(value)
        return _like(batch, columns)
    if _is_stack_of_rows(batch):
        return stack_of_rows(*map(shallow_copy, batch.tensordicts))
    return batch.clone(recurse=False)


def deep_copy(batch: TensorDictBase) -> TensorDictBase:
    """Do ``batch.clone()``, with a third of its calls for a plain TensorDict."""
    if type(batch) is not TensorDict:
        return batch.clone()
    return _like(batch, {name: deep_copy(value) for name, value in batch._tensordict.items()})


def _like(batch: TensorDict, columns: dict[str, Any]) -> TensorDict:
    """Make a TensorDict like another, with other columns that are known to fit."""
    if not _IS_PLAIN:
        names = batch.names if batch._has_names() else None
        return of_columns(columns, batch.batch_size, batch.device, names)
    made = TensorDict.__new__(TensorDict)  # costs a fifth of of_columns; a lazy stack needs thousands
    made._device, made._batch_size, made._td_dim_names = batch._device, batch._batch_size, batch._td_dim_names
    made._tensordict = columns
    return made


def is_nested(value: Any) -> bool:
    """Whether a value has columns of its own: a TensorDict, or a tensorclass such as TorchRL's ``Tokens``."""
    if type(value) is Tensor or type(value) is TensorDict:  # isinstance is slow for abstract classes
        return type(value) is TensorDict
    return is_tensor_collection(value) and not isinstance(value, NonTensorData | NonTensorStack | MetaData)


def _is_stack_of_rows(batch: TensorDictBase) -> bool:
    """Whether a batch is a lazy stack of its rows, without hooks or named dimensions."""
    return (
        type(batch) is LazyStackedTensorDict
        and batch.stack_dim == 0
        and len(batch.tensordicts) > 0
        and not any(value is not None and "hook" in name for name, value in vars(batch).items())
        and not batch._has_names()
    )


# TensorDict checks columns and rows even if they are known to fit, which costs as much as gathering them. The
# functions without checks are private; tensordict 0.10 to 0.15 have them.
stack_of_rows = LazyStackedTensorDict._new_lazy_unsafe


def of_columns(
    columns: dict[str, Any], size: Sequence[int], device: torch.device | None, names: Any = None
) -> TensorDict:
    """Make a TensorDict of columns that are known to fit."""
    return TensorDict._new_unsafe(columns, batch_size=torch.Size(size), device=device, names=names)


_IS_PLAIN = {*vars(of_columns({}, [], None))} == {"_device", "_batch_size", "_td_dim_names", "_tensordict"}


def leaves_of(batch: TensorDictBase) -> Iterator[tuple[NestedKey, Tensor]]:
    """Yield the tensors of a batch with their keys; none for a lazy stack, whose columns may be ragged.

    Example:
        >>> batch = TensorDict({"a": {"b": torch.zeros(1)}, "name": ["x"]}, batch_size=[1])
        >>> [key for key, _ in leaves_of(batch)]
        [('a', 'b')]
    """
    for name, value in () if isinstance(batch, LazyStackedTensorDict) else batch.items():
        if isinstance(value, Tensor):
            yield name, value
        elif is_nested(value):
            for key, leaf in leaves_of(value):
                yield (name, *((key,) if isinstance(key, str) else key)), leaf


def take_rows(
    batch: TensorDictBase, rows: Tensor, *, on_cpu: Tensor | None = None, shared: bool = False
) -> TensorDictBase:
    """Gather rows, in the order given.

    `index_select` per dense leaf is fastest; ``td.apply`` and ``td.gather`` would lose strings.

    Args:
        batch: TensorDict ``[N]``, dense or lazily stacked.
        rows: (M,) int64, row numbers.
        on_cpu: the same numbers on the CPU. Texts and ragged rows need these; None: they are read from the
            device.
        shared: whether the result may hold the batch's own rows of a lazy stack, because nothing is written
            to them; else each row is a shallow copy.

    Returns:
        TensorDict ``[M]``, dense leaves copied, everything else indexed. An empty result has only tensors.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"x": torch.arange(3), "name": ["a", "b", "c"]}, batch_size=[3])
        >>> taken = take_rows(td, torch.tensor([2, 0]))
        >>> taken["x"].tolist(), list(taken["name"])
        ([2, 0], ['c', 'a'])
    """
    if len(batch) == 0:
        return batch
    if len(rows) == 0:  # an empty lazy stack has no columns, and an empty stack of strings no shape
        return without_rows(describe_columns(batch), device_of(batch))
    seen = rows if on_cpu is None else on_cpu
    if isinstance(batch, NonTensorStack) and batch.stack_dim == 0:
        return stack_of_texts(*(batch.tensordicts[row] for row in seen.tolist()))
    if _is_stack_of_rows(batch):
        chosen = [batch.tensordicts[row] for row in seen.tolist()]
        return stack_of_rows(*(chosen if shared else map(shallow_copy, chosen)))
    if isinstance(batch, LazyStackedTensorDict):
        return batch[seen].clone(recurse=False)  # indexing returns the rows themselves
    columns = {key: take_column(value, rows, on_cpu=on_cpu) for key, value in batch.items()}
    return of_columns(columns, [len(rows), *batch.batch_size[1:]], batch.device)


def leave_out(batch: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
    """Return a batch without some columns, and without nested TensorDicts that are then empty.

    Example:
        >>> batch = TensorDict({"a": {"b": torch.zeros(1)}, "c": torch.ones(1)}, batch_size=[1])
        >>> list(leave_out(batch, [("a", "b")]).keys())
        ['c']
    """
    rest = batch.exclude(*keys)
    row = rest.tensordicts[0] if isinstance(rest, LazyStackedTensorDict) and len(rest) else rest
    empty = [name for name, value in row.items() if is_nested(value) and not len(value.keys())]
    return rest.exclude(*empty) if empty else rest


def rows_between(batch: TensorDictBase, some: slice) -> TensorDictBase:
    """The tensors of consecutive rows: views where rows are dense."""
    if type(batch) is not TensorDict:
        return shallow_copy(batch[some])
    columns = {key: value[some] for key, value in batch.items() if isinstance(value, Tensor)}
    columns |= {key: rows_between(value, some) for key, value in batch.items() if is_nested(value)}
    size = len(range(*some.indices(len(batch))))
    return of_columns(columns, [size, *batch.batch_size[1:]], batch.device)


def take_column(value: Any, rows: Tensor, *, on_cpu: Tensor | None = None) -> Any:
    """Do :func:`take_rows` for one entry of a batch, of any kind."""
    if isinstance(value, Tensor):
        return value[rows] if value.dtype in UNSIGNED else value.index_select(0, rows)
    if isinstance(value, TensorDictBase):
        return take_rows(value, rows, on_cpu=on_cpu)
    return value[rows if on_cpu is None else on_cpu]


def write_column(batch: TensorDictBase, key: NestedKey, values: Any) -> None:
    """Write a column to a batch that is the caller's own, like ``batch.set``, but without its checks.

    Args:
        batch: TensorDict ``[N]``, by :func:`shallow_copy` or :func:`take_rows`.
        key: key of the column.
        values: (N, ...), on the device of the batch; or texts.

    Example:
        >>> from tensordict import lazy_stack
        >>> batch = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])
        >>> write_column(batch, ("next", "reward"), torch.tensor([3.0, 4.0]))
        >>> batch["next", "reward"].tolist()
        [3.0, 4.0]
    """
    is_text = type(values) is NonTensorStack and values.stack_dim == 0
    if not _is_stack_of_rows(batch) or not (is_text or isinstance(values, Tensor)):
        batch.set(key, values)
        return
    entries = values.tensordicts if is_text else values.unbind(0)
    for row, entry in zip(batch.tensordicts, entries, strict=True):
        write_entry(row, key, entry)


def write_entry(row: TensorDictBase, key: NestedKey, value: Any) -> None:
    """Do ``row.set`` without its checks, for a row that is the caller's own."""
    *path, last = (key,) if isinstance(key, str) else key
    write_entries(row, path, [(last, value)])


def write_entries(row: TensorDictBase, path: Sequence[str], values: Iterable[tuple[str, Any]]) -> None:
    """Do :func:`write_entry` for several names below one path."""
    inside: Any = row
    for name in path:
        if type(inside) is TensorDict:
            columns = inside._tensordict
            if name not in columns:
                columns[name] = _like(inside, {})
            inside = columns[name]
    if type(inside) is TensorDict:
        inside._tensordict.update(values)
    else:
        for name, value in values:
            row.set((*path, name), value)


# TensorDict checks every text whenever one is made, stacked, indexed or listed, at 1 to 40 microseconds each.
# The functions without checks are private, like those above.
stack_of_texts = NonTensorStack._new_lazy_unsafe
_text_of = NonTensorData._from_tensordict


def as_texts(values: Sequence[str]) -> NonTensorStack:
    """Make a column with one text per row.

    Example:
        >>> as_texts(["a", "b"]).tolist()
        ['a', 'b']
    """
    nothing = of_columns({}, [], None)
    return stack_of_texts(*(_text_of(nothing, {"data": value, "_is_non_tensor": True}) for value in values))


def as_data(value: Any, size: Sequence[int], device: torch.device | None) -> NonTensorData:
    """Wrap a value that is not a tensor as an entry of a TensorDict.

    Example:
        >>> as_data((2, 3), [1], None).data
        (2, 3)
    """
    return _text_of(of_columns({}, size, device), {"data": value, "_is_non_tensor": True})


def listed(column: Any) -> list[Any]:
    """Convert a column that is not a tensor to a list of N values.

    Example:
        >>> listed(as_texts(["a", "b"]))
        ['a', 'b']
    """
    if type(column) is NonTensorStack and column.stack_dim == 0 and column.batch_dims == 1:
        with suppress(AttributeError, KeyError):
            return [row._non_tensordict["data"] for row in column.tensordicts]
    return column.tolist() if hasattr(column, "tolist") else list(column)


def texts_of(column: Any) -> list[Any]:
    """The values of a column (N,) or (N, 1) that is not a tensor, one per row."""
    return [each[0] if isinstance(each, list) and len(each) == 1 else each for each in listed(column)]


def flat_rows(values: Tensor) -> Tensor:
    """Flatten (N, ...) to (N, K), even if N is 0."""
    return values if values.ndim == 2 else values.unsqueeze(1).flatten(1)


def describe_columns(batch: TensorDictBase) -> list[Column]:
    """Key, dtype and shape per row of each tensor column of a batch ``[N]``, read from its first row."""
    row = batch.tensordicts[0] if isinstance(batch, LazyStackedTensorDict) else batch[0]
    leaves = [(key, row.get(key)) for key in row.keys(include_nested=True, leaves_only=True)]
    return [(key, leaf.dtype, tuple(leaf.shape)) for key, leaf in leaves if isinstance(leaf, Tensor)]


def without_rows(columns: Sequence[Column], device: torch.device | None) -> TensorDict:
    """Make a TensorDict ``[0]`` with the columns that :func:`describe_columns` returned."""
    batch = TensorDict({}, batch_size=[0], device=device)
    for key, dtype, shape in columns:
        batch.set(key, torch.empty(0, *shape, dtype=dtype, device=device))
    return batch


def mask_tokens_of(batch: TensorDictBase, key: NestedKey, masked: Tensor) -> None:
    """Take whole rows of a column out of the loss: False in a mask, NaN in log-probabilities.

    The batch gets a new tensor; the old one is left alone. Only ragged rows need a device read.

    Args:
        batch: TensorDict ``[N]``; its entry `key` is replaced.
        key: a dense (N, ...) or ragged column, bool or floating point.
        masked: (N,) bool, the rows.
    """
    if isinstance(batch, LazyStackedTensorDict):
        entries = entries_of(batch, key) or []
        for row, entry, is_silent in zip(batch.tensordicts, entries, masked.tolist(), strict=True):
            if is_silent:
                silence = False if entry.dtype is torch.bool else float("nan")
                write_entry(row, key, torch.full_like(entry, silence))
        return
    column = batch.get(key)
    wide = masked.view(-1, *[1] * (column.ndim - 1))
    # On a CPU, `column & ~wide` would cost ten times as much, and `masked_fill` up to three times.
    if column.dtype is torch.bool:
        kept_bits = (~wide).view(torch.uint8).neg()  # 0 or 255: a True may be any byte but 0
        batch.set(key, (column.contiguous().view(torch.uint8) & kept_bits).view(torch.bool))
    else:
        batch.set(key, column + torch.zeros_like(wide, dtype=column.dtype).masked_fill_(wide, float("nan")))


def fill_out_of_loss(
    batch: TensorDictBase, mask_key: NestedKey, log_prob_key: NestedKey | None, others: Iterable[NestedKey]
) -> None:
    """Make token columns finite at tokens out of the loss, so that a loss may multiply them by its mask.

    0 · NaN is NaN, and ``torch.where`` has a NaN gradient even where it does not choose the NaN. A token
    without a finite log-probability is out of the loss (:func:`count_in_loss`), so it leaves the mask. Values
    out of the mask that are not finite become 0. The batch gets new tensors; the old ones are left alone.
    Nothing is read from a device.

    Args:
        batch: TensorDict ``[N]``, dense or ragged; without the mask nothing happens.
        mask_key: (N, T) bool.
        log_prob_key: (N, T) float; None: not read.
        others: (N, T) float each; a column that is missing, or has another size, stays as it is.
    """
    for rows in batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]:
        mask = rows.get(mask_key, None)
        if mask is None:
            continue
        keys = [key for key in dict.fromkeys((log_prob_key, *others)) if key is not None]
        found = {key: rows.get(key, None) for key in keys}
        if (own := found.get(log_prob_key)) is not None and own.numel() == mask.numel():
            mask = mask & own.isfinite().view_as(mask)
            write_entry(rows, mask_key, mask)
        for key, column in found.items():
            if column is not None and column.is_floating_point() and column.numel() == mask.numel():
                out = ~(mask.view_as(column) | column.isfinite())
                write_entry(rows, key, column.masked_fill(out, 0.0))


def device_of(batch: TensorDictBase) -> torch.device:
    """The device of a batch: its `device` if that is set, else the device of its first tensor."""
    if batch.device is not None:
        return batch.device
    if isinstance(batch, LazyStackedTensorDict) and batch.tensordicts:
        return device_of(batch.tensordicts[0])  # its own columns may be ragged
    for value in batch.values(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")


# -- numbers of rows, and counts of tokens -----------------------------------------------------------------


def count_true(mask: Tensor) -> Tensor:
    """(N,) int64: the True entries of each row of a bool (N, ...).

    On the CPU eight bytes are added at a time, as one integer, because PyTorch's sum of bools takes sixty
    times as long. Other devices use PyTorch's sum, and nothing is read from them.

    Example:
        >>> count_true(torch.tensor([[True, False, True], [False, False, False]])).tolist()
        [2, 0]
    """
    rows = flat_rows(mask)
    if rows.device.type != "cpu":
        return rows.sum(-1)
    if rows.numel() <= FEW or rows.shape[1] < 8:
        return rows.count_nonzero(-1)
    width = rows.shape[1] // 8 * 8
    whole = rows[:, :width].reshape(-1)
    if whole.storage_offset() % 8:  # rows of a larger batch may begin at any byte
        whole = whole.clone()
    words = whole.view(torch.uint8).view(torch.int64).view(len(rows), -1)
    if int(whole.view(torch.uint8).amax()) > 1:  # in a view of other data, True may be a byte other than 1
        return (rows != 0).sum(-1)
    total = rows[:, width:].sum(-1)
    for part in words.split(MOST, dim=1):
        total = total + part.sum(-1).view(torch.uint8).view(-1, 8).sum(-1)
    return total


WIDE = object()
"""Stands for a column that has more numbers per row than were asked for."""


def number_column(
    batch: TensorDictBase, key: NestedKey, *, raw: bool = False, most: int | None = None
) -> Any:
    """Return a column of a few numbers per row: (N,) or (N, K) on its device, or N texts; None if missing.

    Args:
        batch: TensorDict ``[N]``, dense or a lazy stack.
        key: key of the column.
        raw: return the column as it is in the batch; ragged rows are a list.
        most: numbers per row; a column with more, or with ragged rows, is returned as :data:`WIDE`.

    Raises:
        BatchError: only some rows have the column, its rows are ragged, it is a group of columns, or a number
            is complex or needs 64 bits.
    """
    value = column_of(batch, key)
    if value is None or raw:
        return value
    if isinstance(value, TensorDict):
        inner = next(iter(value.keys(include_nested=True, leaves_only=True)), "NAME")
        first = tuple(part for each in (key, inner) for part in (each if isinstance(each, tuple) else [each]))
        raise BatchError(f"{key!r} is a group of columns: name one of them, such as {first!r}")
    if most is not None and (
        isinstance(value, list) or (isinstance(value, Tensor) and value.numel() > most * len(batch))
    ):
        return WIDE
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        raise BatchError(f"one number per row is needed in {key!r}; found ragged rows")
    if not isinstance(value, Tensor):
        return texts_of(value)
    value = value.detach() if value.requires_grad else value
    if value.dtype in UNSIGNED or value.is_complex():
        value = _whole_numbers(value, key)
    if value.shape[1:].numel() == 1:  # even without rows
        return value if value.ndim == 1 else value.reshape(-1)
    return value.flatten(1)


def _whole_numbers(column: Tensor, key: NestedKey) -> Tensor:
    """Convert an unsigned column to int64, and refuse a complex one.

    Raises:
        BatchError: a number is complex, or needs 64 bits.
    """
    if column.is_complex():
        raise BatchError(
            "a column must have real numbers; {key} has {dtype}", key=repr(key), dtype=column.dtype
        )
    whole = column.to(torch.int64)
    if column.dtype is torch.uint64 and bool((whole < 0).any()):
        large = listing(str(number) for number in column[whole < 0].reshape(-1)[:LISTED].tolist())
        raise BatchError(f"a number must have at most 63 bits; {key!r} has {large}")
    return whole


def column_of(batch: TensorDictBase, key: NestedKey) -> Any:
    """Return the entry under a key, dense or stacked from the rows of a lazy stack; None if there is none.

    Rows of different shapes come back as a list of tensors.

    Raises:
        BatchError: only some rows have the column.
    """
    if type(batch) is TensorDict or not isinstance(batch, LazyStackedTensorDict):  # as in is_nested
        return _under(batch, key)
    rows = entries_of(batch, key)
    if rows is None:
        return None
    if isinstance(rows[0], Tensor):
        return torch.stack(rows) if len({row.shape for row in rows}) == 1 else rows
    return stack_of_texts(*rows) if {type(row) for row in rows} == {NonTensorData} else batch.get(key)


def entries_of(batch: LazyStackedTensorDict, key: NestedKey) -> list[Any] | None:
    """Return the entry of each row of a lazy stack under a key; None if no row has one.

    Raises:
        BatchError: only some rows have the column.
    """
    rows = _entries(batch.tensordicts, key)
    if (kinds := set(map(type, rows))) <= {type(None)}:
        return None
    if type(None) in kinds:
        have = [str(number) for number, value in enumerate(rows) if value is not None]
        raise BatchError(
            f"a column is on every row or on none; {key!r} is on {len(have)} of {len(rows)} rows: "
            f"{listing(have)}"
        )
    return rows


def parts_of(batch: TensorDictBase, key: NestedKey) -> list[Any]:
    """Return a list: the column of a dense batch, or the entry of each row of a lazy stack; empty if missing.

    Raises:
        BatchError: only some rows have the column.
    """
    if isinstance(batch, LazyStackedTensorDict):
        return entries_of(batch, key) or []
    return [] if (column := _under(batch, key)) is None else [column]


def _entries(rows: Sequence[Any], key: NestedKey) -> list[Any]:
    for name in (key,) if isinstance(key, str) else key:
        kinds = set(map(type, rows))
        if kinds == {type(None)}:
            break
        if kinds == {TensorDict}:  # a tenth of the cost of row.get
            rows = [row._tensordict.get(name) for row in rows]
        else:
            rows = [_under(row, name) for row in rows]
    return list(rows)


def any_row_has(batch: TensorDictBase, key: NestedKey) -> bool:
    """Whether a batch, or a row of a lazy stack, has this column."""
    if isinstance(batch, LazyStackedTensorDict):
        return any(value is not None for value in _entries(batch.tensordicts, key))
    return _under(batch, key) is not None


def first_names(batch: TensorDictBase) -> set[str] | None:
    """The first names of all keys of a batch, over all its rows; None if a row is no plain TensorDict."""
    rows = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
    return set().union(*map(_COLUMNS, rows)) if set(map(type, rows)) <= {TensorDict} else None


_COLUMNS = attrgetter("_tensordict")


def same_column(before: TensorDictBase, after: TensorDictBase, key: NestedKey) -> bool:
    """Whether two batches have the same tensor objects under a key, or both have none."""
    old, new = (parts_of(batch, key) or [None] for batch in (before, after))
    return len(old) == len(new) and all(map(_same, old, new))


def _same(old: Any, new: Any) -> bool:
    return old is new or (
        isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and old.shape == new.shape
        and old.data_ptr() == new.data_ptr()
        and old.numel() > 0  # an empty tensor has no address
    )


def _under(batch: Any, key: NestedKey) -> Any:
    """Return the entry under a key of a dense batch or a row; None if there is none."""
    for name in (key,) if isinstance(key, str) else key:
        if type(batch) is TensorDict:
            batch = batch._tensordict.get(name)
            continue
        if not is_nested(batch):
            return None
        if isinstance(batch, LazyStackedTensorDict):
            batch = column_of(batch, name)
            continue
        inside: Any = batch._tensordict if is_tensorclass(batch) else batch
        columns = getattr(inside, "_tensordict", None)
        batch = columns.get(name) if type(columns) is dict else inside.get(name, None)
    return batch


def loss_mask_of(batch: TensorDictBase, key: NestedKey) -> Any:
    """Return the loss mask, (N, T) bool or a list of ragged rows. Without a mask, make one from the response.

    TorchRL's wrappers write ``("tokens", "prompt")`` and ``("tokens", "response")``, which together are as
    wide as ``("masks", "all_attention_mask")``. Then the attended tokens after the prompt train. The result
    is None if nothing says which tokens train.

    Raises:
        BatchError: the mask is not bool.
    """
    mask = column_of(batch, key)
    if mask is None:
        parts = [column_of(batch, name) for name in (PROMPT, RESPONSE, ATTENTION)]
        if any(part is None for part in parts):
            return None
        is_dense = all(isinstance(part, Tensor) for part in parts)
        mask, key = [], ATTENTION
        for before, behind, real in [parts] if is_dense else zip(*parts, strict=True):
            if before.shape[-1] + behind.shape[-1] != real.shape[-1]:
                return None
            mask.append(real.clone())
            mask[-1][..., : before.shape[-1]] = False
        mask = mask[0] if is_dense else mask
    _require_bool([mask] if isinstance(mask, Tensor) else mask, key)
    return mask


def _require_bool(masks: Iterable[Tensor], key: NestedKey) -> None:
    for mask in masks:
        if mask.dtype is not torch.bool:
            raise BatchError(
                f"a loss mask is bool, True trains; {key!r} is {mask.dtype}: convert it by `mask != 0`"
            )


def check_mask(batch: TensorDictBase, key: NestedKey) -> None:
    """Refuse a loss mask that is not bool, such as a float mask, because its rows could not be masked.

    Raises:
        BatchError: the mask is not bool.
    """
    _require_bool(parts_of(batch, key), key)


def number_of(mask_key: NestedKey) -> NestedKey:
    """The key under which a batch has the number of tokens in a mask, if the tokens are stored elsewhere.

    The column is (N,) int64. Or it is (N, 2), and the second number counts only tokens with a finite
    log-probability.
    """
    return ("headrace", "number_of", mask_key if isinstance(mask_key, str) else ".".join(mask_key))


def count_in_loss(
    batch: TensorDictBase, mask_key: NestedKey, log_prob_key: NestedKey | None
) -> tuple[Tensor | None, Tensor | None]:
    """Count each row's tokens in the loss mask, and those with a finite log-probability; (N,) int64 each.

    TorchRL's GRPOLoss uses the second count. Without log-probabilities both are the same. If the tokens are
    stored elsewhere, the batch has the counts (:func:`number_of`). Both are None if nothing says which tokens
    train.

    Raises:
        BatchError: mask and log-probabilities differ in shape, or the mask is not bool.
    """
    mask = loss_mask_of(batch, mask_key)
    if mask is None:
        number = number_column(batch, number_of(mask_key))
        if number is None or number.ndim == 1:
            return number, number
        return number[:, 0], number[:, 0 if log_prob_key is None else 1]
    log_prob = None if log_prob_key is None else column_of(batch, log_prob_key)
    if isinstance(mask, list) or isinstance(log_prob, list):
        given = [column for column in (mask, log_prob) if column is not None]
        sizes = [[row.numel() for row in column] for column in given]
        if sizes[0] != sizes[-1]:
            raise _differ(mask_key, log_prob_key, *sizes)
        flat, *rest = (
            torch.cat([row if row.ndim == 1 else row.flatten() for row in column]) for column in given
        )
        tokens = _count_between(flat, sizes[0])
        if not rest or (rest[0].device.type == "cpu" and bool(rest[0].sum().isfinite())):  # see below
            return tokens, tokens
        return tokens, _count_between(flat & rest[0].isfinite(), sizes[0])
    tokens = count_true(mask)
    if log_prob is None:
        return tokens, tokens
    if mask.numel() != log_prob.numel():
        raise _differ(mask_key, log_prob_key, tuple(mask.shape), tuple(log_prob.shape))
    masks, values = flat_rows(mask), flat_rows(log_prob)
    if values.device.type != "cpu":
        return tokens, count_true(masks & torch.isfinite(values))
    # A sum is finite only if all its terms are. The sum takes a sixth of the time of a test of every number.
    sums = values.sum(-1)
    if isfinite(sums.sum().item()):
        return tokens, tokens
    odd = (~torch.isfinite(sums) & (tokens > 0)).nonzero().flatten()
    if len(odd) == 0:
        return tokens, tokens
    return tokens, tokens.index_copy(0, odd, count_true(masks[odd] & torch.isfinite(values[odd])))


def _count_between(flags: Tensor, sizes: Sequence[int]) -> Tensor:
    """(N,) int64: the True entries of each row of (ΣT,) bool `flags`, whose rows have these `sizes`."""
    ends = torch.tensor([0, *accumulate(sizes)], device=flags.device)
    upto = nn.functional.pad(flags.cumsum(0, dtype=torch.int32), (1, 0))  # an overflow beyond 2³¹ cancels out
    return upto.index_select(0, ends).diff().long()


def _differ(mask_key: NestedKey, log_prob_key: Any, mask: Any, log_prob: Any) -> BatchError:
    return BatchError(
        f"a token has one mask and one log-probability; found {{mask}} {mask} and {{log_prob}} {log_prob}",
        mask=ColumnFact(mask_key, "loss_mask_key"),
        log_prob=ColumnFact(log_prob_key, "log_prob_key"),
    )


def read_packed(columns: Sequence[Tensor]) -> list[Tensor]:
    """Copy columns of numbers to the CPU, as int64, float64 or bool; from a device in one packed copy.

    Args:
        columns: (N,) or (N, K) each, on one device.
    """
    kinds = [KINDS.get(column.dtype, torch.int64) for column in columns]
    if {column.device.type for column in columns} == {"cpu"}:
        # Copies, because the caller may write to the batch in place while the numbers are in use.
        return [column.to(kind, copy=True) for column, kind in zip(columns, kinds, strict=True)]
    bits = [bits_of(column).reshape(-1) for column in columns]
    parts = torch.cat(bits).cpu().split([len(part) for part in bits])
    return [
        of_bits(part, kind).reshape(column.shape)
        for part, column, kind in zip(parts, columns, kinds, strict=True)
    ]


def bits_of(column: Tensor) -> Tensor:
    """Convert a column to int64; floats become the bits of their float64."""
    return column.double().view(torch.int64) if column.is_floating_point() else column.long()


def of_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Restore the column that :func:`bits_of` converted."""
    return (bits.contiguous().view(torch.float64) if dtype.is_floating_point else bits).to(dtype)


def bytes_of(column: Tensor) -> Tensor:
    """(B,) uint8: the bytes of the numbers, in order.

    Example:
        >>> bytes_of(torch.ones(()).expand(1)).tolist()
        [0, 0, 128, 63]
    """
    # A dimension of size 1 may keep the stride 0, which `view` to another size refuses.
    return column.contiguous().as_strided([column.numel()], [1]).view(torch.uint8)


def send_packed(columns: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Send columns to a device in one packed copy; for the CPU, return them as they are.

    Args:
        columns: tensors of any shape and dtype, on the CPU.
        device: where they go.
    """
    if device.type == "cpu":
        return list(columns)
    # `view` to a dtype needs an offset that is a multiple of its size. Sizes are powers of two, so columns in
    # descending order of size have such offsets.
    widest_first = sorted(range(len(columns)), key=lambda number: -columns[number].element_size())
    flat = [bytes_of(columns[number]) for number in widest_first]
    parts = torch.cat(flat).to(device, non_blocking=True).split([len(part) for part in flat])
    there = dict(zip(widest_first, parts, strict=True))
    return [there[number].view(each.dtype).view(each.shape) for number, each in enumerate(columns)]

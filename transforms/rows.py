"""Rows of a TensorDict: take some, join some, leave some out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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
    is_leaf_nontensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

from .checks import Rule
from .errors import BatchError

Column = tuple[NestedKey, torch.dtype, tuple[int, ...]]

ROWS_LEFT_OUT = " (Rows out of the statistics are not in these row numbers.)"


def shallow_copy(batch: TensorDictBase) -> TensorDictBase:
    """The same columns in another TensorDict, nested ones too. Nothing is copied but the references.

    ``td.clone(recurse=False)`` does the same, but visits every single string: 8,192 rows with two texts take
    it a quarter of a second.

    Example:
        >>> td = TensorDict({"next": {"reward": torch.zeros(2)}}, batch_size=[2])
        >>> copy = shallow_copy(td)
        >>> copy["next", "done"] = torch.ones(2)
        >>> ("next", "done") in td.keys(True), copy["next", "reward"] is td["next", "reward"]
        (False, True)
    """
    if type(batch) is not TensorDict or not len(batch):  # stacks of no strings know no shape
        return batch.clone(recurse=False)
    columns = {}
    for key, value in batch.items():
        columns[key] = shallow_copy(value) if _is_nested(value) else value
    names = batch.names if batch._has_names() else None
    return of_columns(columns, batch.batch_size, batch.device, names)


def _is_nested(value: Any) -> bool:
    if type(value) is Tensor:  # asked first: abstract classes take long to say whose they are
        return False
    return isinstance(value, TensorDictBase) and not isinstance(value, NonTensorData | NonTensorStack)


_unchecked = getattr(TensorDict, "_new_unsafe", TensorDict)  # a private name, so that it may be missing


def of_columns(
    columns: dict[str, Any], size: Sequence[int], device: torch.device | None, names: Any = None
) -> TensorDict:
    """A TensorDict of columns that are known to fit; to check each of them costs as much as to gather it."""
    return _unchecked(columns, batch_size=torch.Size(size), device=device, names=names)


def jagged_keys(batch: TensorDictBase) -> list[NestedKey]:
    """The columns that are nested tensors, which neither indexing nor arithmetic by rows knows.

    Example:
        >>> rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
        >>> jagged_keys(TensorDict({"a": {"b": rows}, "c": torch.zeros(2)}, batch_size=[2]))
        [('a', 'b')]
    """
    if isinstance(batch, LazyStackedTensorDict):
        return []
    found: list[NestedKey] = []
    for key, value in batch.items():
        if type(value) is Tensor or isinstance(value, Tensor):
            found += [key] if value.is_nested else []
        elif _is_nested(value):
            inner = jagged_keys(value)
            found += [(key, *((deep,) if isinstance(deep, str) else deep)) for deep in inner]
    return found


def take_rows(batch: TensorDictBase, rows: Tensor, *, on_cpu: Tensor | None = None) -> TensorDictBase:
    """Gather rows, in the order given.

    `index_select` per dense leaf is what costs least; ``td.apply`` and ``td.gather`` would lose strings.

    Args:
        batch: TensorDict ``[N]``, dense or lazily stacked.
        rows: (M,) int64, row numbers.
        on_cpu: the same where the host sees them, which texts and ragged rows else read from the device.

    Returns:
        TensorDict ``[M]``, dense leaves copied, everything else indexed; of no rows, the tensors alone.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"x": torch.arange(3), "name": ["a", "b", "c"]}, batch_size=[3])
        >>> taken = take_rows(td, torch.tensor([2, 0]))
        >>> taken["x"].tolist(), list(taken["name"])
        ([2, 0], ['c', 'a'])
    """
    if len(batch) == 0:
        return batch
    if len(rows) == 0:  # lazy stacks of nothing have no columns, and stacks of no strings no shape
        return without_rows(describe_columns(batch), device_of(batch))
    seen = rows if on_cpu is None else on_cpu
    if isinstance(batch, NonTensorStack) and batch.stack_dim == 0:
        return _stack_of_texts(*(batch.tensordicts[row] for row in seen.tolist()))
    if isinstance(batch, LazyStackedTensorDict):
        return batch[seen].clone(recurse=False)  # indexing alone hands out the rows themselves
    columns = {key: take_column(value, rows, on_cpu=on_cpu) for key, value in batch.items()}
    return of_columns(columns, [len(rows), *batch.batch_size[1:]], batch.device)


def rows_that_stay(batch: TensorDictBase, stays: Tensor) -> TensorDictBase:
    """The rows where (N,) bool `stays`; the batch itself where all do. One device read."""
    rows = stays.nonzero().flatten()
    return batch if len(rows) == len(batch) else take_rows(batch, rows)


def take_column(value: Any, rows: Tensor, *, on_cpu: Tensor | None = None) -> Any:
    """:func:`take_rows` of whatever a batch holds under a key."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows)
    if isinstance(value, TensorDictBase):
        return take_rows(value, rows, on_cpu=on_cpu)
    return value[rows if on_cpu is None else on_cpu]


# TensorDict looks at every text whenever one is made, stacked, indexed or listed: 1 to 40 microseconds each.
# The names by which it does without are not public; where one is missing, the public way is taken.
_stack_of_texts = getattr(NonTensorStack, "_new_lazy_unsafe", NonTensorStack)
_text_of = getattr(NonTensorData, "_from_tensordict", lambda _, data: NonTensorData(data["data"]))


def as_texts(values: Sequence[str]) -> NonTensorStack:
    """A column of one text a row.

    Example:
        >>> as_texts(["a", "b"]).tolist()
        ['a', 'b']
    """
    nothing = of_columns({}, [], None)
    return _stack_of_texts(*(_text_of(nothing, {"data": value, "_is_non_tensor": True}) for value in values))


def listed(column: Any) -> list[Any]:
    """What is no tensor, as a list of N.

    Example:
        >>> listed(as_texts(["a", "b"]))
        ['a', 'b']
    """
    if type(column) is NonTensorStack and column.stack_dim == 0 and column.batch_dims == 1:
        with suppress(AttributeError, KeyError):
            return [row._non_tensordict["data"] for row in column.tensordicts]
    return column.tolist() if hasattr(column, "tolist") else list(column)


def flat_rows(values: Tensor) -> Tensor:
    """(N, ...) → (N, K), also of no rows."""
    return values if values.ndim == 2 else values.unsqueeze(1).flatten(1)


def describe_columns(batch: TensorDictBase) -> list[Column]:
    """Key, dtype and shape in a row of each tensor column of a batch ``[N]``, N ≥ 1: in the first row."""
    row = batch.tensordicts[0] if isinstance(batch, LazyStackedTensorDict) else batch[0]
    leaves = [(key, row.get(key)) for key in row.keys(include_nested=True, leaves_only=True)]
    return [(key, leaf.dtype, tuple(leaf.shape)) for key, leaf in leaves if isinstance(leaf, Tensor)]


def without_rows(columns: Sequence[Column], device: torch.device | None) -> TensorDict:
    """A TensorDict ``[0]`` with such columns."""
    batch = TensorDict({}, batch_size=[0], device=device)
    for key, dtype, shape in columns:
        batch.set(key, torch.empty(0, *shape, dtype=dtype, device=device))
    return batch


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


class SomeRows:
    """Some rows of a batch, taken out of columns and put back.

    Args:
        chosen: (N,) bool, True at M rows; None: all rows, and nothing is copied. One device read, if given.

    Example:
        >>> rows = SomeRows(torch.tensor([True, False, True]))
        >>> rows.take(torch.tensor([1, 2, 3])).tolist(), rows.put_back(torch.tensor([7, 8])).tolist()
        ([1, 3], [7, 0, 8])
    """

    def __init__(self, chosen: Tensor | None):
        self.total = 0 if chosen is None else len(chosen)
        self.rows = None if chosen is None else chosen.nonzero().squeeze(-1)

    def take(self, column: Tensor) -> Tensor:
        """(N, ...) → (M, ...)."""
        return column if self.rows is None else column.index_select(0, self.rows)

    def put_back(self, values: Tensor) -> Tensor:
        """(M, ...) → (N, ...), zeros for the other rows."""
        if self.rows is None:
            return values
        return values.new_zeros(self.total, *values.shape[1:]).index_copy_(0, self.rows, values)

    def rules(self, rules: Sequence[Rule]) -> list[Rule]:
        """Rules of the M rows as rules of all N."""
        if self.rows is None:
            return list(rules)
        place = self.put_back(torch.arange(len(self.rows), device=self.rows.device))
        return [
            rule._replace(
                bad=self.put_back(rule.bad),
                describe=lambda row, rule=rule: rule.describe(int(place[row])),  # type: ignore[misc]
                message=rule.message.removesuffix(ROWS_LEFT_OUT) + ROWS_LEFT_OUT,
            )
            for rule in rules
        ]


def silence_rows(batch: TensorDictBase, key: NestedKey, silent: Tensor) -> None:
    """Take whole rows of a column out of the loss: False in a mask, NaN in log-probabilities.

    The batch gets a new tensor; the old one is left alone. No device read.

    Args:
        batch: TensorDict ``[N]``; its entry `key` is replaced.
        key: a dense (N, ...) or ragged column, bool or floating point.
        silent: (N,) bool, the rows.
    """
    if isinstance(batch, LazyStackedTensorDict):
        for td, is_silent in zip(batch.tensordicts, silent.tolist(), strict=True):
            if is_silent:
                row = td.get(key)
                td.set(key, torch.full_like(row, False if row.dtype is torch.bool else float("nan")))
        return
    column = batch.get(key)
    wide = silent.view(-1, *[1] * (column.ndim - 1))
    # The plain ways, `column & ~wide` and `masked_fill`, cost ten times and up to three times as much on CPU.
    if column.dtype is torch.bool:
        kept_bits = (~wide).view(torch.uint8).neg()  # 0 or 255: a True may be any byte but 0
        batch.set(key, (column.contiguous().view(torch.uint8) & kept_bits).view(torch.bool))
    else:
        batch.set(key, column + torch.zeros_like(wide, dtype=column.dtype).masked_fill_(wide, float("nan")))


def device_of(batch: TensorDictBase) -> torch.device:
    """Where a batch lies: its own word, else that of its first tensor."""
    if batch.device is not None:
        return batch.device
    if isinstance(batch, LazyStackedTensorDict) and batch.tensordicts:
        return device_of(batch.tensordicts[0])  # its own columns may be ragged
    for value in batch.values(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")


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
    if is_tensorclass(batch):  # whose own get() takes data out of what holds it
        batch = batch.to_tensordict()
    for key in batch.keys():
        value = batch.get(key)
        if isinstance(value, MetaData | NonTensorData | NonTensorStack):
            is_one = isinstance(value, MetaData)  # for all rows
            plain = {"meta": value.data} if is_one else {"data": _data_of(value, value.batch_dims)}
            columns[key] = plain | {"batch_size": list(value.batch_size)}
        else:
            columns[key] = to_plain(value) if is_tensor_collection(value) else value
    return {"columns": columns, "batch_size": list(batch.batch_size), "device": str(batch.device or "")}


def from_plain(plain: dict[str, Any] | None) -> TensorDictBase | None:
    """What :func:`to_plain` made dicts of."""
    if plain is None:
        return None
    if "rows" in plain:
        return lazy_stack([from_plain(row) for row in plain["rows"]])
    # Who saved it on a GPU may be read without one: its device is where its tensors are now.
    device = _device_in(plain) if plain["device"] else None
    batch = TensorDict({}, batch_size=plain["batch_size"], device=device)
    for key, value in plain["columns"].items():
        if isinstance(value, dict) and "data" in value:
            value = _stack_data(value["data"], len(value["batch_size"]))
        elif isinstance(value, dict) and "meta" in value:
            value = MetaData(value["meta"], batch_size=value["batch_size"])
        batch[key] = from_plain(value) if isinstance(value, dict) else value
    return batch


def _device_in(plain: dict[str, Any]) -> torch.device | str:
    """Of the first tensor; where there is none, as it was said."""
    columns = list(plain["columns"].values())
    for value in columns:
        if isinstance(value, Tensor):
            return value.device
    nested = (value for value in columns if isinstance(value, dict) and "columns" in value)
    return next(map(_device_in, nested), plain["device"])


def _data_of(value: Any, dims: int) -> Any:
    """What is not a tensor, in lists as deep as its batch dimensions."""
    return [_data_of(each, dims - 1) for each in value.unbind(0)] if dims else value.data


def _stack_data(data: Any, dims: int) -> Any:
    """A list alone would become a tensor where it has numbers in it."""
    return NonTensorStack(*(_stack_data(each, dims - 1) for each in data)) if dims else NonTensorData(data)

"""The rows themselves: what came together stays together, and rows are joined once, when they go out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
)
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import device_of, from_plain, of_columns, take_column, to_plain

Columns = dict[tuple[str, ...], Any]
"""What a batch consists of, without the TensorDicts around it, in which most of the time would go."""


class Piece:
    """Rows that came together, or those of them that are still there.

    Args:
        batch: TensorDict ``[n]``, dense or a lazy stack. Its memory is the caller's until :meth:`own`.
        arrivals: n numbers by which the rows are found, ascending.
    """

    def __init__(self, batch: TensorDictBase, arrivals: Iterable[int]):
        self.columns, self.device = columns_of(batch), batch.device
        self.place = {arrival: row for row, arrival in enumerate(arrivals)}
        """Where in the columns each row is, by its arrival."""
        self.size = len(self.place)
        """Rows in the columns: those that were let go of, too."""

    def keep(self, arrivals: Collection[int]) -> None:
        """Hold only some of the rows."""
        if len(arrivals) < len(self.place):
            self.place = {arrival: self.place[arrival] for arrival in arrivals}

    def own(self) -> None:
        """Copy the rows into memory of their own: collectors write into theirs again."""
        self.columns, self.size = self._copy(), len(self.place)
        self.place = {arrival: row for row, arrival in enumerate(self.place)}

    def _copy(self) -> Columns:
        taken = self._take(self.place)
        copied = taken is not self.columns  # of tensors
        return {
            path: value if copied and isinstance(value, Tensor) else _clone(value)
            for path, value in taken.items()
        }

    def _take(self, arrivals: Iterable[int]) -> Columns:
        """Some rows; the columns themselves where that is all of them."""
        rows = [self.place[arrival] for arrival in arrivals]
        return self.columns if rows == list(range(self.size)) else _index(self.columns, rows)

    def to_plain(self) -> dict[str, Any]:
        """The rows as dicts, tensors and lists, in memory of their own."""
        rows = _batch_of(self._copy(), len(self.place), self.device)
        return {"arrival": torch.tensor(list(self.place)), "rows": to_plain(rows)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Piece:
        """What :meth:`to_plain` made dicts of."""
        rows: Any = from_plain(plain["rows"])
        return cls(rows, plain["arrival"].tolist())


Places = Iterable[tuple[Piece, int]]
"""Rows, each by its piece and its arrival."""


def gather(rows: Places) -> TensorDictBase:
    """A batch of rows, at least one, in this order; they may be all over the pieces."""
    numbers: dict[Piece, list[int]] = {}
    arrivals = []
    for piece, arrival in rows:
        numbers.setdefault(piece, []).append(len(arrivals))
        arrivals.append(arrival)
    parts = [piece._take(arrivals[number] for number in some) for piece, some in numbers.items()]
    columns = {path: _join([part[path] for part in parts]) for path in parts[0]}
    order = list(chain.from_iterable(numbers.values()))
    if order != list(range(len(order))):  # pieces take turns
        columns = _index(columns, sorted(range(len(order)), key=order.__getitem__))
    return _batch_of(columns, len(order), next(iter(numbers)).device)


def let_go(rows: Places) -> None:
    """Hold rows no longer.

    What is left of a piece is copied when it is less than half, so that the memory is at most twice that of what
    waits, and a row is copied a few times.
    """
    pieces = set()
    for piece, arrival in rows:
        del piece.place[arrival]
        pieces.add(piece)
    for piece in pieces:
        if 0 < 2 * len(piece.place) < piece.size:
            piece.own()


def columns_of(batch: TensorDictBase) -> Columns:
    """The columns of a batch by the names on the way to them; of a lazy stack, a list of those of its rows.

    Example:
        >>> td = TensorDict({"next": {"reward": torch.zeros(2)}, "x": torch.ones(2)}, batch_size=[2])
        >>> list(columns_of(td))
        [('next', 'reward'), ('x',)]
    """
    if isinstance(batch, LazyStackedTensorDict):
        return {(): [columns_of(row) for row in batch.tensordicts]}
    found: Columns = {}
    for key, value in batch.items():
        if type(value) is TensorDict and value.batch_size == batch.batch_size:
            found |= {(key, *path): column for path, column in columns_of(value).items()}
        else:
            found[key,] = value
    return found


def column_of(columns: Columns, key: NestedKey, rows: int) -> Tensor | None:
    """A column of one number a row, (N,); None where there is none, or not so simple a one."""
    path = key if isinstance(key, tuple) else (key,)
    if () in columns:
        found = [row.get(path) for row in columns[()]]
        simple = all(isinstance(value, Tensor) and value.numel() == 1 for value in found)
        return torch.stack([value.reshape(()) for value in found]) if simple else None
    value = columns.get(path)
    return value.reshape(-1) if isinstance(value, Tensor) and value.numel() == rows else None


def kinds_of(columns: Columns) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """What columns must have in common to be joined: dtypes and widths; of ragged rows, dtypes."""
    if () in columns:
        return {(): (), **{path: kind[:1] for path, kind in kinds_of(columns[()][0]).items()}}
    kinds: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for path, value in columns.items():
        if isinstance(value, Tensor):
            kinds[path] = value.dtype, tuple(value.shape[1:])
        elif isinstance(value, NonTensorData | NonTensorStack) or not is_tensor_collection(value):
            kinds[path] = ("data",)
        else:  # of another batch size, or a class of its own
            kinds[path] = (type(value), tuple(value.batch_size[1:]))
            kinds |= {(*path, *inner): kind for inner, kind in kinds_of(columns_of(value)).items() if inner}
    return kinds


def check_kinds(held: dict[tuple[str, ...], Any], came: dict[tuple[str, ...], Any]) -> None:
    """Refuse rows that could not be joined with those that wait, both by :func:`kinds_of`.

    Raises:
        BatchError: columns, dtypes or the widths of dense columns differ.
    """
    if held == came:
        return
    what = "a batch and the rows that wait for it"
    if (() in held) != (() in came):
        raise BatchError(f"{what} must be lazy stacks all or dense all; found both")
    if odd := {path[0] if len(path) == 1 else path for path in held.keys() ^ came.keys()}:
        raise BatchError(
            f"{what} must have columns of one kind and batch size; only some have "
            f"{', '.join(sorted(map(str, odd)))}"
        )
    path = next(path for path, kind in held.items() if came[path] != kind)
    raise BatchError(
        f"{what} must have columns of one dtype and width; {path[0] if len(path) == 1 else path!r} is "
        f"{held[path]}, and came as {came[path]}: pad to one width, or keep ragged rows in a lazy stack"
    )


def _batch_of(columns: Columns, rows: int, device: torch.device | None) -> TensorDictBase:
    """A batch of columns (:func:`columns_of`); who writes into it writes into none of them."""
    if () in columns:
        return lazy_stack([_nested(row, [], device) for row in columns[()]])
    return _nested(columns, [rows], device)


def _nested(columns: Columns, size: Sequence[int], device: torch.device | None) -> TensorDict:
    found: dict[str, Any] = {}
    for (name, *below), value in columns.items():
        if below:
            found.setdefault(name, {})[tuple(below)] = value
        else:
            found[name] = value
    inner = {name: _nested(value, size, device) for name, value in found.items() if type(value) is dict}
    return of_columns(found | inner, size, device)


def _index(columns: Columns, rows: list[int]) -> Columns:
    """Some rows of columns, in this order; of tensors, copies."""
    taken: Columns = {}
    seen = torch.tensor(rows)  # by the host, which indexes what is no tensor
    index = {seen.device: seen}
    for path, value in columns.items():
        if isinstance(value, list):
            taken[path] = [value[row] for row in rows]
            continue
        device = value.device if isinstance(value, Tensor) else seen.device
        if isinstance(value, TensorDictBase):
            device = device_of(value)
        if device not in index:
            index[device] = seen.to(device)
        taken[path] = take_column(value, index[device], on_cpu=seen)
    return taken


def _clone(value: Any) -> Any:
    if isinstance(value, list):
        return [{path: column.clone() for path, column in row.items()} for row in value]
    return value.clone()


def _join(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return list(chain.from_iterable(parts)) if isinstance(parts[0], list) else torch.cat(list(parts), 0)

"""The rows themselves: what came together stays together, and rows are joined once, when they go out.

They are held as columns, without the TensorDicts around them, in which most of the time would go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
)
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.schema import read_column
from headrace.transforms.tensordicts import device_of, from_plain, of_columns, take_column, to_plain

READER = "GroupAssembler"
Columns = dict[tuple[str, ...], Any]
"""By the names on the way to each; under (), of a lazy stack, a list of those of its rows."""


class RowPiece:
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

    def entries(self, key: NestedKey, batch: TensorDictBase, name: str) -> list[Tensor]:
        """A column of one number a row, whole or, of a lazy stack, by row.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it holds more than one number a row.
        """
        path = key if isinstance(key, tuple) else (key,)
        rows = self.columns.get(())
        found = [self.columns.get(path)] if rows is None else [row.get(path) for row in rows]
        each = self.size if rows is None else 1
        if all(isinstance(entry, Tensor) and entry.numel() == each for entry in found):
            return found
        return [read_column(batch, key, reader=READER, option=f"{name}_key")]  # or it is somewhere else

    def own(self) -> None:
        """Copy the rows into memory of their own: collectors write into theirs again."""
        self.columns, self.size = self._copy(), len(self.place)
        self.place = {arrival: row for row, arrival in enumerate(self.place)}

    def take(self, arrivals: Iterable[int]) -> Columns:
        """Some rows; the columns themselves where these are all there are."""
        rows = [self.place[arrival] for arrival in arrivals]
        return self.columns if rows == list(range(self.size)) else _index(self.columns, rows)

    def to_plain(self) -> dict[str, Any]:
        """The rows as dicts, tensors and lists, in memory of their own."""
        rows = _batch_of(self._copy(), len(self.place), self.device)
        return {"arrival": torch.tensor(list(self.place)), "rows": to_plain(rows)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RowPiece:
        """What :meth:`to_plain` made dicts of."""
        rows: Any = from_plain(plain["rows"])
        return cls(rows, plain["arrival"].tolist())

    def _copy(self) -> Columns:
        taken = self.take(self.place)
        some = taken is not self.columns  # of tensors that is a copy
        return {path: v if some and isinstance(v, Tensor) else _clone(v) for path, v in taken.items()}


Places = Iterable[tuple[RowPiece, int]]
"""Rows, each by its piece and its arrival."""


def gather(rows: Places, numbers: Mapping[NestedKey, Sequence[int]]) -> TensorDictBase:
    """A batch of rows in this order, at least one, wherever they are.

    Args:
        rows: M of them.
        numbers: further columns, M each.
    """
    places: dict[RowPiece, list[int]] = {}
    arrivals: list[int] = []
    for piece, arrival in rows:
        places.setdefault(piece, []).append(len(arrivals))
        arrivals.append(arrival)
    parts = [piece.take(arrivals[place] for place in some) for piece, some in places.items()]
    columns = {path: _join([part[path] for part in parts]) for path in parts[0]}
    order = list(chain.from_iterable(places.values()))
    if order != list(range(len(order))):  # pieces take turns
        columns = _index(columns, sorted(range(len(order)), key=order.__getitem__))
    tensors = (columns[()][0] if () in columns else columns).values()
    device = next((value.device for value in tensors if isinstance(value, Tensor)), None)
    for key, values in numbers.items():
        path, column = key if isinstance(key, tuple) else (key,), torch.tensor(values, device=device)
        if () in columns:
            columns[()] = [{**row, path: number} for row, number in zip(columns[()], column, strict=True)]
        else:
            columns[path] = column
    return _batch_of(columns, len(order), next(iter(places)).device)


def let_go(rows: Places) -> None:
    """Hold rows no longer.

    What is left of a piece is copied when it is less than half, so that the memory is at most twice that of
    what waits, and a row is copied a few times.
    """
    pieces = set()
    for piece, arrival in rows:
        del piece.place[arrival]
        pieces.add(piece)
    for piece in pieces:
        if 0 < 2 * len(piece.place) < piece.size:
            piece.own()


def columns_of(batch: TensorDictBase, above: tuple[str, ...] = ()) -> Columns:
    """The columns of a batch.

    Example:
        >>> td = TensorDict({"next": {"reward": torch.zeros(2)}, "x": torch.ones(2)}, batch_size=[2])
        >>> list(columns_of(td))
        [('next', 'reward'), ('x',)]
    """
    if isinstance(batch, LazyStackedTensorDict):
        return {(): [columns_of(row) for row in batch.tensordicts]}
    found: Columns = {}
    size = batch.batch_size
    for key, value in batch.items():
        if type(value) is TensorDict and value.batch_size == size:
            found |= columns_of(value, (*above, key))
        else:
            path = (*above, key)
            found[path] = value
    return found


def kinds_of(columns: Columns) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """What columns must have in common to be joined: dtypes, widths and devices; of ragged rows, dtypes."""
    if () in columns:
        first, *others = columns[()] or [{}]
        odd = not all(row.keys() == first.keys() for row in others)  # and like no other
        return {(): (object(),) * odd, **{path: kind[:1] for path, kind in kinds_of(first).items()}}
    kinds: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for path, value in columns.items():
        if isinstance(value, Tensor):
            kinds[path] = value.dtype, () if value.is_nested else value.shape[1:], value.device
        elif is_non_tensor(value) or not is_tensor_collection(value):
            kinds[path] = ("data",)
        else:  # of another batch size, or a class of its own
            kinds[path] = type(value), value.batch_size[1:]
            kinds |= {(*path, *inner): kind for inner, kind in kinds_of(columns_of(value)).items() if inner}
    return kinds


def check_kinds(held: Mapping[tuple[str, ...], Any], came: Mapping[tuple[str, ...], Any]) -> None:
    """Refuse rows that could not be joined with those that wait, both by :func:`kinds_of`.

    Raises:
        BatchError: columns, dtypes or the widths of dense columns differ.
    """
    what = "a batch and the rows that wait for it must"
    if (() in held) != (() in came):
        raise BatchError(f"{what} be lazy stacks all or dense all; found both")
    names = {path: path[0] if len(path) == 1 else path for path in held.keys() | came.keys() if path}
    if odd := [str(names[path]) for path in held.keys() ^ came.keys()]:
        only = listing(sorted(odd))
        raise BatchError(f"{what} have columns of one kind and batch size; only some have {only}")
    for path, name in names.items():
        if held[path] != came[path]:
            raise BatchError(
                f"{what} have columns of one dtype and width; {name!r} is {held[path]}, and came as "
                f"{came[path]}: pad to one width, or keep ragged rows in a lazy stack"
            )


def _batch_of(columns: Columns, rows: int, device: torch.device | None) -> TensorDictBase:
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
        is_batch = isinstance(value, TensorDictBase)
        device = value.device if isinstance(value, Tensor) else device_of(value) if is_batch else seen.device
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

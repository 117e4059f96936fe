"""The rows themselves: what came together stays together, and rows are joined once, when they go out."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
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
)
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.schema import read_column
from headrace.transforms.tensordicts import (
    device_of,
    from_plain,
    of_columns,
    parts_of,
    shallow_copy,
    stack_of_rows,
    take_rows,
    to_plain,
    write_column,
)

READER = "GroupAssembler"
Kinds = dict[tuple[str, ...], tuple[Any, ...]]
"""By the names on the way to each column; under () what is said of a lazy stack."""


class RowPiece:
    """Rows that came together, or those of them that are still there.

    Args:
        batch: TensorDict ``[n]``, dense or a lazy stack. Its memory is the caller's until :meth:`own`.
        arrivals: n numbers by which the rows are found, ascending.
        holds: what must live as long as each row does, n things or none.
    """

    def __init__(self, batch: TensorDictBase, arrivals: Iterable[int], holds: Sequence[Any] = ()):
        self.batch, self.holds = batch, holds
        """The rows, those that were let go of, too."""
        self.place = {arrival: row for row, arrival in enumerate(arrivals)}
        """Where in the batch each row is, by its arrival."""

    def numbers(self, key: NestedKey, name: str, width: int = 1) -> list[Tensor]:
        """A column of so many numbers a row, whole or, of a lazy stack, by row.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it holds more than one number a row.
        """
        entries = parts_of(self.batch, key)
        size = width * (1 if isinstance(self.batch, LazyStackedTensorDict) else len(self.batch))
        if entries and all(isinstance(entry, Tensor) and entry.numel() == size for entry in entries):
            return entries
        return [read_column(self.batch, key, reader=READER, option=f"{name}_key")]  # which refuses it

    def own(self) -> None:
        """Copy the rows into memory of their own: collectors write into theirs again."""
        self.batch = self.rows().clone()
        self.holds = [self.holds[row] for row in self.place.values()] if self.holds else ()
        self.place = {arrival: row for row, arrival in enumerate(self.place)}

    def take(self, arrivals: Iterable[int]) -> TensorDictBase:
        """Some rows, in a TensorDict to which columns may be written."""
        rows = self._rows(arrivals)
        return shallow_copy(rows) if rows is self.batch or isinstance(rows, LazyStackedTensorDict) else rows

    def rows(self) -> TensorDictBase:
        """All rows, those that were let go of left out; they may be the batch itself."""
        return self.batch if len(self.place) == len(self.batch) else self._rows(self.place)

    def _rows(self, arrivals: Iterable[int]) -> TensorDictBase:
        rows = [self.place[arrival] for arrival in arrivals]
        return self.batch if rows == list(range(len(self.batch))) else _chosen(self.batch, rows)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RowPiece:
        """What :func:`joined_plain` made a dict of."""
        rows: Any = from_plain(plain["rows"])
        return cls(rows, plain["arrival"].tolist())


def joined_plain(pieces: Collection[RowPiece]) -> list[dict[str, Any]]:
    """The rows of pieces as one dict of tensors and lists, in memory of its own; none of no pieces.

    They are joined, since it takes longer to save and load thousands of tensors than what is in them.
    """
    if not pieces:
        return []
    parts = [piece.rows() for piece in pieces]
    rows = _joined(parts)
    if len(parts) == 1 or isinstance(rows, LazyStackedTensorDict):
        rows = rows.clone()
    arrivals = chain.from_iterable(piece.place for piece in pieces)
    return [{"arrival": numbers_column(arrivals), "rows": to_plain(rows)}]


def numbers_column(values: Iterable[int]) -> Tensor:
    """(n,) integers of as few bits as hold them."""
    numbers = array("q", values)
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    return narrowed(torch.frombuffer(numbers, dtype=torch.int64))


def narrowed(column: Tensor) -> Tensor:
    """The same integers, at least one, of as few bits as hold them."""
    low, high = column.aminmax()
    for dtype in (torch.int8, torch.int16, torch.int32):
        if low >= torch.iinfo(dtype).min and high <= torch.iinfo(dtype).max:
            return column.to(dtype)
    return column


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
    parts: list[Any] = [piece.take(arrivals[place] for place in some) for piece, some in places.items()]
    batch = _joined(parts)
    order = list(chain.from_iterable(places.values()))
    if order != list(range(len(order))):  # pieces take turns
        batch = _chosen(batch, sorted(range(len(order)), key=order.__getitem__))
    for key, values in numbers.items():
        write_column(batch, key, torch.tensor(values, device=device_of(batch)))
    return batch


def let_go(rows: Places) -> list[RowPiece]:
    """Hold rows no longer, and return the pieces of which none is left.

    What is left of a piece is copied when it is less than half, so that the memory is at most twice that of
    what waits, and a row is copied a few times.
    """
    pieces = set()
    for piece, arrival in rows:
        del piece.place[arrival]
        pieces.add(piece)
    for piece in pieces:
        if 0 < 2 * len(piece.place) < len(piece.batch):
            piece.own()
    return [piece for piece in pieces if not piece.place]


def kinds_of(batch: TensorDictBase, above: tuple[str, ...] = ()) -> Kinds:
    """What rows must have in common to be joined: dtypes, widths and devices; of ragged rows, dtypes."""
    if isinstance(batch, LazyStackedTensorDict):
        rows = batch.tensordicts
        kinds: Kinds = {above: () if _have_same_names(rows) else (object(),)}  # and like no other
        return kinds | {path: kind[:1] for path, kind in kinds_of(rows[0], above).items()} if rows else kinds
    kinds = {}
    for name, value in batch.items():
        path = (*above, name)
        if isinstance(value, Tensor):
            kinds[path] = value.dtype, () if value.is_nested else value.shape[1:], value.device
        elif is_non_tensor(value) or not is_tensor_collection(value):
            kinds[path] = ("data",)
        else:
            if type(value) is not TensorDict or value.batch_size != batch.batch_size:
                kinds[path] = type(value), value.batch_size[1:]
            kinds |= kinds_of(value, path)
    return kinds


def _have_same_names(rows: Sequence[Any]) -> bool:
    """Whether all rows have the columns of the first."""
    names = rows[0].keys() if rows else ()
    return all(row.keys() == names for row in rows) and all(
        _have_same_names([row.get(name) for row in rows])
        for name in names
        if type(rows[0].get(name)) is TensorDict
    )


def check_kinds(held: Kinds, came: Kinds) -> None:
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


def _joined(parts: Sequence[Any]) -> Any:
    """Rows of one kind, one after the other; of one part, those themselves.

    Of dense rows TensorDict would look at each column of each part again.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if type(first) is Tensor:
        return torch.cat(parts)
    if isinstance(first, LazyStackedTensorDict):
        return stack_of_rows(*chain.from_iterable(part.tensordicts for part in parts))
    if not all(type(value) is Tensor or type(value) is TensorDict for value in first.values()):
        return torch.cat(list(parts), 0)
    every = [dict(part.items()) for part in parts]
    columns = {name: _joined([columns[name] for columns in every]) for name in every[0]}
    return of_columns(columns, [sum(map(len, parts)), *first.batch_size[1:]], first.device)


def _chosen(batch: TensorDictBase, rows: Sequence[int]) -> TensorDictBase:
    at = torch.tensor(rows)
    return take_rows(batch, at.to(device_of(batch)), on_cpu=at, shared=True)

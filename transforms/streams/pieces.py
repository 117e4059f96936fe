"""Hold the rows in the pieces in which they arrived. They are joined once, when a batch is taken."""

from __future__ import annotations

import math
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

from headrace.transforms.carry import from_plain, to_plain
from headrace.transforms.table import BatchError, listing
from headrace.transforms.table.schema import Origin, read_column
from headrace.transforms.table.tensordicts import (
    deep_copy,
    device_of,
    of_columns,
    parts_of,
    shallow_copy,
    stack_of_rows,
    stack_of_texts,
    take_rows,
    write_column,
)
from headrace.transforms.table.tokens import has_versions_of_tokens, version_range, versions_of_tokens

READER = "GroupAssembler"
UNSAMPLED = torch.iinfo(torch.int64).min  # version of a row without a sampled token
WIDTHS = {"origin": len(Origin._fields)}  # numbers per row of a column, if not one
PUT = 2**32
"""Larger than any number of rows of a put."""
Kinds = dict[tuple[str, ...], tuple[Any, ...]]
"""The kind of each column, by its path. The path () marks a lazy stack."""


class RowPiece:
    """Rows that arrived together, without those that have left.

    Args:
        batch: TensorDict ``[n]``, dense or a lazy stack. It shares the caller's memory until :meth:`own`.
        arrivals: n numbers that identify the rows, ascending.
        holds: n objects to keep alive as long as each row is held, or none.
    """

    def __init__(self, batch: TensorDictBase, arrivals: Iterable[int], holds: Sequence[Any] = ()):
        self.batch, self.holds = batch, holds
        """The rows, including some that have left."""
        self.place = {arrival: row for row, arrival in enumerate(arrivals)}
        """The index in the batch of each held row, by its arrival."""
        self.columns: dict[str, Sequence[Any]] = {}
        """The ids and flags of the rows, by the names of :class:`Row`, once they were read."""
        self.defaults: dict[str, Any] = {}
        """The values for missing columns."""
        self.lengths: Sequence[int] = [-1] * len(batch)
        """Tokens in the loss mask of each row; −1: the row has no mask, or was read before a restart."""
        self.rewards: Sequence[float] = [math.nan] * len(batch)
        """The reward of each row; NaN: the row has no reward."""

    def versions(self, key: NestedKey, loss_mask_key: NestedKey) -> Tensor | None:
        """(n, 2): the oldest and newest version of each row's sampled tokens. None: rows have one version.

        A row without a sampled token has `UNSAMPLED`.

        Raises:
            MissingKeyError: nothing says which tokens were sampled.
            BatchError: there is not one version for each token.
        """
        if not has_versions_of_tokens(self.batch, key):
            return None
        return version_range(*versions_of_tokens(self.batch, key, loss_mask_key, reader=READER), UNSAMPLED)

    def numbers(self, key: NestedKey, name: str) -> Tensor:
        """(n · K,) the numbers of a column, on the batch's device. K = 1 per row except for `WIDTHS`.

        Raises:
            MissingKeyError: the column is missing.
            BatchError: the column has another number of values per row.
        """
        parts = parts_of(self.batch, key)
        size = WIDTHS.get(name, 1) * (1 if isinstance(self.batch, LazyStackedTensorDict) else len(self.batch))
        if parts and all(isinstance(part, Tensor) and part.numel() == size for part in parts):
            return (
                parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
            )
        return read_column(self.batch, key, reader=READER, option=f"{name}_key")  # raises

    def own(self) -> None:
        """Copy the rows, because collectors reuse their memory."""
        rows, kept = self.rows(), self.place.values()
        if rows is not self.batch:
            self.columns = {name: [column[row] for row in kept] for name, column in self.columns.items()}
            self.lengths = [self.lengths[row] for row in kept]
            self.rewards = [self.rewards[row] for row in kept]
        if rows is self.batch or isinstance(rows, LazyStackedTensorDict):  # others were copied by indexing
            rows = deep_copy(rows)
        self.batch = rows
        self.holds = [self.holds[row] for row in kept] if self.holds else ()
        self.place = {arrival: row for row, arrival in enumerate(self.place)}

    @property
    def by_segment(self) -> bool:
        """Whether rows have segment numbers."""
        return "segment" in self.columns

    def read(self, arrival: int) -> dict[str, Any]:
        """The ids and flags of a row."""
        at = self.place[arrival]
        return self.defaults | {name: column[at] for name, column in self.columns.items()}

    def version(self, arrival: int) -> int:
        """The policy version of a row."""
        column = self.columns.get("version")
        return self.defaults["version"] if column is None else column[self.place[arrival]]

    def newest(self, arrival: int) -> int:
        """The policy version of a row's newest token."""
        column = self.columns.get("newest")
        return self.defaults["newest"] if column is None else column[self.place[arrival]]

    def take(self, arrivals: Iterable[int]) -> TensorDictBase:
        """Some rows, which may be the batch itself."""
        rows = [self.place[arrival] for arrival in arrivals]
        return self.batch if rows == list(range(len(self.batch))) else _chosen(self.batch, _int64(rows))

    def rows(self) -> TensorDictBase:
        """All held rows, which may be the batch itself."""
        return self.batch if len(self.place) == len(self.batch) else self.take(self.place)

    @classmethod
    def from_plain(cls, plain: dict[str, Any] | None) -> RowPiece:
        """Restore the output of :func:`joined_plain`."""
        if plain is None:
            return cls(TensorDict({}, batch_size=[0]), ())
        rows: Any = from_plain(plain["rows"])
        return cls(rows, plain["arrival"].tolist())


def joined_plain(pieces: Collection[RowPiece]) -> dict[str, Any] | None:
    """Copy the rows of pieces into one dict of tensors and lists. Returns None without pieces.

    The rows are joined because thousands of small tensors take long to save and load.
    """
    if not pieces:
        return None
    parts = [piece.rows() for piece in pieces]
    rows = _joined(parts)
    if len(parts) == 1:
        rows = rows.clone()
    arrivals = chain.from_iterable(piece.place for piece in pieces)
    return {"arrival": numbers_column(arrivals), "rows": to_plain(rows)}


def numbers_column(values: Iterable[int]) -> Tensor:
    """(n,) integers in the smallest dtype that holds them."""
    numbers = _int64(values)
    return narrowed(numbers) if len(numbers) else numbers


def narrowed(column: Tensor) -> Tensor:
    """Convert one or more integers to the smallest dtype that holds them."""
    low, high = column.aminmax()
    for dtype in (torch.int8, torch.int16, torch.int32):
        if low >= torch.iinfo(dtype).min and high <= torch.iinfo(dtype).max:
            return column.to(dtype)
    return column


Place = tuple[RowPiece, int]
"""The piece and the arrival of a row."""


def gather(rows: Iterable[Place], numbers: Mapping[NestedKey, Sequence[int]]) -> TensorDictBase:
    """Join rows of several pieces into one batch, in the given order.

    Args:
        rows: M ≥ 1 rows.
        numbers: further columns of M numbers.
    """
    indices: dict[RowPiece, list[int]] = {}
    arrivals: list[int] = []
    for piece, arrival in rows:
        indices.setdefault(piece, []).append(len(arrivals))
        arrivals.append(arrival)
    parts: list[Any] = [piece.take(arrivals[at] for at in of_piece) for piece, of_piece in indices.items()]
    batch = _joined(parts)
    order = list(chain.from_iterable(indices.values()))
    if order != list(range(len(order))):  # rows of different pieces alternate
        places = _int64(order)
        batch = _chosen(batch, torch.empty_like(places).scatter_(0, places, torch.arange(len(order))))
    if len(parts) == 1 or isinstance(batch, LazyStackedTensorDict):  # these may be the held rows themselves
        batch = shallow_copy(batch)
    for key, values in numbers.items():
        write_column(batch, key, _int64(values).to(device_of(batch)))
    return batch


def let_go(rows: Iterable[Place]) -> list[RowPiece]:
    """Drop rows, and return the pieces without rows.

    When less than half of a piece is left, the rest is copied. So the memory is at most twice that of the
    held rows, and a row is copied only a few times.
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
    """The dtype, width and device of each column; for ragged rows the dtype. Rows of equal kinds can join."""
    if isinstance(batch, LazyStackedTensorDict):
        rows = batch.tensordicts
        kinds: Kinds = {above: () if _have_same_names(rows) else (object(),)}  # equal to no other kind
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
    """Refuse rows that cannot be joined with the held rows; both arguments are from :func:`kinds_of`.

    Raises:
        BatchError: columns, dtypes or the widths of dense columns differ.
    """
    both = "the new rows and the held rows must"
    if (() in held) != (() in came):
        raise BatchError(f"{both} all be lazy stacks or all be dense; found both")
    names = {path: path[0] if len(path) == 1 else path for path in held.keys() | came.keys() if path}
    if odd := [str(names[path]) for path in held.keys() ^ came.keys()]:
        only = listing(sorted(odd))
        raise BatchError(f"{both} have the same columns, types and batch sizes; only some have {only}")
    for path, name in names.items():
        if held[path] != came[path]:
            raise BatchError(
                f"{both} have the same dtypes and widths; {name!r} is {held[path]} in held rows and "
                f"{came[path]} in new rows: pad all rows to one width, or keep ragged rows in a lazy stack"
            )


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate rows of the same kinds; a single part is returned as it is.

    Dense rows are joined by column here, because TensorDict would check each column of each part again.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if type(first) is Tensor:
        return torch.cat(parts)
    if is_non_tensor(first):  # one text for each row or for all: TensorDict 0.10 cannot join different kinds
        return stack_of_texts(*chain.from_iterable(part.unbind(0) for part in parts))
    if isinstance(first, LazyStackedTensorDict):
        return stack_of_rows(*chain.from_iterable(part.tensordicts for part in parts))
    if not all(type(value) in (Tensor, TensorDict) or is_non_tensor(value) for value in first.values()):
        return torch.cat(list(parts), 0)
    every = [dict(part.items()) for part in parts]
    columns = {name: _joined([columns[name] for columns in every]) for name in every[0]}
    return of_columns(columns, [sum(map(len, parts)), *first.batch_size[1:]], first.device)


def _int64(values: Iterable[int]) -> Tensor:
    """(n,) int64, in an eighth of the time of ``torch.tensor``."""
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def _chosen(batch: TensorDictBase, at: Tensor) -> TensorDictBase:
    return take_rows(batch, at.to(device_of(batch)), on_cpu=at, shared=True)

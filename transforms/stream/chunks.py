"""The rows themselves, in the pieces in which they came, found by the number of their arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import describe_columns, device_of, from_plain, join_rows, take_rows, to_plain

Columns = dict[tuple[str, ...], Any]
"""What a batch consists of, without the TensorDicts around it, in which most of the time would go."""


class Chunk(NamedTuple):
    """Rows that came together, or what is left of them."""

    arrival: Tensor
    """(n,) int64, ascending."""
    columns: Columns
    device: torch.device | None
    """Of the TensorDict that came."""

    def take(self, rows: Tensor) -> Chunk:
        """Some of the rows, by their numbers here."""
        columns = {path: _take(value, rows) for path, value in self.columns.items()}
        return Chunk(self.arrival.index_select(0, rows), columns, self.device)

    def find(self, arrival: Tensor) -> Chunk:
        """Those of the rows with these arrivals."""
        return self.take(torch.searchsorted(self.arrival, arrival))

    def as_batch(self) -> TensorDictBase:
        """The rows as they came."""
        return _batch_of(self.columns, len(self.arrival), self.device)


class Chunks:
    """Rows by the number of their arrival; nothing of them is ever written to."""

    def __init__(self, chunks: Sequence[Chunk] = ()):
        self.chunks = list(chunks)

    def check(self, batch: TensorDictBase) -> None:
        """Refuse a batch whose rows could not be joined with those that wait.

        Raises:
            BatchError: columns, dtypes or the widths of dense columns differ.
        """
        if not self.chunks or len(batch) == 0 or _are_alike(self.chunks[0].columns, columns_of(batch)):
            return
        held = self.chunks[0].take(torch.zeros(1, dtype=torch.int64)).as_batch()
        what = "a batch and the rows that wait for it"
        lazy = isinstance(held, LazyStackedTensorDict)
        if lazy != isinstance(batch, LazyStackedTensorDict):
            raise BatchError(f"{what} must be lazy stacks all or dense all; found both")
        types = {key: (dtype, () if lazy else shape) for key, dtype, shape in describe_columns(held)}
        for key, dtype, shape in describe_columns(batch):
            found = (dtype, () if lazy else shape)
            if types.get(key, found) != found:
                raise BatchError(
                    f"{what} must have columns of one dtype and width; {key!r} is {types[key]}, and came as "
                    f"{found}: pad to one width, or keep ragged rows in a lazy stack"
                )
        join_rows([held, batch[:1]], what)
        if odd := self.chunks[0].columns.keys() ^ columns_of(batch).keys():
            raise BatchError(
                f"{what} must have columns of one kind and batch size; only some have "
                f"{', '.join(sorted(map(str, odd)))}"
            )

    def add(self, arrival: Tensor, batch: TensorDictBase, rows: Tensor) -> None:
        """Keep copies of some rows of a batch: collectors write into theirs again."""
        if len(rows):
            taken = {path: _take(value, rows) for path, value in columns_of(batch).items()}
            own = {path: _copy(value) for path, value in taken.items()}
            self.chunks.append(Chunk(arrival, own, batch.device))

    def gather(self, arrival: Tensor) -> TensorDictBase:
        """Copies of the rows with these arrivals (M,), M ≥ 1, in this order."""
        ordered, order = arrival.sort()
        parts = [chunk.find(part) for chunk, part in self._parts(ordered) if len(part)]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        sorted_already = torch.equal(ordered, arrival)
        columns = {}
        for path in parts[0].columns:
            joined = _join([part.columns[path] for part in parts])
            columns[path] = joined if sorted_already else _take(joined, place)
        return _batch_of(columns, len(arrival), parts[0].device)

    def keep(self, arrival: Tensor) -> None:
        """Let go of all rows but those with these arrivals, ascending.

        A chunk is copied when less than half of its rows are left, so that what is held is at most twice what
        waits, and a row is copied a few times.
        """
        self.chunks = [
            chunk if 2 * len(part) >= len(chunk.arrival) else chunk.find(part)
            for chunk, part in self._parts(arrival)
            if len(part)
        ]

    def _parts(self, arrival: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk, and which of these arrivals (M,), ascending, are of its rows."""
        firsts = torch.tensor([int(chunk.arrival[0]) for chunk in self.chunks], dtype=torch.int64)
        starts = torch.searchsorted(arrival, firsts).tolist()
        return zip(self.chunks, arrival.tensor_split(starts[1:]), strict=False)  # no chunk: one part

    def to_plain(self) -> list[dict[str, Any]]:
        """As dicts, tensors and lists, which share no memory with rows that are handed out."""
        own = [
            chunk._replace(columns={path: _copy(value) for path, value in chunk.columns.items()})
            for chunk in self.chunks
        ]
        return [{"arrival": chunk.arrival, "rows": to_plain(chunk.as_batch())} for chunk in own]

    @classmethod
    def from_plain(cls, plain: Sequence[dict[str, Any]]) -> Chunks:
        """What :meth:`to_plain` made dicts of."""
        chunks = []
        for chunk in plain:
            rows: Any = from_plain(chunk["rows"])
            chunks.append(Chunk(chunk["arrival"], columns_of(rows), rows.device))
        return cls(chunks)


def columns_of(batch: TensorDictBase) -> Columns:
    """The columns of a batch ``[N]`` by the names on the way to them; of a lazy stack, a list of its rows.

    Example:
        >>> td = TensorDict({"next": {"reward": torch.zeros(2)}, "x": torch.ones(2)}, batch_size=[2])
        >>> list(columns_of(td))
        [('next', 'reward'), ('x',)]
    """
    if isinstance(batch, LazyStackedTensorDict):
        return {(): batch.tensordicts}
    found: Columns = {}
    for key in batch.keys():
        value = batch.get(key)
        if type(value) is TensorDict and value.batch_size == batch.batch_size:
            found |= {(key, *path): column for path, column in columns_of(value).items()}
        else:
            found[key,] = value
    return found


def _batch_of(columns: Columns, rows: int, device: torch.device | None) -> TensorDictBase:
    """A batch of columns (:func:`columns_of`); who writes into it writes into none of them."""
    if () in columns:
        return lazy_stack([row.clone(recurse=False) for row in columns[()]])
    nested: dict[str, Any] = {}
    for (*above, name), value in columns.items():
        inner = nested
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return TensorDict(nested, batch_size=[rows], device=device)


def _take(value: Any, rows: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, rows.to(value.device))
    if isinstance(value, list):
        return [value[row] for row in rows.tolist()]
    if isinstance(value, TensorDictBase):
        return take_rows(value, rows.to(device_of(value)))
    return value[rows]  # what is no TensorDict has no columns to gather: one text for all rows


def _copy(taken: Any) -> Any:
    """What was taken, in memory of its own; tensors are already."""
    if isinstance(taken, list):
        return [row.clone() for row in taken]
    return taken if isinstance(taken, Tensor) else taken.clone()


def _join(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return list(chain.from_iterable(parts)) if isinstance(parts[0], list) else torch.cat(list(parts), 0)


def _are_alike(held: Columns, came: Columns) -> bool:
    """Whether batches are joined without a closer look: tensors of one dtype and width, and texts."""

    def kind(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.shape[1:], value.device
        return type(value) if isinstance(value, NonTensorData | NonTensorStack) else None

    return held.keys() == came.keys() and all(
        kind(value) is not None and kind(value) == kind(came[path]) for path, value in held.items()
    )

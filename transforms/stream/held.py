"""The rows that wait: a few numbers of each, by which all is decided, and the rows themselves in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import describe_columns, device_of, from_plain, join_rows, take_rows, to_plain


class HeldRows(NamedTuple):
    """What is known of R rows, (R,) each, on the CPU, in the order of their arrival."""

    slot: Tensor
    """int64: the line of the row's group in the table of groups."""
    rollout: Tensor
    """int64: its rollout's id."""
    segment: Tensor
    """int64: the number of its segment; 0 without `segment_key`."""
    done: Tensor
    """bool: the rollout ends with this row, or its segment does."""
    begins: Tensor
    """bool: the rollout begins with this row; True where nobody says."""
    ends: Tensor
    """int64: how many rows of the rollout are done when it has ended."""
    status: Tensor
    """int64: :class:`Status`."""
    reward: Tensor
    """float64: its reward; 0 where nobody asks."""
    version: Tensor
    """int64: the policy version that acted; 0 where nobody asks."""
    arrival: Tensor
    """int64: rows that came before it. By this the row itself is found."""

    def take(self, rows: Tensor) -> HeldRows:
        """Some of the rows, by numbers or by a mask."""
        if rows.dtype is torch.bool:
            rows = rows.nonzero().flatten()
        return HeldRows(*(column.index_select(0, rows) for column in self))

    def followed_by(self, others: HeldRows) -> HeldRows:
        """These rows and behind them others."""
        return HeldRows(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    @classmethod
    def nothing(cls) -> HeldRows:
        """No rows."""
        types = {"done": torch.bool, "begins": torch.bool, "reward": torch.float64}
        return cls(*(torch.empty(0, dtype=types.get(name, torch.int64)) for name in cls._fields))


class Chunk(NamedTuple):
    """Rows that came together."""

    arrival: Tensor
    """(n,) int64, ascending."""
    rows: TensorDictBase
    """TensorDict ``[n]``."""


class Chunks:
    """Rows by the number of their arrival; nothing of them is ever written to."""

    def __init__(self, chunks: Sequence[Chunk] = ()):
        self.chunks = list(chunks)

    def check(self, batch: TensorDictBase) -> None:
        """Refuse a batch whose rows could not be joined with those that wait.

        Raises:
            BatchError: columns, dtypes or the widths of dense columns differ.
        """
        if not self.chunks or len(batch) == 0:
            return
        held = self.chunks[0].rows
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
        join_rows([held[:1], batch[:1]], what)

    def add(self, arrival: Tensor, batch: TensorDictBase, rows: Tensor) -> None:
        """Keep copies of some rows of a batch: collectors write into theirs again."""
        if len(rows):
            self.chunks.append(Chunk(arrival, copy_of_rows(batch, rows)))

    def gather(self, arrival: Tensor) -> TensorDictBase:
        """Copies of the rows with these arrivals (M,), M ≥ 1, in this order."""
        found, order = [], []
        for chunk in self.chunks:
            here = is_among(arrival, chunk.arrival).nonzero().flatten()
            if len(here):
                found.append(_take(chunk.rows, torch.searchsorted(chunk.arrival, arrival[here])))
                order.append(here)
        joined = join_rows(found, "rows that wait") if len(found) > 1 else found[0]
        every = torch.cat(order)
        ordered = every.argsort()
        return joined if torch.equal(every[ordered], every) else _take(joined, ordered)

    def keep(self, arrival: Tensor) -> None:
        """Let go of all rows but those with these arrivals, ascending.

        A chunk is copied when less than half of its rows are left, so that what is held is at most twice what
        waits, and a row is copied a few times.
        """
        left = []
        for chunk in self.chunks:
            stays = is_among(chunk.arrival, arrival).nonzero().flatten()
            if 2 * len(stays) >= len(chunk.arrival):
                left.append(chunk)
            elif len(stays):
                left.append(Chunk(chunk.arrival[stays], copy_of_rows(chunk.rows, stays)))
        self.chunks = left

    def to_plain(self) -> list[dict[str, Any]]:
        """As dicts, tensors and lists."""
        return [{"arrival": chunk.arrival, "rows": to_plain(chunk.rows)} for chunk in self.chunks]

    @classmethod
    def from_plain(cls, plain: Sequence[dict[str, Any]]) -> Chunks:
        """What :meth:`to_plain` made dicts of."""
        return cls([Chunk(chunk["arrival"], from_plain(chunk["rows"])) for chunk in plain])


def is_among(values: Tensor, ascending: Tensor) -> Tensor:
    """(N,) bool: the value is one of those that ascend.

    Example:
        >>> is_among(torch.tensor([3, 9, 4]), torch.tensor([1, 3, 4])).tolist()
        [True, False, True]
    """
    if len(ascending) == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    place = torch.searchsorted(ascending, values).clamp_(max=len(ascending) - 1)
    return ascending[place] == values


def copy_of_rows(batch: TensorDictBase, rows: Tensor) -> TensorDictBase:
    """Rows that share no memory with the batch."""
    taken = _take(batch, rows)
    return taken.clone() if _is_lazy(taken) else taken


def _take(batch: TensorDictBase, rows: Tensor) -> TensorDictBase:
    return take_rows(batch, rows.to(device_of(batch)))


def _is_lazy(batch: TensorDictBase) -> bool:
    """Whether rows of it, or of something in it, are taken by reference."""
    inner = (batch.get(key) for key in batch.keys()) if not isinstance(batch, LazyStackedTensorDict) else ()
    return isinstance(batch, LazyStackedTensorDict) or any(
        _is_lazy(value) for value in inner if isinstance(value, TensorDictBase)
    )

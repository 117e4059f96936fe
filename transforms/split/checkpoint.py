"""What the split remembers: between batches, and in the middle of one that is interrupted."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import device_of, from_plain, join_rows, to_plain


class InterruptedBatch(NamedTuple):
    """A batch that was left between its minibatches: by what it is known again, and how far it came."""

    rows: int
    taken: int
    options: dict[str, Any] | None
    """What its cut depended on, by name; None in a state of an earlier version."""
    columns: dict[str, Tensor] | None
    """(N, ...) on the CPU, its ids and rewards, by name; None as well."""
    after: SplitState
    """The state after it, for who gives up what is left of it."""

    def to_plain(self) -> dict[str, Any]:
        """As dicts, tensors and lists."""
        return self._asdict() | {"after": self.after.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any], before: SplitState) -> InterruptedBatch:
        """What :meth:`to_plain` made dicts of.

        A state of an earlier version does not know the batch well enough to go on with it. What was carried
        until then is part of the batch, so that after it nothing is.
        """
        if "after" not in plain:
            return cls(plain["rows"], plain["taken"], None, None, SplitState(before.calls + 1))
        return cls(**plain | {"after": SplitState.from_plain(plain["after"])})


class SplitState(NamedTuple):
    """What goes into a draw and comes out of it."""

    calls: int = 0
    """Orders drawn so far: each has a seed of its own."""
    carried: TensorDictBase | None = None
    """Rows that wait for the next batch."""
    interrupted: InterruptedBatch | None = None
    """The batch to go on with, given again."""

    def to_plain(self) -> dict[str, Any]:
        """As dicts, tensors and lists, which ``torch.load`` reads without trusting the file."""
        plain: dict[str, Any] = {"calls": self.calls, "carried": to_plain(self.carried)}
        return plain if self.interrupted is None else plain | {"batch": self.interrupted.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> SplitState:
        """What :meth:`to_plain` made dicts of."""
        state, batch = cls(plain["calls"], from_plain(plain["carried"])), plain.get("batch")
        if batch is None:
            return state
        return state._replace(interrupted=InterruptedBatch.from_plain(batch, state))


def with_carried(
    batch: TensorDictBase, carried: TensorDictBase, key: NestedKey | None, came: Tensor | None, unit: str
) -> TensorDictBase:
    """Put carried rows behind those of a batch.

    Args:
        batch: TensorDict ``[N]``.
        carried: TensorDict ``[C]``.
        key: of the ids by which a unit is known again.
        came: (M,) those of the batch, on all ranks that share it; None: it has none.
        unit: what the message calls them.

    Raises:
        BatchError: an id is in both; the columns differ.
    """
    carried = _beside(carried, batch)
    if came is not None:
        waiting = carried.get(key).reshape(-1)
        if again := waiting[torch.isin(waiting, came)].tolist():
            raise BatchError(
                f"rows were carried for {unit}s {sorted(set(again))[:10]}, and the batch has those ids "
                "again: ids must be unique over batches to be carried, as RepeatSampler stamps them"
            )
    if len(batch) == 0:  # a rank may have no rows of its own, and none of their columns
        return carried
    return join_rows([batch, carried], "carried rows")


def _beside(carried: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
    """A copy where the batch lies, and that says so if the batch does: a checkpoint may be of elsewhere."""
    moved = carried.to(device_of(batch)).clone(recurse=False)  # rows of a lazy stack are shared
    return moved.clear_device_() if batch.device is None else moved


class Turn:
    """Whose turn it is to use a state, where several threads may: a lock, of which a copy is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()

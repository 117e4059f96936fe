"""Read the rows that others write into a replay buffer, each once and in the order of writing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_leaf_nontensor, lazy_stack
from torch import Tensor
from torchrl.data import ReplayBuffer, RoundRobinWriter

from headrace.transforms import BatchError, StalledError
from headrace.transforms.table import count_of
from headrace.transforms.table.options import above_zero, takes_options

COUNTER = 2**32  # a buffer counts its writes in 32 bits, so the count wraps around


@takes_options
def drained(buffer: ReplayBuffer, *, wait: float = 0.05, patience: float = 60.0) -> Drained:
    """Iterate over the rows that are written into a replay buffer. Each row is yielded once.

    Each item is a batch of all rows written since the last item, in the order of writing, or None without new
    rows. Use it as the source of :func:`assembled`, whose `patience` ends the wait for silent writers.
    ``close()`` ends the iteration when no row is left. ``state_dict`` holds the number of rows read. Samplers
    and transforms of the buffer are not applied.

    Args:
        buffer: a buffer with a round-robin writer. If worker processes write, use
            ``ReplayBuffer(storage=LazyTensorStorage(size), writer=DrainWriter(), shared=True)``. It must have
            room for all rows that are written between two reads, because writers do not wait.
        wait: seconds to sleep before yielding None.
        patience: seconds to wait for the lock of the buffer. A writer that was killed during a write never
            releases it.

    Raises:
        BatchError: while iterating: rows were overwritten before they were read; the buffer was emptied, or
            the loaded state is of another buffer; a write failed; or a shared buffer has columns that are not
            tensors.
        StalledError: while iterating: the buffer stays locked.
        ValueError: the buffer has no round-robin writer, or is shared and has no :class:`DrainWriter`; or an
            option has an invalid value.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> looks = iter(drained(buffer))
        >>> for numbers in ([1, 2], [3], [4]):
        ...     _ = buffer.extend(TensorDict({"n": numbers}, batch_size=[len(numbers)]))
        ...     print(next(looks)["n"].tolist())
        [1, 2]
        [3]
        [4]
        >>> next(looks) is None
        True
    """
    above_zero("wait", wait)
    above_zero("patience", patience)
    writer, needed = buffer.writer, DrainWriter if buffer.shared else RoundRobinWriter
    consumes = getattr(buffer, "_consume_after_n_samples", None) is not None
    if not isinstance(writer, needed) or consumes:
        raise ValueError(
            f"drained() needs a buffer with writer={needed.__name__}() and no consume_after_n_samples; got "
            f"{type(writer).__name__}{' and consume_after_n_samples' * consumes}"
        )
    return Drained(buffer, wait, patience)


class DrainWriter(RoundRobinWriter):
    """A round-robin writer that counts failed writes.

    TorchRL counts rows before it writes them. Without this count, :func:`drained` would read old rows after a
    failed write. A column that is missing in a write would keep old values, too, so rows must have all
    columns of the storage.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=DrainWriter(), shared=True)
        >>> _ = buffer.extend(TensorDict({"n": [1]}, batch_size=[1]))
        >>> buffer.writer.failed
        0
    """

    def __init__(self) -> None:
        super().__init__()
        self._failed = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def failed(self) -> int:
        """Number of failed writes, in all processes."""
        return int(self._failed)

    def add(self, data: TensorDictBase) -> Any:
        """Write a row."""
        with self._remembered(data):
            return super().add(data)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write rows.

        Raises:
            BatchError: the columns differ from those of the storage.
        """
        with self._remembered(data):
            return super().extend(data)

    @contextmanager
    def _remembered(self, data: TensorDictBase) -> Iterator[None]:
        try:
            storage = getattr(self._storage, "_storage", None)
            if isinstance(storage, TensorDictBase) and isinstance(data, TensorDictBase):
                stored, written = _widths(storage), _widths(data)
                both = stored.keys() & written.keys()
                odd = {
                    "lack": stored.keys() - both,
                    "also have": written.keys() - both,
                    "have another width in": {key for key in both if stored[key] != written[key]},
                }
                for how, keys in odd.items():  # a column added by one process is missing in the others
                    if keys:
                        raise BatchError(
                            "rows must have the columns and widths of the storage; these rows "
                            f"{how} {', '.join(sorted(map(str, keys)))}"
                        )
            yield
        except BaseException:
            self._failed += 1  # the buffer's lock is held here
            raise


def _widths(rows: TensorDictBase) -> dict[NestedKey, torch.Size | None]:
    """The shape of each column in a row; None for columns that are not tensors."""
    leaves = rows.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {key: leaf.shape[rows.batch_dims :] if isinstance(leaf, Tensor) else None for key, leaf in leaves}


class Drained:
    """The iterator that :func:`drained` returns."""

    def __init__(self, buffer: ReplayBuffer, wait: float, patience: float):
        self.buffer, self.wait, self.patience = buffer, wait, patience
        self.position = 0
        """Number of rows that were read."""
        self._closed = False

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while True:
            closed = self._closed  # asked before reading: rows written before close() are read
            rows = self._read()
            if rows is None:
                if closed:
                    return
                time.sleep(self.wait)
            yield rows

    def close(self) -> None:
        """End the iteration when all rows are read. Call it when there are no more writers."""
        self._closed = True

    def _read(self) -> TensorDictBase | None:
        buffer, writer = self.buffer, self.buffer.writer
        with ExitStack() as locked:  # lock out all writers, which count rows before they write them
            for lock in (buffer._replay_lock, buffer._write_lock):
                if not hasattr(lock, "acquire"):  # a buffer for one process has no lock
                    continue
                if not lock.acquire(timeout=self.patience):
                    raise StalledError(
                        f"a writer has kept the buffer locked for {self.patience:g} s. If it was killed "
                        "during a write, its last rows are incomplete: restart with new workers and a new "
                        "buffer"
                    )
                locked.callback(lock.release)
            if failed := getattr(writer, "failed", 0):
                raise BatchError(
                    f"{count_of(failed, 'write')} to the buffer failed, and those rows are lost. The "
                    "cause is in the worker's own error. Restart with new workers and a new buffer"
                )
            unseen = (buffer.write_count - self.position) % COUNTER
            if unseen == 0:
                return None
            size = buffer.storage._max_size_along_dim0()
            if unseen > size:
                raise BatchError(
                    f"{self.position} rows of the buffer were read, and {buffer.write_count} were written; "
                    f"it holds {size}, so rows were overwritten before they were read. Make the buffer "
                    "larger, or read more often. If it was emptied or is new, start a new drained(buffer)"
                )
            rows = buffer.storage[(writer._cursor - unseen + torch.arange(unseen)) % size]
            if not buffer.shared:
                rows = lazy_stack(rows) if isinstance(rows, list) else rows
            elif odd := [str(key) for key, width in _widths(rows).items() if width is None]:
                raise BatchError(
                    f"a shared buffer has columns that are no tensors: {', '.join(sorted(odd))}. Their "
                    "values stay in the worker's process. Convert them to numbers, or remove them"
                )
        self.position += unseen
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The number of rows that were read."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the rows that were read, with the same buffer or one with its state."""
        self.position = state["position"]

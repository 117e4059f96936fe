"""What others write into a replay buffer, read once and in its order."""

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
from headrace.transforms.options import above_zero, takes_options

COUNTER = 2**32  # a buffer counts its writes in 32 bits


@takes_options
def drained(buffer: ReplayBuffer, *, wait: float = 0.05, patience: float = 60.0) -> Drained:
    """Iterate over what is written into a replay buffer, whoever writes: each row comes out once.

    A look takes all that was written since the last one, in the order of writing, and is None where that is
    nothing. So it is a source for :func:`assembled`, whose `patience` ends the wait for writers that are
    silent. ``close()`` ends it where nothing is left; ``state_dict`` is how far it has read. Samplers and
    transforms of the buffer see nothing of it.

    Args:
        buffer: a buffer that writes round and round, ``ReplayBuffer(storage=LazyTensorStorage(size),
            writer=DrainWriter(), shared=True)`` where worker processes write. Large enough for what is
            written between two looks: nobody waits for the reader.
        wait: seconds to sleep where nothing was written, before None.
        patience: seconds for which a writer may keep the buffer locked. One that was killed while it wrote
            never unlocks it.

    Raises:
        BatchError: when iterated: rows were overwritten before they were read; the buffer was emptied, or is
            another than that of the state; a write failed; columns of a shared buffer are no tensors.
        StalledError: when iterated: the buffer stays locked.
        ValueError: a buffer that is not written round and round, or a shared one without a
            :class:`DrainWriter`; an option with a wrong value.

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
    """Write round and round, and remember where that failed.

    TorchRL counts rows before it writes them, so those of a write that fails would be read as what was there
    before. So would a column that is not written: all writers write all columns of the storage.

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
        """Writes that failed, in any process."""
        return int(self._failed)

    def add(self, data: TensorDictBase) -> Any:
        """Write a row."""
        with self._remembered(data):
            return super().add(data)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write rows.

        Raises:
            BatchError: columns are not those of the storage.
        """
        with self._remembered(data):
            return super().extend(data)

    @contextmanager
    def _remembered(self, data: TensorDictBase) -> Iterator[None]:
        try:
            there = getattr(self._storage, "_storage", None)
            if isinstance(there, TensorDictBase) and isinstance(data, TensorDictBase):
                stored, came = _widths(there), _widths(data)
                both = stored.keys() & came.keys()
                odd = {
                    "lack": stored.keys() - both,
                    "have also": came.keys() - both,
                    "are of another width in": {key for key in both if stored[key] != came[key]},
                }
                for how, keys in odd.items():  # what one process adds to the storage is there in no other
                    if keys:
                        raise BatchError(
                            "rows must have all columns of the storage, as wide as there; these "
                            f"{how} {', '.join(sorted(map(str, keys)))}"
                        )
            yield
        except BaseException:
            self._failed += 1  # under the lock of the buffer
            raise


def _widths(rows: TensorDictBase) -> dict[NestedKey, torch.Size | None]:
    """The shape of each column in a row; None where it holds no tensors."""
    leaves = rows.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {key: leaf.shape[rows.batch_dims :] if isinstance(leaf, Tensor) else None for key, leaf in leaves}


class Drained:
    """What :func:`drained` returns."""

    def __init__(self, buffer: ReplayBuffer, wait: float, patience: float):
        self.buffer, self.wait, self.patience = buffer, wait, patience
        self.position = 0
        """Rows that were read."""
        self._closed = False

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while True:
            closed = self._closed  # before the look: what was written until then is still read
            rows = self._look()
            if rows is None:
                if closed:
                    return
                time.sleep(self.wait)
            yield rows

    def close(self) -> None:
        """Nobody writes any more: iteration ends where nothing is left."""
        self._closed = True

    def _look(self) -> TensorDictBase | None:
        buffer, writer = self.buffer, self.buffer.writer
        with ExitStack() as locked:  # writers are kept out, of other processes too: they count rows first
            for lock in (buffer._replay_lock, buffer._write_lock):
                if not hasattr(lock, "acquire"):  # of a buffer of one process
                    continue
                if not lock.acquire(timeout=self.patience):
                    raise StalledError(
                        f"a writer has kept the buffer locked for {self.patience:g} s. If it was killed "
                        "while it wrote, its last rows are torn: begin with new workers and a new buffer"
                    )
                locked.callback(lock.release)
            if failed := getattr(writer, "failed", 0):
                raise BatchError(
                    f"{failed} write{'s' * (failed > 1)} to the buffer failed, and those rows are lost: the "
                    "worker's own error says why. Begin with new workers and a new buffer"
                )
            unseen = (buffer.write_count - self.position) % COUNTER
            if unseen == 0:
                return None
            size = buffer.storage._max_size_along_dim0()
            if unseen > size:
                raise BatchError(
                    f"{self.position} rows of the buffer were read, and {buffer.write_count} are written, of "
                    f"which it holds {size}: rows were overwritten before they were read. Make it larger, or "
                    "read more often. If it was emptied, or is a new one, begin with another drained(buffer)"
                )
            rows = buffer.storage[(writer._cursor - unseen + torch.arange(unseen)) % size]
            if not buffer.shared:
                rows = lazy_stack(rows) if isinstance(rows, list) else rows
            elif odd := [str(key) for key, width in _widths(rows).items() if width is None]:
                raise BatchError(
                    f"a shared buffer has columns that are no tensors, {', '.join(sorted(odd))}: what a "
                    "worker writes there stays in its process. Number them, or leave them out"
                )
        self.position += unseen
        return rows

    def state_dict(self) -> dict[str, Any]:
        """How many rows were read."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the rows that were read: of the same buffer, or of one with its state."""
        self.position = state["position"]

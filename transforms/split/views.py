"""The minibatches and micro-batches of an ordered batch, as views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from tensordict import NestedKey, TensorDictBase
from torch.utils.weak import WeakIdKeyDictionary

from headrace.transforms.errors import BatchError
from headrace.transforms.schema import MICROBATCH, MINIBATCH, RANK, has_key, read_written

# By the tensor itself: as an attribute it would go with pickles and copies, which begin at another version.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def know_runs(batch: TensorDictBase, key: NestedKey, sizes: Sequence[int]) -> None:
    """Remember how many rows each number of a column is on, one after the other, as the plan knows."""
    column = batch.get(key)
    if not column.is_inference():  # which would not say whether somebody has written to it since
        _known[column] = (column._version, [size for size in sizes if size])


def split_minibatches(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the minibatches of a batch that :class:`ShuffleSplit` ordered, as views.

    One device read, for their sizes, where the batch has been copied since.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "minibatch")`` column.
        BatchError: its rows are no longer in their order, after a replay buffer's sampler, say.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import ShuffleSplit
        >>> split = ShuffleSplit(minibatches=3, unit="sample")
        >>> batch = split(TensorDict({"x": torch.arange(6)}, batch_size=[6]))
        >>> [part["x"].shape[0] for part in split_minibatches(batch)]
        [2, 2, 2]
    """
    return _runs(batch, (MINIBATCH,), "split_minibatches")


def split_microbatches(minibatch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the micro-batches of one minibatch, rank by rank, as views.

    One device read, for their sizes, where the minibatch has been copied since.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "microbatch")`` column.
        BatchError: it holds several minibatches, or its rows are no longer in their order.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import ShuffleSplit
        >>> split = ShuffleSplit(minibatches=1, microbatches=2, unit="sample")
        >>> batch = split(TensorDict({"x": torch.arange(6)}, batch_size=[6]))
        >>> [part["x"].shape[0] for part in split_microbatches(batch)]
        [3, 3]
    """
    keys = (MINIBATCH, RANK, MICROBATCH) if has_key(minibatch, RANK) else (MINIBATCH, MICROBATCH)
    return _runs(minibatch, keys, "split_microbatches")


def _runs(batch: TensorDictBase, keys: Sequence[tuple[str, str]], reader: str) -> Iterator[TensorDictBase]:
    if len(batch) == 0:
        return iter(())
    columns = [read_written(batch, key, reader=reader, writer="ShuffleSplit") for key in keys]
    version, known = _known.get(columns[-1], (None, []))
    if known and version == columns[-1]._version and sum(known) == len(batch):
        return _cut(batch, known)
    places, counts = torch.unique_consecutive(torch.stack(columns).cpu(), dim=1, return_counts=True)
    numbers, sizes = places.T.tolist(), counts.tolist()
    if numbers != sorted(map(list, set(map(tuple, numbers)))):
        raise BatchError(
            f"{reader} takes rows in the order that ShuffleSplit gave them; these have been moved since. "
            "Take its minibatches before anything samples from them, or leave the split out and cut what was "
            "sampled"
        )
    if len(keys) > 1 and len({number[0] for number in numbers}) > 1:
        raise BatchError(
            f"a minibatch is one optimiser step; this batch holds {len({n[0] for n in numbers})}: take them "
            "one by one, by split_minibatches(batch)"
        )
    return _cut(batch, sizes)


def _cut(batch: TensorDictBase, sizes: Sequence[int]) -> Iterator[TensorDictBase]:
    ends = list(accumulate(sizes))
    return (batch[end - size : end] for end, size in zip(ends, sizes, strict=True))

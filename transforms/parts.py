"""The minibatches and micro-batches of an ordered batch, as views."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase

from .base import written_column
from .columns import MICROBATCH, MINIBATCH


def split_minibatches(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the minibatches of a batch that :class:`ShuffleSplit` ordered, as views. Reads their sizes.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "minibatch")`` column.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import ShuffleSplit
        >>> split = ShuffleSplit(minibatches=3, unit="sample")
        >>> batch = split(TensorDict({"x": torch.arange(6)}, batch_size=[6]))
        >>> [part["x"].shape[0] for part in split_minibatches(batch)]
        [2, 2, 2]
    """
    return _runs(batch, MINIBATCH, "split_minibatches")


def split_microbatches(minibatch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the micro-batches of one minibatch of one rank, as views. Reads their sizes.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "microbatch")`` column.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import ShuffleSplit
        >>> split = ShuffleSplit(minibatches=1, microbatches=2, unit="sample")
        >>> batch = split(TensorDict({"x": torch.arange(6)}, batch_size=[6]))
        >>> [part["x"].shape[0] for part in split_microbatches(batch)]
        [3, 3]
    """
    return _runs(minibatch, MICROBATCH, "split_microbatches")


def _runs(batch: TensorDictBase, key: tuple[str, str], reader: str) -> Iterator[TensorDictBase]:
    if len(batch) == 0:
        return
    numbers = written_column(batch, key, reader=reader, writer="ShuffleSplit")
    start = 0
    for size in torch.unique_consecutive(numbers, return_counts=True)[1].tolist():
        yield batch[start : start + size]
        start += size

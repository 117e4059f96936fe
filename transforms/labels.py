"""Ids that came as text: numbered at the door, their labels kept, and said in errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tensordict import LazyStackedTensorDict, NestedKey, NonTensorData, NonTensorStack, TensorDictBase

from .errors import BatchError
from .ids import as_ids
from .rows import device_of, shallow_copy
from .schema import has_key


def number_ids(batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
    """Put numbers in place of ids that are text (:func:`number_labels`), and keep the text.

    Args:
        batch: TensorDict ``[N]``, which is left alone.
        keys: columns of ids; those that are numbers, or not there, stay as they are.

    Returns:
        The batch itself where no id is text; else one with (N,) int64 under those keys, and the text under
        ``group_label`` for ``group_id``, where nothing is there yet.

    Raises:
        BatchError: an id is neither a number nor a string, or empty.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = number_ids(TensorDict({"group_id": ["a", "b", "a"]}, batch_size=[3]), ["group_id"])
        >>> batch["group_id"].unique().shape, list(batch["group_label"])
        (torch.Size([2]), ['a', 'b', 'a'])
    """
    texts = {key: labels for key in keys if (labels := _labels(batch, key)) is not None}
    if not texts:
        return batch
    numbered = shallow_copy(batch)
    for key, labels in texts.items():
        if not has_key(batch, label_key(key)):
            numbered.set(label_key(key), batch.get(key))
        numbered.set(key, as_ids(labels, _last(key), device=device_of(batch)))
    return numbered


def label_key(key: NestedKey) -> NestedKey:
    """Where the labels of a column of ids are: ``group_label`` for ``group_id``."""
    name = f"{_last(key).removesuffix('_id')}_label"
    return name if isinstance(key, str) else (*key[:-1], name)


@contextmanager
def labels_in_errors(batch: TensorDictBase, keys: Sequence[NestedKey]) -> Iterator[None]:
    """Where ids of the batch are text, errors raised inside say the labels in place of their numbers."""
    try:
        yield
    except BatchError as err:
        names: dict[str, str] = {}
        with suppress(BatchError):  # what the ids themselves lack is what was raised
            for labels in filter(None, (_labels(batch, key) for key in keys)):
                numbers = as_ids(labels, "id").tolist()
                names |= {str(n): repr(label) for n, label in zip(numbers, labels, strict=True)}
        if names:
            err.args = (re.sub(r"\d+", lambda number: names.get(number[0], number[0]), str(err)),)
        raise


def _labels(batch: TensorDictBase, key: NestedKey) -> list[Any] | None:
    """What a column of ids holds, one a row, if it is no tensor; None if it is one, or not there."""
    if not isinstance(batch, TensorDictBase) or not batch.shape.numel() or not has_key(batch, key):
        return None
    rows = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
    if not rows or not isinstance(rows[0].get(key), NonTensorData | NonTensorStack):
        return None
    labels = batch.reshape(-1).get(key).tolist()
    return [label[0] if isinstance(label, list) and len(label) == 1 else label for label in labels]


def _last(key: NestedKey) -> str:
    return key if isinstance(key, str) else str(key[-1])

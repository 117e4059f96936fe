"""Checks of each batch on input. Ids that are text become numbers.

The text is kept in a label column, and errors show it in place of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from .errors import BatchError, ProcessedTwiceError, listing
from .ids import as_ids
from .schema import COLLECTED, PROCESSED
from .tensordicts import (
    any_row_has,
    column_of,
    device_of,
    leaves_of,
    number_column,
    shallow_copy,
    take_rows,
    texts_of,
    write_column,
)


def enter_rows(batch: TensorDictBase, id_keys: Sequence[NestedKey], *, reader: str) -> TensorDictBase:
    """Check a batch on input, flatten it, and replace text ids by numbers (:func:`number_labels`).

    Padding of a collector is dropped, at the cost of one device read if the batch marks padding.

    Args:
        batch: TensorDict ``[N]`` or ``[envs, time]``, which is not modified.
        id_keys: keys of the id columns.
        reader: class name of the stage, for messages.

    Raises:
        TypeError: the input is not a TensorDict.
        BatchError: the batch has no row dimension, or has nested tensors.
        ProcessedTwiceError: a pipeline has already processed this batch.
    """
    if not isinstance(batch, TensorDictBase):
        plain = ". headrace.decide takes columns without a TensorDict" * isinstance(batch, Mapping)
        raise TypeError(f"{reader} takes a TensorDict of rows, got {type(batch).__name__}{plain}")
    if batch.batch_dims == 0:
        raise BatchError(f"{reader} takes a batch of rows, got a TensorDict of batch size []")
    rows = batch.shape.numel()
    if rows and (jagged := [str(key) for key, leaf in leaves_of(batch) if leaf.is_nested]):
        raise BatchError(
            f"{reader} takes dense columns, or a lazy stack of ragged rows; found nested tensors in "
            f"{listing(jagged)}: pass batch.to_lazystack()"
        )
    flat = batch.reshape(-1) if batch.batch_dims > 1 and rows else batch
    if rows and any_row_has(flat, PROCESSED):
        raise ProcessedTwiceError(
            f"{reader} got {rows} rows that a pipeline has already processed; filters and statistics must "
            "see each rollout once: attach the pipeline at one place, and add other transforms as its stages"
        )
    if rows and any_row_has(flat, COLLECTED):
        real = number_column(flat, COLLECTED)
        if not isinstance(real, Tensor) or real.dtype is not torch.bool or real.ndim > 1:
            raise BatchError(
                f"{reader} needs one bool per row in {COLLECTED!r}: False for a collector's padding"
            )
        kept = real.nonzero().flatten()
        flat = take_rows(flat, kept, on_cpu=kept.cpu()).exclude(COLLECTED)
    return number_ids(flat, id_keys) if flat.shape.numel() else flat


def number_ids(batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
    """Replace text ids by numbers (:func:`number_labels`), and keep the text in a label column.

    Args:
        batch: TensorDict ``[N]``, which is not modified.
        keys: keys of id columns. Columns that are numbers or missing stay as they are.

    Returns:
        The batch itself if no id is text. Else a copy with (N,) int64 under these keys, and the text under
        ``group_label`` for ``group_id``, unless the batch has that column already.

    Raises:
        BatchError: an id is neither a number nor a string, or is empty.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = number_ids(TensorDict({"group_id": ["a", "b", "a"]}, batch_size=[3]), ["group_id"])
        >>> batch["group_id"].unique().shape, list(batch["group_label"])
        (torch.Size([2]), ['a', 'b', 'a'])
    """
    numbered = batch
    for key in keys:
        if (labels := labels_of(batch, key)) is None:
            continue
        if numbered is batch:
            numbered = shallow_copy(batch)
        if not any_row_has(batch, label_key(key)):
            write_column(numbered, label_key(key), column_of(batch, key))
        write_column(numbered, key, as_ids(labels, _last(key), device=device_of(batch)))
    return numbered


def label_key(key: NestedKey) -> NestedKey:
    """The key of the label column of an id column: ``group_label`` for ``group_id``."""
    name = f"{_last(key).removesuffix('_id')}_label"
    return name if isinstance(key, str) else (*key[:-1], name)


def labels_in_errors(batch: TensorDictBase, keys: Sequence[NestedKey]) -> AbstractContextManager[None]:
    """In errors raised inside, replace the numbers of ids by the labels of the batch, if it has labels."""
    return labels_said(
        lambda: [labels_of(batch, key) or labels_of(batch, label_key(key)) or [] for key in keys]
    )


@contextmanager
def labels_said(known: Callable[[], Iterable[Sequence[Any]]]) -> Iterator[None]:
    """In errors raised inside, replace the numbers of ids by the `known` labels."""
    try:
        yield
    except BatchError as err:
        names: dict[str, str] = {}
        with suppress(BatchError):  # invalid labels are the error that is being raised
            for labels in known():
                numbers = as_ids(labels, "id").tolist()
                names |= {str(n): repr(label) for n, label in zip(numbers, labels, strict=True)}
        err.labels |= names
        raise


def labels_of(batch: TensorDictBase, key: NestedKey) -> list[Any] | None:
    """The labels of an id column that is not a tensor, one per row; None if it is a tensor or missing."""
    if not isinstance(batch, TensorDictBase) or not batch.shape.numel():
        return None
    if batch.batch_dims > 1:
        batch = batch.reshape(-1)
    first = batch.tensordicts[0] if isinstance(batch, LazyStackedTensorDict) else batch
    if not isinstance(column_of(first, key), NonTensorData | NonTensorStack):
        return None
    return texts_of(column_of(batch, key))


def _last(key: NestedKey) -> str:
    return key if isinstance(key, str) else str(key[-1])

"""Checks of each batch on input. Ids that are text become numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .errors import BatchError, ProcessedTwiceError, count_of, listing
from .labels import number_ids
from .schema import COLLECTED, PROCESSED
from .tensordicts import (
    any_row_has,
    leaves_of,
    number_column,
    take_rows,
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
        BatchError: the batch has no row dimension, has nested tensors, or marks padding with a column that is
            not bool; or an id is neither a number nor a text.
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
            f"{reader} got {count_of(rows, 'row')}, and a pipeline has already processed at least one of "
            "them; filters and statistics must see each rollout once: attach the pipeline at one place, and "
            "add other transforms as its stages"
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

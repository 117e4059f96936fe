"""What each batch goes through first: it has rows, no pipeline has been over it, its ids are numbers."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey, TensorDictBase

from .errors import BatchError, ProcessedTwiceError, listing
from .labels import number_ids
from .rows import jagged_keys, take_rows
from .schema import COLLECTED, PROCESSED, has_key, read_flags


def enter_rows(batch: TensorDictBase, id_keys: Sequence[NestedKey], *, reader: str) -> TensorDictBase:
    """Check a batch at the door, flatten it, and number ids that are text (:func:`number_labels`).

    What a collector has padded it with are no rows: one device read, where it says which.

    Args:
        batch: TensorDict ``[N]`` or ``[envs, time]``, which is left alone.
        id_keys: columns of ids.
        reader: who takes the batch, for messages.

    Raises:
        TypeError: the input is no TensorDict.
        BatchError: the batch has no row dimension, or nested tensors.
        ProcessedTwiceError: a pipeline has been over this batch.
    """
    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"{reader} takes a TensorDict of rows, got {type(batch).__name__}")
    if batch.batch_dims == 0:
        raise BatchError(f"{reader} takes a batch of rows, got a TensorDict of batch size []")
    rows = batch.shape.numel()
    if rows and has_key(batch, PROCESSED):
        raise ProcessedTwiceError(
            f"{reader} got {rows} rows a pipeline has processed already; "
            "filters and statistics must see rollouts once: attach the pipeline at one place, and put "
            "what else there is to do into its stages"
        )
    if rows and (jagged := jagged_keys(batch)):
        raise BatchError(
            f"{reader} takes dense columns, or a lazy stack of rows where they are ragged; found nested "
            f"tensors in {listing(map(str, jagged))}: pass batch.to_lazystack()"
        )
    flat = batch.reshape(-1) if batch.batch_dims > 1 and rows else batch
    if rows and has_key(flat, COLLECTED):
        real = read_flags(flat, COLLECTED, reader=reader, option="False: a collector's padding")
        flat = take_rows(flat, real.nonzero().flatten()).exclude(COLLECTED)
    return number_ids(flat, id_keys) if flat.shape.numel() else flat

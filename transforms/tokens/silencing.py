"""Rows that are taken out of the loss: none of their tokens trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import silence_rows
from headrace.transforms.schema import IN_LOSS, LENGTH, has_key, key_names

from .counting import masked_tokens
from .per_token import check_mask

_later: ContextVar[set[NestedKey] | None] = ContextVar("headrace_silencing_later", default=None)


def remember_lengths(batch: TensorDictBase, key: NestedKey, silent: Tensor) -> None:
    """Write ``("headrace", "length")`` for (N,) bool rows that are about to be silenced.

    It is there whether or not any are, so that batches of one recipe have the same columns.
    """
    tokens = masked_tokens(batch, key, reader="SampleFilter", option="loss_mask_key")
    now = torch.where(silent, tokens, -1)
    before = batch.get(LENGTH, None)
    batch.set(LENGTH, now if before is None else torch.where(before < 0, now, before))


def silence(
    batch: TensorDictBase, keep: Tensor, loss_mask_key: NestedKey, log_prob_key: NestedKey | None
) -> None:
    """Take rows out of the loss; what they say of their length, and of statistics, stays.

    Args:
        batch: TensorDict ``[N]``, which gets new columns in place of the old, ``("headrace", "in_loss")`` and
            ``("headrace", "length")``.
        keep: (N,) bool, the rows that stay.
        loss_mask_key: (N, T) bool; written if it is there.
        log_prob_key: (N, T) float; written if it is there. None: never.

    Raises:
        BatchError: neither is there, and a row is to leave.
    """
    silent = ~keep
    if has_key(batch, loss_mask_key):
        check_mask(batch, loss_mask_key)
        remember_lengths(batch, loss_mask_key, silent)
    columns = [key for key in (loss_mask_key, log_prob_key) if key and has_key(batch, key)]
    batch.set(IN_LOSS, keep & batch.get(IN_LOSS, keep))
    if not columns and bool(silent.any()):
        raise BatchError(
            f"{int(silent.sum())} rows are to leave the loss, but the batch has neither "
            f"{loss_mask_key!r} (loss_mask_key) nor {log_prob_key!r} (log_prob_key): they "
            f"would train all the same. It has {key_names(batch)}; set the keys, or drop the rows"
        )
    if set(columns) == _later.get():
        return
    if silent.device.type != "cpu" or bool(silent.any()):  # a copy saved where looking costs nothing
        for key in columns:
            silence_rows(batch, key, silent)


@contextmanager
def silencing_later(columns: set[NestedKey] | None) -> Iterator[None]:
    """Inside, rows that leave the loss are only said to, where these are the columns to silence.

    Whoever gathers rows into memory of their own silences them there (:func:`silence_gathered`): to do it
    before is to copy columns that are about to be copied. Till then the columns say what they did.

    Args:
        columns: the loss mask and the log-probabilities, as far as the batch has them. None: rows are
            silenced at once.
    """
    token = _later.set(columns)
    try:
        yield
    finally:
        _later.reset(token)


def silence_gathered(batch: TensorDictBase, columns: Collection[NestedKey], *, own_memory: bool) -> None:
    """Silence the rows that are out of the loss (``("headrace", "in_loss")``); those that are silent stay so.

    Args:
        batch: TensorDict ``[N]``, which may get new columns in place of the old.
        columns: of it, a loss mask or log-probabilities.
        own_memory: nobody else has the memory of dense columns, which are written to.
    """
    if not columns or not has_key(batch, IN_LOSS):
        return
    silent = ~batch.get(IN_LOSS)
    if isinstance(batch, LazyStackedTensorDict):
        silent = silent.cpu()  # rows are silenced one by one
    rows = silent.nonzero().flatten() if silent.device.type == "cpu" else None  # elsewhere nothing is read
    if rows is not None and len(rows) == 0:
        return
    for key in columns:
        if isinstance(batch, LazyStackedTensorDict) or not own_memory:
            silence_rows(batch, key, silent)
            continue
        column = batch.get(key)
        value = False if column.dtype is torch.bool else float("nan")
        if rows is not None:
            column.index_fill_(0, rows, value)
        else:
            column.masked_fill_(silent.view(-1, *[1] * (column.ndim - 1)), value)

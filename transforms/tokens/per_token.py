"""Columns of one number a token: read from a batch and written to it, dense or ragged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.schema import IN_LOSS, has_key, require


def check_mask(batch: TensorDictBase, key: NestedKey) -> None:
    """Refuse a loss mask that is none: of 0.0 and 1.0, say, whose rows could not be silenced.

    Raises:
        BatchError: it is not bool.
    """
    masks = batch.get(key, as_list=True) if isinstance(batch, LazyStackedTensorDict) else [batch.get(key)]
    if odd := {mask.dtype for mask in masks} - {torch.bool}:
        raise BatchError(
            f"a loss mask is bool, True trains; {key!r} is {odd.pop()}: convert it by `mask != 0`"
        )


def read_tokens(
    batch: TensorDictBase, key: NestedKey, *, reader: str, option: str, fill: float = 0
) -> Tensor:
    """Read one number a token: (N, T) or (N, T, 1) comes back as (N, T), ragged rows filled up at their end.

    Raises:
        MissingKeyError: the column is not there.
        BatchError: it has another shape.
    """
    if isinstance(batch, LazyStackedTensorDict) and has_key(batch, key):
        column = padded(batch, key, fill)
    else:
        column = require(batch, key, reader=reader, option=option)
    return _one_a_token(column, key, reader, option)


def padded(batch: LazyStackedTensorDict, key: NestedKey, fill: float = 0) -> Tensor:
    """(N, T, ...) of ragged rows, filled up at their end; (N, ...) where they are of one shape.

    Raises:
        BatchError: rows differ in more than their length.
    """
    rows: Sequence[Any] = batch.get(key, as_list=True)
    kinds = {(row.dtype, row.shape[1:]) if isinstance(row, Tensor) else type(row) for row in rows}
    if len(kinds) > 1 or not all(isinstance(row, Tensor) for row in rows[:1]):
        raise BatchError(f"rows of {key!r} are tensors of one dtype; found {sorted(map(str, kinds))}")
    if len({row.shape for row in rows}) == 1:
        return torch.stack(list(rows))
    return pad_sequence(list(rows), batch_first=True, padding_value=fill)


def _one_a_token(column: Tensor, key: NestedKey, reader: str, option: str) -> Tensor:
    if isinstance(column, Tensor) and column.ndim == 3 and column.shape[-1] == 1:
        column = column.squeeze(-1)
    if not isinstance(column, Tensor) or column.ndim != 2:
        found = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        raise BatchError(f"{reader} needs one number a token, (N, T), in {key!r} ({option}); found {found}")
    return column.detach()


def check_lengths(batch: TensorDictBase, keys: Iterable[NestedKey], like: NestedKey, *, reader: str) -> None:
    """Refuse ragged rows of which a column has not as many entries as the row has tokens in `like`.

    Filled up, what is missing would be read as zeros. A column of one entry in every row is of rows.

    Raises:
        BatchError: naming the column and the rows.
    """
    if not isinstance(batch, LazyStackedTensorDict):
        return
    tokens = [row.numel() for row in batch.get(like, as_list=True)]
    for key in keys:
        found = [row.numel() for row in batch.get(key, as_list=True)]
        if found == tokens or set(found) == {1}:
            continue
        pairs = enumerate(zip(found, tokens, strict=True))
        wrong = [f"row {row} has {own} for {size} tokens" for row, (own, size) in pairs if own != size]
        raise BatchError(
            f"{reader} needs one number a token in {key!r}, as many as {like!r} has; {listing(wrong)}. Were "
            "tokens cut off after it was written?"
        )


def write_tokens(batch: TensorDictBase, key: NestedKey, values: Tensor, like: NestedKey) -> None:
    """Write (N, T, ...) values, to ragged rows as many as the row has of `like`."""
    if not isinstance(batch, LazyStackedTensorDict):
        batch.set(key, values)
        return
    for row, own in zip(batch.tensordicts, values, strict=True):
        row.set(key, own[: len(row.get(like))])


def read_loss_mask(batch: TensorDictBase, key: NestedKey, *, reader: str) -> Tensor:
    """(N, T) bool: tokens in the loss, of rows that are in it.

    Raises:
        MissingKeyError: the mask is not there.
        BatchError: it is not bool.
    """
    mask = read_tokens(batch, key, reader=reader, option="loss_mask_key")
    check_mask(batch, key)
    in_loss = batch.get(IN_LOSS, None)
    return mask if in_loss is None else mask & in_loss.unsqueeze(-1)


def read_advantage(batch: TensorDictBase, key: NestedKey, tokens: int, *, reader: str) -> Tensor:
    """(N, 1) of rows, or (N, T) of tokens, of (N,) or (N, 1, 1), or (N, T, 1).

    Raises:
        MissingKeyError: it is not there.
        BatchError: it is neither, or no float.
    """
    if isinstance(batch, LazyStackedTensorDict) and has_key(batch, key):
        credit = padded(batch, key)
    else:
        credit = require(batch, key, reader=reader, option="advantage_key")
    rows = len(batch)
    if not credit.is_floating_point() or credit.numel() not in (rows, rows * tokens):
        raise BatchError(
            f"an advantage is a floating-point number a row, (N, 1, 1), or a token, (N, {tokens}, 1); "
            f"{reader} found {key!r} (advantage_key) {credit.dtype} {tuple(credit.shape)}"
        )
    return credit.detach().reshape(rows, -1) if rows else credit.new_zeros(0, tokens)

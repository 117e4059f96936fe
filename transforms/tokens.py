"""Tokens: how many of a row's are in a mask, and how many in the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from .errors import BatchError, MissingKeyError
from .rows import flat_rows
from .schema import LENGTH, has_key, key_names, require

ONES = 0x0101010101010101  # a 1 in each of eight bytes
MOST = 255  # bytes of 0 and 1 that can be added up before one of them overflows


def count_true(mask: Tensor) -> Tensor:
    """(N,) int64: the True entries of each row of a bool (N, ...).

    On the CPU eight bytes are added at a time, as one integer: PyTorch's own sum of bools takes sixty times
    as long. Elsewhere it is that sum, and nothing is read.

    Example:
        >>> count_true(torch.tensor([[True, False, True], [False, False, False]])).tolist()
        [2, 0]
    """
    rows = mask.reshape(len(mask), mask.numel() // max(len(mask), 1))
    width = rows.shape[1] // 8 * 8
    if rows.device.type != "cpu" or width == 0:
        return rows.sum(-1)
    whole = rows[:, :width].reshape(-1)
    if whole.storage_offset() % 8:  # a row of a larger batch begins anywhere
        whole = whole.clone()
    words = whole.view(torch.uint8).view(torch.int64).view(len(rows), -1)
    if bool((words & ~ONES).any()):  # a True that is another byte than 1, as a view of other data may have
        return (rows != 0).sum(-1)
    total = rows[:, width:].sum(-1)
    for part in words.split(MOST, dim=1):
        total = total + part.sum(-1).view(torch.uint8).view(-1, 8).sum(-1)
    return total


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


def masked_tokens(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Tensor:
    """(N,) int64, the True entries of each row of a token mask, dense or ragged.

    Raises:
        MissingKeyError: it is not there.
        BatchError: it is not bool.
    """
    if isinstance(batch, LazyStackedTensorDict) and has_key(batch, key):
        check_mask(batch, key)
        return torch.stack([mask.sum() for mask in batch.get(key, as_list=True)])
    mask = require(batch, key, reader=reader, option=option)
    check_mask(batch, key)
    return count_true(mask)


def lengths(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Tensor:
    """(N,) int64, the tokens of each row in a loss mask, or those that it had before a filter silenced it.

    To a statistic a rollout is as long as it was: what trains is another question (:func:`loss_tokens`).

    Raises:
        MissingKeyError: the mask is not there.
        BatchError: it is not bool.
    """
    tokens = masked_tokens(batch, key, reader=reader, option=option)
    before = batch.get(LENGTH, None)
    return tokens if before is None else torch.where(before < 0, tokens, before)


def remember_lengths(batch: TensorDictBase, key: NestedKey, silent: Tensor) -> None:
    """Write ``("headrace", "length")`` for (N,) bool rows that are about to be silenced.

    It is there whether or not any are, so that batches of one recipe have the same columns.
    """
    tokens = masked_tokens(batch, key, reader="SampleFilter", option="loss_mask_key")
    now = torch.where(silent, tokens, -1)
    before = batch.get(LENGTH, None)
    batch.set(LENGTH, now if before is None else torch.where(before < 0, now, before))


def any_token(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """(N,) bool: whether a row of a dense or ragged (N, T) bool column has a True. No device read."""
    check_mask(batch, key)
    if isinstance(batch, LazyStackedTensorDict):
        return torch.stack([mask.any() for mask in batch.get(key, as_list=True)])
    mask = batch.get(key)
    if mask.numel() == 0:
        return torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    # On CPU `any` of bools costs thirty times the maximum of the same bytes.
    return flat_rows(mask.contiguous().view(torch.uint8)).amax(-1) > 0


def loss_tokens(batch: TensorDictBase, loss_mask_key: NestedKey, log_prob_key: NestedKey | None) -> Tensor:
    """(N,) int64: tokens in the loss, as TorchRL's GRPOLoss counts them: masked in, with a finite log-prob.

    Either column may be missing; dense (N, T) or ragged. No device read.

    Raises:
        MissingKeyError: both are.
        BatchError: the mask is not bool; the two differ in shape.
    """
    keys = [key for key in (loss_mask_key, log_prob_key) if key is not None and has_key(batch, key)]
    if not keys:
        raise MissingKeyError(
            f"tokens in the loss are counted by {loss_mask_key!r} (loss_mask_key) or {log_prob_key!r} "
            f"(log_prob_key); the batch has {key_names(batch)}"
        )
    if loss_mask_key in keys:
        check_mask(batch, loss_mask_key)
    if isinstance(batch, LazyStackedTensorDict):
        rows = zip(*(batch.get(key, as_list=True) for key in keys), strict=True)
        return torch.cat([_true_and_finite(columns, 1) for columns in rows])
    return _true_and_finite([batch.get(key) for key in keys], len(batch))


def _true_and_finite(columns: Sequence[Tensor], rows: int) -> Tensor:
    """(rows,) tokens that are True in all of the bool columns and finite in all others."""
    if len({column.numel() for column in columns}) > 1:
        shapes = [tuple(column.shape) for column in columns]
        raise BatchError(f"a token has one mask and one log-probability; found {shapes}")
    masks = [column for column in columns if column.dtype is torch.bool]
    numbers = [column for column in columns if column.dtype is not torch.bool]
    flags = [*masks, *(torch.isfinite(column) for column in numbers if not masks or not _all_finite(column))]
    inside = flags[0] if len(flags) == 1 else flags[0] & flags[1].view_as(flags[0])
    return count_true(inside.reshape(rows, inside.numel() // max(rows, 1)))


def _all_finite(column: Tensor) -> bool:
    """Whether all numbers are, where looking costs nothing more: a twentieth of what isfinite takes."""
    if column.device.type != "cpu" or column.numel() == 0:
        return False
    low, high = torch.aminmax(column)
    return bool(torch.isfinite(low) & torch.isfinite(high))

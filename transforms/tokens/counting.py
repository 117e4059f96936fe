"""How many tokens of a row are in a mask, and how many in the loss."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError, MissingKeyError
from headrace.transforms.once import once
from headrace.transforms.rows import flat_rows
from headrace.transforms.schema import LENGTH, has_key, key_names, require

from .per_token import check_mask

PROMPT, RESPONSE = ("tokens", "prompt"), ("tokens", "response")  # as TorchRL's wrappers write them
ATTENTION = ("masks", "all_attention_mask")
FEW = 4096  # entries that cost less than the calls by which they would be counted faster
MOST = 255  # bytes of 0 and 1 that can be added up before one of them overflows


def count_true(mask: Tensor) -> Tensor:
    """(N,) int64: the True entries of each row of a bool (N, ...).

    On the CPU eight bytes are added at a time, as one integer: PyTorch's own sum of bools takes sixty times
    as long. Elsewhere it is that sum, and nothing is read.

    Example:
        >>> count_true(torch.tensor([[True, False, True], [False, False, False]])).tolist()
        [2, 0]
    """
    rows = flat_rows(mask)
    if rows.device.type != "cpu":
        return rows.sum(-1)
    if rows.numel() <= FEW or rows.shape[1] < 8:
        return rows.count_nonzero(-1)
    width = rows.shape[1] // 8 * 8
    whole = rows[:, :width].reshape(-1)
    if whole.storage_offset() % 8:  # a row of a larger batch begins anywhere
        whole = whole.clone()
    words = whole.view(torch.uint8).view(torch.int64).view(len(rows), -1)
    if int(whole.view(torch.uint8).amax()) > 1:  # a True that is another byte than 1, of a view of other data
        return (rows != 0).sum(-1)
    total = rows[:, width:].sum(-1)
    for part in words.split(MOST, dim=1):
        total = total + part.sum(-1).view(torch.uint8).view(-1, 8).sum(-1)
    return total


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
    return once(count_true, mask)


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


def loss_tokens(batch: TensorDictBase, loss_mask_key: NestedKey, log_prob_key: NestedKey | None) -> Tensor:
    """(N,) int64: tokens in the loss, as TorchRL's GRPOLoss counts them: masked in, with a finite log-prob.

    Where there is no mask, the response is what trains, if the batch says where it is: ``("tokens",
    "prompt")`` and ``("tokens", "response")`` lie end to end under ``("masks", "all_attention_mask")``, as
    TorchRL's wrappers write them. Log-probabilities alone say nothing: those of a scored prompt are finite,
    too.

    Columns are dense (N, T) or ragged; the log-probabilities may be missing. No device read.

    Raises:
        MissingKeyError: nothing says which tokens train.
        BatchError: the mask is not bool; it differs in shape from the log-probabilities.
    """
    masked = has_key(batch, loss_mask_key)
    if not masked and not knows_response(batch):
        raise MissingKeyError(
            f"tokens in the loss are those of the mask {loss_mask_key!r} (loss_mask_key), or of a response "
            f"behind its prompt: {PROMPT!r} and {RESPONSE!r}, as wide together as {ATTENTION!r}. Finite "
            "log-probabilities do not say which tokens train: those of a scored prompt are finite, too. The "
            f"batch has {key_names(batch)}: write the mask, True where a token trains"
        )
    check_mask(batch, loss_mask_key if masked else ATTENTION)
    if log_prob_key is not None and not has_key(batch, log_prob_key):
        log_prob_key = None
    if isinstance(batch, LazyStackedTensorDict):
        return torch.cat([_count(row.unsqueeze(0), loss_mask_key, log_prob_key) for row in batch.tensordicts])
    return _count(batch, loss_mask_key, log_prob_key)


def knows_loss_tokens(batch: TensorDictBase, loss_mask_key: NestedKey) -> bool:
    """Whether the batch says which tokens are in the loss (:func:`loss_tokens`)."""
    return has_key(batch, loss_mask_key) or knows_response(batch)


def knows_response(batch: TensorDictBase) -> bool:
    """Whether the batch says which tokens are the response: prompt and response are as wide as the whole."""
    if not all(has_key(batch, key) for key in (PROMPT, RESPONSE, ATTENTION)):
        return False
    for part in batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]:
        columns = [part.get(key) for key in (PROMPT, RESPONSE, ATTENTION)]
        if not all(isinstance(column, Tensor) for column in columns):
            return False
        prompt, response, whole = (column.shape[-1] for column in columns)
        if prompt + response != whole:
            return False
    return True


def _count(part: TensorDictBase, loss_mask_key: NestedKey, log_prob_key: NestedKey | None) -> Tensor:
    """(N,) tokens that train and have a finite log-probability, of a dense batch."""
    mask = part.get(loss_mask_key, None)
    if mask is None:
        mask = part.get(ATTENTION).clone()
        mask[..., : part.get(PROMPT).shape[-1]] = False
    if log_prob_key is not None:
        log_prob = part.get(log_prob_key)
        if mask.numel() != log_prob.numel():
            raise BatchError(
                f"a token has one mask and one log-probability; found {loss_mask_key!r} (loss_mask_key) "
                f"{tuple(mask.shape)} and {log_prob_key!r} (log_prob_key) {tuple(log_prob.shape)}"
            )
        return once(_count_finite, mask, log_prob)
    return once(count_true, mask)


def _count_finite(mask: Tensor, log_prob: Tensor) -> Tensor:
    """(N,) int64: the True entries of each row whose number, at the same place, is finite.

    On the CPU rows are added up, a sixth of the cost of looking at every number: a sum is finite only where
    all of it are, and the few other rows that have a True are looked at.
    """
    mask_rows, rows = flat_rows(mask), flat_rows(log_prob)
    if log_prob.device.type != "cpu" or log_prob.numel() == 0:
        return count_true(mask_rows & torch.isfinite(rows))
    tokens = once(count_true, mask)
    odd = (~torch.isfinite(rows.sum(-1)) & (tokens > 0)).nonzero().flatten()
    if len(odd) == 0:
        return tokens
    return tokens.index_copy(0, odd, count_true(mask_rows[odd] & torch.isfinite(rows[odd])))

"""The rows of a micro-batch end to end, for attention over sequences of different length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.options import nested_key
from headrace.transforms.schema import has_key, require
from headrace.transforms.tokens import check_mask

TOKEN_KEYS: tuple[NestedKey, ...] = (
    ("tokens", "full"),
    ("masks", "all_attention_mask"),
    ("masks", "all_assistant_mask"),
    ("log_probs", "full"),
    ("next", "ref_log_probs", "full"),
)
ROW_KEYS: tuple[NestedKey, ...] = ("advantage", "loss_weight")


def pack(
    batch: TensorDictBase,
    *,
    token_keys: Sequence[NestedKey] = TOKEN_KEYS,
    row_keys: Sequence[NestedKey] = ROW_KEYS,
    tokens_key: NestedKey = ("tokens", "full"),
    attention_key: NestedKey = ("masks", "all_attention_mask"),
    loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
) -> TensorDict:
    """Lay rows end to end, without their padding. A loss summed by weight stays what it was.

    Args:
        batch: TensorDict ``[n]``, dense or a lazy stack of ragged rows.
        token_keys: per-token columns (n, T, ...), those that are there; they become (1, L, ...).
        row_keys: per-row columns that the loss reads per token, those that are there: (n,) becomes (1, L),
            (n, 1, 1) becomes (1, L, 1). A per-token (n, T, 1) is packed like `token_keys`.
        tokens_key: (n, T) int64.
        attention_key: (n, T) bool, True at real tokens; L is their number.
        loss_mask_key: (n, T) bool; False on each row's first token, before which there is nothing.

    Returns:
        TensorDict ``[1]`` with those columns under their own keys, and

        ================ ============== ==========================================================
        ``input_ids``    (1, L) int64   the tokens
        ``position_ids`` (1, L) int64   0, 1, … in each row
        ``segment_ids``  (1, L) int64   which row, from 0: a token sees those of its own row
        ``cu_seqlens``   (1, n+1) int32 where rows begin, and the end; variable-length attention takes [0]
        ``packed_at``    (1, L) int64   row · T + column, for :func:`unpack`
        ``packed_from``  (1, 2) int64   n and T
        ``rows``         [1, n]         all other columns
        ================ ============== ==========================================================

        A few device reads.

    Raises:
        MissingKeyError: tokens or attention mask are not there.
        BatchError: no rows; a row without a token, with a first token in the loss, or with one in the loss
            that is no real token.

    Example:
        >>> tokens = torch.tensor([[0, 5, 6], [7, 8, 9]])
        >>> masks = {"all_attention_mask": tokens > 0}
        >>> batch = TensorDict({"tokens": {"full": tokens}, "masks": masks}, batch_size=[2])
        >>> packed = pack(batch)
        >>> packed["input_ids"].tolist(), packed["cu_seqlens"].tolist()
        ([[5, 6, 7, 8, 9]], [[0, 2, 5]])
    """
    if len(batch) == 0:
        raise BatchError("a batch to pack has at least one row; got none")
    there = _columns(batch, attention_key, "attention_key")
    check_mask(batch, attention_key)
    width = max(len(mask) for mask in there)
    if isinstance(batch, LazyStackedTensorDict):
        at = torch.cat([mask.nonzero().flatten() + row * width for row, mask in enumerate(there)])
    else:
        at = batch.get(attention_key).reshape(-1).nonzero().flatten()
    segment = at // width
    counts = torch.bincount(segment, minlength=len(batch))
    ends = counts.cumsum(0)
    begins = ends - counts
    if bool((counts == 0).any()):
        empty = (counts == 0).nonzero().flatten().tolist()
        raise BatchError(f"every row needs a token; rows {empty[:10]} have none")
    if has_key(batch, loss_mask_key):
        _check_inside(_columns(batch, loss_mask_key, "loss_mask_key"), there)
        _check_first(_lay(batch, loss_mask_key, there, at, width)[0], begins)

    keys = [nested_key(key) for key in token_keys]
    packed = TensorDict({}, batch_size=[1], device=batch.device)
    for key in [key for key in keys if has_key(batch, key)]:
        packed.set(key, _lay(batch, key, there, at, width))
    spread = [nested_key(key) for key in row_keys]
    for key in [key for key in spread if has_key(batch, key)]:
        packed.set(key, _spread(batch, key, there, at, segment, width))
    rest = batch.exclude(*keys, *spread)
    packed.set("rows", rest.unsqueeze(0))
    packed.set("input_ids", _lay(batch, tokens_key, there, at, width))
    packed.set("position_ids", (torch.arange(len(at), device=at.device) - begins[segment]).unsqueeze(0))
    packed.set("segment_ids", segment.unsqueeze(0))
    packed.set("cu_seqlens", torch.cat([ends.new_zeros(1), ends]).to(torch.int32).unsqueeze(0))
    packed.set("packed_at", at.unsqueeze(0))
    return packed.set("packed_from", torch.tensor([[len(batch), width]], device=at.device))


def unpack(packed: TensorDictBase) -> TensorDict:
    """The rows that were packed, (n, T); what was padding is 0 or False. One device read.

    Ragged rows come back as dense ones, padded on the right.

    Args:
        packed: TensorDict ``[1]``, as :func:`pack` returns it.

    Returns:
        TensorDict ``[n]``; a per-row column that was spread over tokens, such as the advantage, comes back
        per token.

    Raises:
        MissingKeyError: it was not packed.

    Example:
        >>> tokens = torch.tensor([[0, 5, 6], [7, 8, 9]])
        >>> masks = {"all_attention_mask": tokens > 0}
        >>> batch = TensorDict({"tokens": {"full": tokens}, "masks": masks}, batch_size=[2])
        >>> unpack(pack(batch))["tokens", "full"].tolist()
        [[0, 5, 6], [7, 8, 9]]
    """
    own = ("rows", "input_ids", "position_ids", "segment_ids", "cu_seqlens", "packed_at", "packed_from")
    rows = require(packed, "rows", reader="unpack", option="written by pack").squeeze(0)
    out = rows.clone(recurse=False)
    for key in packed.exclude(*own).keys(include_nested=True, leaves_only=True):
        out.set(key, unpack_tokens(packed.get(key), packed))
    return out


def unpack_tokens(values: Tensor, packed: TensorDictBase) -> Tensor:
    """Per-token values of packed rows, such as a model's log-probabilities, back in rows.

    Args:
        values: (1, L, ...).
        packed: TensorDict ``[1]``, as :func:`pack` returns it.

    Returns:
        (n, T, ...), 0 or False where there was padding.

    Example:
        >>> at, size = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3]])
        >>> packed = TensorDict({"packed_at": at, "packed_from": size}, batch_size=[1])
        >>> unpack_tokens(torch.tensor([[0.5, 0.25, 1.0]]), packed).tolist()
        [[0.0, 0.5, 0.25], [1.0, 0.0, 0.0]]
    """
    at = require(packed, "packed_at", reader="unpack_tokens", option="written by pack")[0]
    rows, width = packed.get("packed_from")[0].tolist()
    flat = values.new_zeros(rows * width, *values.shape[2:])
    return flat.index_copy(0, at, values[0]).view(rows, width, *values.shape[2:])


def _columns(batch: TensorDictBase, key: NestedKey, option: str) -> list[Tensor]:
    """A per-token column, row by row."""
    if isinstance(batch, LazyStackedTensorDict) and has_key(batch, key):
        return list(batch.get(key, as_list=True))
    return list(require(batch, key, reader="pack", option=option).unbind(0))


def _lay(batch: TensorDictBase, key: NestedKey, there: list[Tensor], at: Tensor, width: int) -> Tensor:
    if isinstance(batch, LazyStackedTensorDict):
        rows = zip(batch.get(key, as_list=True), there, strict=True)
        return torch.cat([row[mask] for row, mask in rows]).unsqueeze(0)
    value = require(batch, key, reader="pack", option="token_keys")
    if value.ndim < 2 or value.shape[1] != width:
        raise BatchError(
            f"a per-token column is ({len(batch)}, {width}, ...), as wide as the attention mask; {key!r} is "
            f"{tuple(value.shape)}: leave it out of token_keys to keep it per row"
        )
    return value.flatten(0, 1).index_select(0, at).unsqueeze(0)


def _spread(
    batch: TensorDictBase, key: NestedKey, there: list[Tensor], at: Tensor, segment: Tensor, width: int
) -> Tensor:
    if isinstance(batch, LazyStackedTensorDict):
        values = batch.get(key, as_list=True)
        if any(value.numel() > 1 for value in values):
            return _lay(batch, key, there, at, width)
        column = torch.stack(list(values))
    else:
        column = batch.get(key)
        if column.numel() != len(batch):
            return _lay(batch, key, there, at, width)
    per_token = column.reshape(-1).index_select(0, segment)
    return per_token.view(1, -1, *[1] * max(column.ndim - 2, 0))


def _check_first(loss_mask: Tensor, begins: Tensor) -> None:
    rows = loss_mask.index_select(0, begins).nonzero().flatten().tolist()
    if rows:
        raise BatchError(
            "a row's first token has nothing before it to predict it from; it is in the loss in rows "
            f"{rows[:10]}: take it out of the loss mask"
        )


def _check_inside(loss_mask: list[Tensor], there: list[Tensor]) -> None:
    pairs = enumerate(zip(loss_mask, there, strict=True))
    rows = [row for row, (loss, real) in pairs if loss.shape != real.shape or bool((loss & ~real).any())]
    if rows:
        raise BatchError(
            f"a token in the loss is a real one; in rows {rows[:10]} the loss mask has another shape than "
            "the attention mask, or is True where that is False, and packing would drop those tokens"
        )

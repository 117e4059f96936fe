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

from .padding import check_dtype

TOKEN_KEYS: tuple[NestedKey, ...] = (
    ("tokens", "full"),
    ("masks", "all_attention_mask"),
    ("masks", "all_assistant_mask"),
    ("log_probs", "full"),
    ("old_log_probs", "full"),
    "importance_weight",
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
        ``packed_from``  no tensor      n and T, of which :func:`unpack` makes shapes without a read
        ``rows``         [1, n]         all other columns
        ================ ============== ==========================================================

        Two device reads, of any number of rows, dense or ragged: the number of real tokens, and whether all
        is well.

    Raises:
        MissingKeyError: tokens or attention mask are not there.
        BatchError: no rows; a row without a token, with a first token in the loss, or with one in the loss
            that is no real token; a mask that is not bool; a per-token column of another width.

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
    real, shapes = _end_to_end(batch, attention_key, "attention_key")
    check_mask(batch, attention_key)
    real, sizes = real.reshape(-1), [shape.numel() for shape in shapes]
    at = real.nonzero().flatten()  # the first read: how many
    packed_at = _places(at, sizes)
    segment = packed_at // max(sizes)
    begins = torch.searchsorted(segment, torch.arange(len(batch) + 1, device=at.device))
    position = torch.arange(len(at), device=at.device) - begins.index_select(0, segment)

    wrong = [begins.diff() == 0]
    if has_key(batch, loss_mask_key):
        loss, found = _end_to_end(batch, loss_mask_key, "loss_mask_key")
        check_mask(batch, loss_mask_key)
        if odd := [row for row, shape in enumerate(found) if shape != shapes[row]]:
            raise _outside(odd)
        loss = loss.reshape(-1)
        wrong += [loss & ~real, loss.index_select(0, at) & (position == 0)]
    if bool(torch.stack([each.any() for each in wrong]).any()):  # the second
        _explain(sizes, segment, *wrong)

    keys, spread = ([nested_key(key) for key in each] for each in (token_keys, row_keys))
    packed = TensorDict({}, batch_size=[1], device=batch.device)
    for key in [key for key in keys if has_key(batch, key)]:
        packed.set(key, _lay(batch, key, sizes, at))
    for key in [key for key in spread if has_key(batch, key)]:
        packed.set(key, _lay(batch, key, sizes, at, segment))
    packed.set("rows", batch.exclude(*keys, *spread).unsqueeze(0))
    packed.set("input_ids", _lay(batch, tokens_key, sizes, at))
    packed.set("position_ids", position.unsqueeze(0))
    packed.set("segment_ids", segment.unsqueeze(0))
    packed.set("cu_seqlens", begins.to(torch.int32).unsqueeze(0))
    packed.set("packed_at", packed_at.unsqueeze(0))
    return packed.set_non_tensor("packed_from", (len(batch), max(sizes)))


def unpack(packed: TensorDictBase) -> TensorDict:
    """The rows that were packed, (n, T); what was padding is 0 or False. No device read.

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
    """Per-token values of packed rows, such as a model's log-probabilities, back in rows. No device read.

    Args:
        values: (1, L, ...).
        packed: TensorDict ``[1]``, as :func:`pack` returns it.

    Returns:
        (n, T, ...), 0 or False where there was padding.

    Example:
        >>> tokens = torch.tensor([[0, 5, 6], [7, 0, 0]])
        >>> masks = {"all_attention_mask": tokens > 0}
        >>> packed = pack(TensorDict({"tokens": {"full": tokens}, "masks": masks}, batch_size=[2]))
        >>> unpack_tokens(torch.tensor([[0.5, 0.25, 1.0]]), packed).tolist()
        [[0.0, 0.5, 0.25], [1.0, 0.0, 0.0]]
    """
    at = require(packed, "packed_at", reader="unpack_tokens", option="written by pack")[0]
    rows, width = packed["packed_from"]
    flat = values.new_zeros(rows * width, *values.shape[2:])
    return flat.index_copy(0, at, values[0]).view(rows, width, *values.shape[2:])


def _end_to_end(batch: TensorDictBase, key: NestedKey, option: str) -> tuple[Tensor, list[torch.Size]]:
    """A column with one row behind the other, padding included, and the shapes of its rows."""
    if isinstance(batch, LazyStackedTensorDict) and has_key(batch, key):
        rows = batch.get(key, as_list=True)
        check_dtype(rows)
        return torch.cat(torch.atleast_1d(rows)), [row.shape for row in rows]
    column = require(batch, key, reader="pack", option=option)
    return column.reshape(-1, *column.shape[2:]), [column.shape[1:]] * len(batch)


def _places(at: Tensor, sizes: list[int]) -> Tensor:
    """Entries of rows end to end, numbered as if all rows were as wide as the widest."""
    width = max(sizes)
    if min(sizes) == width:
        return at
    # A kernel a row, and no wait: a list of sizes would have to be copied to the device.
    rows = [torch.arange(row * width, row * width + size, device=at.device) for row, size in enumerate(sizes)]
    return torch.cat(rows).index_select(0, at)


def _lay(
    batch: TensorDictBase, key: NestedKey, sizes: list[int], at: Tensor, segment: Tensor | None = None
) -> Tensor:
    """(1, L, ...) of what is per token or, where a segment is given, one number a row."""
    column, shapes = _end_to_end(batch, key, "tokens_key")
    if segment is not None and all(shape.numel() == 1 for shape in shapes):
        return column.reshape(-1).index_select(0, segment).view(1, -1, *[1] * (len(shapes[0]) - 1))
    for row, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        if shape[:1] != (size,):
            raise BatchError(
                f"a per-token column is ({len(batch)}, {size}, ...), as wide as the attention mask; {key!r} "
                f"is {(len(batch), *shape)} at row {row}: leave it out of token_keys to keep it per row"
            )
    return column.index_select(0, at).unsqueeze(0)


def _outside(rows: list[int]) -> BatchError:
    return BatchError(
        f"a token in the loss is a real one; in rows {rows[:10]} the loss mask has another shape than "
        "the attention mask, or is True where that is False, and packing would drop those tokens"
    )


def _explain(sizes: list[int], segment: Tensor, empty: Tensor, *in_loss: Tensor) -> None:
    """Raise for the first fault, with the rows. Reads as often as it takes."""
    rows = empty.nonzero().flatten().tolist()
    if rows:
        raise BatchError(f"every row needs a token; rows {rows[:10]} have none")
    outside, first = in_loss
    rows = [row for row, entries in enumerate(outside.split(sizes)) if bool(entries.any())]
    if rows:
        raise _outside(rows)
    raise BatchError(
        "a row's first token has nothing before it to predict it from; it is in the loss in rows "
        f"{segment[first].tolist()[:10]}: take it out of the loss mask"
    )

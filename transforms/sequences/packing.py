"""The rows of a micro-batch end to end, for attention over sequences of different length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.options import nested_key
from headrace.transforms.prefixes import repeated
from headrace.transforms.schema import TOKEN_WEIGHT, has_key, require
from headrace.transforms.tensordicts import (
    as_data,
    column_of,
    entries_of,
    of_columns,
    parts_of,
    send_packed,
    shallow_copy,
    write_entry,
)
from headrace.transforms.tokens import check_mask

from .prefix_tree import tree_columns

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
OWN = ("rows", "input_ids", "position_ids", "segment_ids", "cu_seqlens", "packed_at", "packed_from")
OWN_OF_TREE = ("tree_start", "tree_end", "tree_parent", "packed_node")


def pack(
    batch: TensorDictBase,
    *,
    tree: bool = False,
    token_keys: Sequence[NestedKey] = TOKEN_KEYS,
    row_keys: Sequence[NestedKey] = ROW_KEYS,
    input_keys: Sequence[NestedKey] = (),
    row_input_keys: Sequence[NestedKey] = (),
    tokens_key: NestedKey = ("tokens", "full"),
    attention_key: NestedKey = ("masks", "all_attention_mask"),
    loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
) -> TensorDict:
    """Lay rows end to end, without their padding. A loss summed by weight stays what it was.

    As a `tree`, tokens that rows share go through the model once: equal ones at equal places, with all before
    them equal, too (:func:`~headrace.transforms.sequences.prefix_tree.prefix_tree`). What goes into the loss
    stays that of the rows. The model needs a mask, :func:`tree_mask` or :func:`tree_mask_mod`, and what it
    says of its nodes comes back to the rows by :func:`unpack_tokens`.

    Args:
        batch: TensorDict ``[n]``, dense or a lazy stack of ragged rows.
        tree: whether tokens that rows share are one.
        token_keys: per-token columns (n, T, ...), those that are there; they become (1, L, ...).
        row_keys: per-row columns that the loss reads per token, those that are there: (n,) becomes (1, L),
            (n, 1, 1) becomes (1, L, 1). A per-token (n, T, 1) is packed like `token_keys`.
        input_keys: per-token columns (n, T, ...) that the model reads beside the tokens: they become (1, L,
            ...), of a tree (1, M, ...), and rows share only tokens that agree in them to the bit.
        row_input_keys: columns of any shape that it reads per row, such as images, tensors in every row: of a
            tree, rows share tokens only if they agree in them to the bit. They stay among the ``rows``.
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

        Of a tree with M nodes, in depth-first order, these are in place of the first three, or more:

        ================ ============== ==========================================================
        ``input_ids``    (1, M) int64   the tokens
        ``position_ids`` (1, M) int64   the depth, 0 at a root: the place in each row that has it
        ``segment_ids``  (1, M) int64   which tree, from 0: those with one first token are one
        ``tree_start``   (1, M) int64   token q sees k if and only if
        ``tree_end``     (1, M) int64   ``start[k] <= start[q] < end[k]``
        ``tree_parent``  (1, M) int64   the node of the token before; −1 at a root
        ``packed_node``  (1, L) int64   the node of each token of the rows
        ================ ============== ==========================================================

        Its ``cu_seqlens`` is of the L tokens of the rows, and nothing for attention over nodes.

        Two device reads, of any number of rows, dense or ragged: the number of real tokens, and whether all
        is well; of a tree a third, the tokens, since rows are sorted on the host. Ragged lengths and the
        nodes of a tree are sent to the device, by a copy each.

    Raises:
        MissingKeyError: tokens or attention mask are not there.
        BatchError: no rows; a row without a token, with a first token in the loss, or with one in the loss
            that is no real token; a mask that is not bool; a per-token column of another width; an input that
            is no tensor, by which rows could be compared.

    Example:
        >>> tokens = torch.tensor([[0, 5, 6], [7, 8, 9]])
        >>> masks = {"all_attention_mask": tokens > 0}
        >>> batch = TensorDict({"tokens": {"full": tokens}, "masks": masks}, batch_size=[2])
        >>> packed = pack(batch)
        >>> packed["input_ids"].tolist(), packed["cu_seqlens"].tolist()
        ([[5, 6, 7, 8, 9]], [[0, 2, 5]])
        >>> batch["tokens", "full"] = torch.tensor([[0, 5, 6], [5, 8, 9]])
        >>> packed = pack(batch, tree=True)
        >>> packed["input_ids"].tolist(), packed["tree_end"].tolist(), packed["packed_node"].tolist()
        ([[5, 6, 8, 9]], [[4, 2, 4, 4]], [[0, 1, 0, 2, 3]])
    """
    if len(batch) == 0:
        raise BatchError("a batch to pack has at least one row; got none")
    attention = _column(batch, attention_key, "attention_key")
    check_mask(batch, attention_key)
    shapes = _shapes(attention)
    sizes = [shape.numel() for shape in shapes]
    real, width = _end_to_end(attention).reshape(-1), max(sizes)
    at = packed_at = real.nonzero().flatten()  # the first read: how many
    if min(sizes) < width:
        size = torch.tensor(sizes)
        moved = repeated(torch.arange(len(sizes)) * width - size.cumsum(0) + size, size)
        packed_at = at + send_packed([moved], at.device)[0].index_select(0, at)
    segment = packed_at // width
    begins = torch.searchsorted(segment, torch.arange(len(batch) + 1, device=at.device))
    position = torch.arange(len(at), device=at.device) - begins.index_select(0, segment)

    wrong = [begins.diff() == 0]
    if (loss_mask := _column(batch, loss_mask_key)) is not None:
        check_mask(batch, loss_mask_key)
        if (found := _shapes(loss_mask)) != shapes:
            raise _outside([row for row, shape in enumerate(found) if shape != shapes[row]])
        loss = _end_to_end(loss_mask).reshape(-1)
        wrong += [loss & ~real, loss.index_select(0, at) & (position == 0)]
    if bool(torch.stack([each.any() for each in wrong]).any()):  # the second
        _explain(sizes, segment, *wrong)

    inputs = {key: _column(batch, key, "input_keys") for key in map(nested_key, input_keys)}
    keys, spread = (
        {key: column for key in map(nested_key, each) if (column := _column(batch, key)) is not None}
        for each in ((*token_keys, TOKEN_WEIGHT), row_keys)
    )
    keys |= {} if tree else inputs
    if taken := [key for key in (*keys, *inputs) if key in (*OWN, *OWN_OF_TREE)]:
        raise BatchError(f"pack writes {taken} itself: give the rows' own column another name")
    if both := [key for key in inputs if tree and key in keys]:
        raise BatchError(
            f"{both} are in token_keys, of the rows' tokens, and in input_keys, of a tree's nodes: name "
            "them in one"
        )
    columns = {key: _lay(column, key, sizes, at) for key, column in keys.items()}
    columns |= {key: _lay(column, key, sizes, at, segment) for key, column in spread.items()}
    columns["rows"] = _as_one(batch.exclude(*columns))
    columns["cu_seqlens"] = begins.to(torch.int32).unsqueeze(0)
    columns["packed_at"] = packed_at.unsqueeze(0)
    tokens = _lay(_column(batch, tokens_key, "tokens_key"), tokens_key, sizes, at)
    own = {"input_ids": tokens, "position_ids": position[None], "segment_ids": segment[None]}
    if tree:
        given = {key: _lay(column, key, sizes, at) for key, column in inputs.items()}
        whole = {key: _values(batch, key) for key in map(nested_key, row_input_keys)}
        own = tree_columns(own, given, whole, (len(batch), width))
    packed = of_columns({"packed_from": as_data((len(batch), width), [1], batch.device)}, [1], batch.device)
    for key, column in (columns | own).items():
        write_entry(packed, key, column)
    return packed


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
    rows = require(packed, "rows", reader="unpack", option="written by pack").squeeze(0)
    out = shallow_copy(rows)
    for key in packed.exclude(*OWN, *OWN_OF_TREE).keys(include_nested=True, leaves_only=True):
        if not has_key(rows, key):  # as inputs of a tree are, whose column here is of its nodes
            out.set(key, _in_rows(packed.get(key)[0], packed))
    return out


def unpack_tokens(values: Tensor, packed: TensorDictBase) -> Tensor:
    """Per-token values of packed rows, such as a model's log-probabilities, back in rows. No device read.

    Args:
        values: (1, L, ...), or of a tree (1, M, ...): what is said of a node goes to all rows that have it.
        packed: TensorDict ``[1]``, as :func:`pack` returns it.

    Returns:
        (n, T, ...), 0 or False where there was padding.

    Raises:
        MissingKeyError: it was not packed.
        BatchError: the values are of another number of tokens, or nodes.

    Example:
        >>> tokens = torch.tensor([[0, 5, 6], [7, 0, 0]])
        >>> masks = {"all_attention_mask": tokens > 0}
        >>> packed = pack(TensorDict({"tokens": {"full": tokens}, "masks": masks}, batch_size=[2]))
        >>> unpack_tokens(torch.tensor([[0.5, 0.25, 1.0]]), packed).tolist()
        [[0.0, 0.5, 0.25], [1.0, 0.0, 0.0]]
    """
    size = require(packed, "input_ids", reader="unpack_tokens", option="written by pack").shape[1]
    if values.shape[:2] != (1, size):
        what = "nodes of a tree" if has_key(packed, "packed_node") else "tokens"
        raise BatchError(
            f"what is unpacked is (1, {size}, ...), of the {size} {what} that the model sees; got "
            f"{tuple(values.shape)}. The packed columns themselves come back by unpack"
        )
    found = values[0]
    if has_key(packed, "packed_node"):
        found = found.index_select(0, packed["packed_node"][0])
    return _in_rows(found, packed)


def _in_rows(values: Tensor, packed: TensorDictBase) -> Tensor:
    """(n, T, ...) of (L, ...)."""
    at = require(packed, "packed_at", reader="unpack", option="written by pack")[0]
    rows, width = packed["packed_from"]
    flat = values.new_zeros(rows * width, *values.shape[1:])
    return flat.index_copy_(0, at, values).view(rows, width, *values.shape[1:])


def _as_one(rows: TensorDictBase) -> TensorDictBase:
    """``rows.unsqueeze(0)``, in a tenth of its time."""
    if type(rows) is not TensorDict or rows._has_names():
        return rows.unsqueeze(0)
    columns = {
        key: value.unsqueeze(0) if isinstance(value, Tensor) else _as_one(value)
        for key, value in rows.items()
    }
    return of_columns(columns, [1, *rows.batch_size], rows.device)


def _values(batch: TensorDictBase, key: NestedKey) -> Tensor | list[Tensor]:
    """What is under a key, (n, ...), or row by row."""
    parts = parts_of(batch, key) or [require(batch, key, reader="pack", option="row_input_keys")]
    if not all(isinstance(part, Tensor) for part in parts):
        raise BatchError(
            f"rows share tokens only if their inputs are equal, and {key!r} is no tensor that could be "
            "compared: give rows a column of numbers that differ where the inputs do, and name that in "
            "row_input_keys"
        )
    return parts if isinstance(batch, LazyStackedTensorDict) else parts[0]


def _column(batch: TensorDictBase, key: NestedKey, option: str = "") -> Any:
    """A column, dense or row by row; None where there is none, unless an option asks for it."""
    ragged = isinstance(batch, LazyStackedTensorDict)
    column = entries_of(batch, key) if ragged else column_of(batch, key)
    return require(batch, key, reader="pack", option=option) if column is None and option else column


def _shapes(column: Tensor | list[Tensor]) -> list[torch.Size]:
    """Of each row."""
    return [column.shape[1:]] * len(column) if isinstance(column, Tensor) else [row.shape for row in column]


def _end_to_end(column: Tensor | list[Tensor]) -> Tensor:
    """One row behind the other, padding included."""
    if isinstance(column, Tensor):
        return column.reshape(-1, *column.shape[2:])
    if len(dtypes := {row.dtype for row in column}) > 1:
        found = listing(sorted(map(str, dtypes)))  # some of which torch would cast
        raise BatchError(f"a per-token column has one dtype; found {found}")
    return torch.cat([row if row.ndim else row.view(1) for row in column])


def _lay(
    column: Tensor | list[Tensor], key: NestedKey, sizes: list[int], at: Tensor, segment: Tensor | None = None
) -> Tensor:
    """(1, L, ...) of what is per token or, where a segment is given, one number a row."""
    flat, shapes = _end_to_end(column), _shapes(column)
    if segment is not None and flat.numel() == len(sizes) and all(shape.numel() == 1 for shape in shapes):
        return flat.reshape(-1).index_select(0, segment).view(1, -1, *[1] * (len(shapes[0]) - 1))
    for row, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        if shape[:1] != (size,):
            raise BatchError(
                f"a per-token column is ({len(sizes)}, {size}, ...), as wide as the attention mask; {key!r} "
                f"is {(len(sizes), *shape)} at row {row}: leave it out of token_keys to keep it per row"
            )
        if isinstance(column, Tensor):
            break  # all are as the first
    return flat.index_select(0, at).unsqueeze(0)


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

"""Pack the rows of a micro-batch end to end, for variable-length attention or attention over a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms.table import BatchError, listing
from headrace.transforms.table.options import nested_key
from headrace.transforms.table.schema import LOSS_WEIGHTS, TOKEN_WEIGHT, component_names, has_key, require
from headrace.transforms.table.tensordicts import (
    as_data,
    column_of,
    entries_of,
    of_columns,
    parts_of,
    send_packed,
    shallow_copy,
    write_entry,
)
from headrace.transforms.table.tokens import check_mask

from .words import repeated

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
    """Pack rows end to end, without padding. The weighted sum of a token loss is unchanged.

    With `tree`, tokens of common prefixes go through the model once
    (:func:`~headrace.transforms.trees.prefix_tree.prefix_tree`). The columns of the loss remain those of
    the rows. The model needs the mask of :func:`tree_mask` or :func:`tree_mask_mod`. :func:`unpack_tokens`
    copies the model's outputs from nodes to rows.

    Args:
        batch: TensorDict ``[n]``, dense or a lazy stack of ragged rows.
        tree: whether rows share the tokens of common prefixes.
        token_keys: per-token columns (n, T, ...); they become (1, L, ...). Missing ones are skipped.
        row_keys: per-row columns that the loss reads per token: (n,) becomes (1, L), and (n, 1, 1) becomes
            (1, L, 1). A per-token column (n, T, 1) is packed like `token_keys`. Missing ones are skipped.
        input_keys: further per-token inputs of the model, (n, T, ...); they become (1, L, ...), or (1, M,
            ...) with a tree. Rows share only tokens with equal inputs, bit for bit.
        row_input_keys: per-row inputs of the model, such as images: tensors of any shape. With a tree, rows
            share tokens only if these inputs are equal, bit for bit. The inputs remain in ``rows``.
        tokens_key: (n, T) int64.
        attention_key: (n, T) bool, True at real tokens; L is their number.
        loss_mask_key: (n, T) bool, False on the first token of each row, which has no context.

    Returns:
        TensorDict ``[1]`` with these columns under their own keys, and

        ================ ============== ==========================================================
        ``input_ids``    (1, L) int64   the tokens
        ``position_ids`` (1, L) int64   0, 1, … in each row
        ``segment_ids``  (1, L) int64   the row, from 0; a token attends only to tokens of its row
        ``cu_seqlens``   (1, n+1) int32 where rows begin, and the end; variable-length attention takes [0]
        ``packed_at``    (1, L) int64   row · T + column, for :func:`unpack`
        ``packed_from``  no tensor      n and T, so that :func:`unpack` needs no device read
        ``rows``         [1, n]         all other columns
        ================ ============== ==========================================================

        With a tree of M nodes, in depth-first order, these columns replace the first three or are added:

        ================ ============== ==========================================================
        ``input_ids``    (1, M) int64   the tokens
        ``position_ids`` (1, M) int64   the depth, 0 at a root: the position in each row with this node
        ``segment_ids``  (1, M) int64   the tree, from 0; rows with the same first token are one tree
        ``tree_start``   (1, M) int64   token q attends to k if and only if
        ``tree_end``     (1, M) int64   ``start[k] <= start[q] < end[k]``
        ``tree_parent``  (1, M) int64   the node of the token before; −1 at a root
        ``packed_node``  (1, L) int64   the node of each token of the rows
        ================ ============== ==========================================================

        With a tree, ``cu_seqlens`` covers the L tokens of the rows, not the nodes.

        There are two device reads for any number of rows: the number of real tokens, and the result of the
        checks. A tree needs a third read, of the tokens, because rows are sorted on the CPU. Ragged lengths
        and the nodes of a tree are sent to the device with one copy each.

    Raises:
        MissingKeyError: tokens or attention mask are missing.
        BatchError: the batch has no rows; a row has no token, has its first token in the loss, or has
            padding in the loss; a mask is not bool; a per-token column has another width; or an input is
            not a tensor.

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
        raise BatchError("a batch to pack needs at least one row; got none")
    attention = _column(batch, attention_key, "attention_key")
    check_mask(batch, attention_key)
    shapes = _shapes(attention)
    sizes = [shape.numel() for shape in shapes]
    real, width = _end_to_end(attention).reshape(-1), max(sizes)
    at = packed_at = real.nonzero().flatten()  # the first device read
    if min(sizes) < width:  # `at` counts in rows of different widths, `unpack` in rows of one width
        size = torch.tensor(sizes)
        moved = repeated(torch.arange(len(sizes)) * width - size.cumsum(0) + size, size)
        packed_at = at + send_packed([moved], at.device)[0].index_select(0, at)
    segment = packed_at // width
    begins = torch.searchsorted(segment, torch.arange(len(batch) + 1, device=at.device))
    position = torch.arange(len(at), device=at.device) - begins.index_select(0, segment)

    loss, weights = torch.zeros_like(real), [(LOSS_WEIGHTS, name) for name in component_names(batch)]
    if (loss_mask := _column(batch, loss_mask_key)) is not None:
        check_mask(batch, loss_mask_key)
        if (found := _shapes(loss_mask)) != shapes:
            raise _outside([row for row, shape in enumerate(found) if shape != shapes[row]])
        loss = _end_to_end(loss_mask).reshape(-1)
    for key in weights:
        loss = loss | (_end_to_end(_column(batch, key)).reshape(-1) != 0)
    wrong = [begins.diff() == 0, loss & ~real, loss.index_select(0, at) & (position == 0)]
    if bool(torch.stack([flags.any() for flags in wrong]).any()):  # the second device read
        _explain(sizes, segment, *wrong)

    inputs = {key: _column(batch, key, "input_keys") for key in map(nested_key, input_keys)}
    keys, spread = (
        {key: column for key in map(nested_key, each) if (column := _column(batch, key)) is not None}
        for each in ((*token_keys, TOKEN_WEIGHT, *weights), row_keys)
    )
    keys |= {} if tree else inputs
    if taken := [key for key in (*keys, *inputs) if key in (*OWN, *OWN_OF_TREE)]:
        raise BatchError(f"pack writes the columns {taken}: rename those of your rows")
    if both := [key for key in inputs if tree and key in keys]:
        raise BatchError(
            f"{both} are in token_keys, which are packed per token, and in input_keys, which are packed per "
            "node of a tree: name each only once"
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
        from headrace.transforms.trees import tree_columns  # only a tree needs this import

        own = tree_columns(own, given, whole, (len(batch), width))
    packed = of_columns({"packed_from": as_data((len(batch), width), [1], batch.device)}, [1], batch.device)
    for key, column in (columns | own).items():
        write_entry(packed, key, column)
    return packed


def unpack(packed: TensorDictBase) -> TensorDict:
    """Restore packed rows as dense rows, (n, T), with 0 or False as padding. No device read.

    Ragged rows become dense rows, padded on the right.

    Args:
        packed: TensorDict ``[1]``, the output of :func:`pack`.

    Returns:
        TensorDict ``[n]``. Per-row columns that were repeated for each token, such as the advantage, are per
        token.

    Raises:
        MissingKeyError: `packed` is not an output of :func:`pack`.

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
        if not has_key(rows, key):  # inputs of a tree are in `rows`; their packed columns are per node
            out.set(key, _in_rows(packed.get(key).squeeze(0), packed))
    return out


def unpack_tokens(values: Tensor, packed: TensorDictBase) -> Tensor:
    """Unpack per-token values, such as a model's log-probabilities, to rows. No device read.

    Args:
        values: (1, L, ...), or (1, M, ...) for a tree: the value of a node is copied to all rows with it.
        packed: TensorDict ``[1]``, the output of :func:`pack`.

    Returns:
        (n, T, ...), 0 or False at padding.

    Raises:
        MissingKeyError: `packed` is not an output of :func:`pack`.
        BatchError: the values have another number of tokens or nodes.

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
            f"values must be (1, {size}, ...), for the {size} {what} that the model sees; got "
            f"{tuple(values.shape)}. To restore the packed columns use unpack"
        )
    found = values.squeeze(0)
    if has_key(packed, "packed_node"):
        found = found.index_select(0, packed["packed_node"].squeeze(0))
    return _in_rows(found, packed)


def _in_rows(values: Tensor, packed: TensorDictBase) -> Tensor:
    """Unpack (L, ...) values to (n, T, ...)."""
    at = require(packed, "packed_at", reader="unpack", option="written by pack").squeeze(0)
    rows, width = packed["packed_from"]
    flat = values.new_zeros(rows * width, *values.shape[1:])
    return flat.index_copy_(0, at, values).view(rows, width, *values.shape[1:])


def _as_one(rows: TensorDictBase) -> TensorDictBase:
    """Compute ``rows.unsqueeze(0)``, ten times faster."""
    if type(rows) is not TensorDict or rows._has_names():
        return rows.unsqueeze(0)
    columns = {
        key: value.unsqueeze(0) if isinstance(value, Tensor) else _as_one(value)
        for key, value in rows.items()
    }
    return of_columns(columns, [1, *rows.batch_size], rows.device)


def _values(batch: TensorDictBase, key: NestedKey) -> Tensor | list[Tensor]:
    """The values of a key, (n, ...), or a list by row."""
    parts = parts_of(batch, key) or [require(batch, key, reader="pack", option="row_input_keys")]
    if not all(isinstance(part, Tensor) for part in parts):
        raise BatchError(
            f"rows share tokens only if their inputs are equal, and {key!r} is no tensor, so it cannot be "
            "compared: add a column of numbers that differ if the inputs differ, and name it in "
            "row_input_keys"
        )
    return parts if isinstance(batch, LazyStackedTensorDict) else parts[0]


def _column(batch: TensorDictBase, key: NestedKey, option: str = "") -> Any:
    """A column, dense or a list by row; None if it is missing, or an error if an option requires it."""
    ragged = isinstance(batch, LazyStackedTensorDict)
    column = entries_of(batch, key) if ragged else column_of(batch, key)
    return require(batch, key, reader="pack", option=option) if column is None and option else column


def _shapes(column: Tensor | list[Tensor]) -> list[torch.Size]:
    """The shape of each row."""
    return [column.shape[1:]] * len(column) if isinstance(column, Tensor) else [row.shape for row in column]


def _end_to_end(column: Tensor | list[Tensor]) -> Tensor:
    """Join the rows, with their padding."""
    if isinstance(column, Tensor):
        return column.reshape(-1, *column.shape[2:])
    if len(dtypes := {row.dtype for row in column}) > 1:
        found = listing(sorted(map(str, dtypes)))  # torch.cat would cast some of these silently
        raise BatchError(f"a per-token column must have one dtype; found {found}")
    return torch.cat([row if row.ndim else row.view(1) for row in column])


def _lay(
    column: Tensor | list[Tensor], key: NestedKey, sizes: list[int], at: Tensor, segment: Tensor | None = None
) -> Tensor:
    """Pack a per-token column to (1, L, ...); with `segment`, a column with one number per row."""
    flat, shapes = _end_to_end(column), _shapes(column)
    if segment is not None and flat.numel() == len(sizes) and all(shape.numel() == 1 for shape in shapes):
        return flat.reshape(-1).index_select(0, segment).view(1, -1, *[1] * (len(shapes[0]) - 1))
    for row, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        if shape[:1] != (size,):
            raise BatchError(
                f"a per-token column must be ({len(sizes)}, {size}, ...), as wide as the attention mask; "
                f"{key!r} is {(len(sizes), *shape)} at row {row}: remove it from token_keys"
            )
        if isinstance(column, Tensor):
            break  # all rows have the shape of the first
    return flat.index_select(0, at).unsqueeze(0)


def _outside(rows: list[int]) -> BatchError:
    return BatchError(
        f"tokens in the loss must be real; in rows {rows[:10]} the loss mask has another shape than the "
        "attention mask, or a loss mask or component mask is True where the attention mask is False. Packing "
        "would drop those tokens: correct the wrong mask"
    )


def _explain(sizes: list[int], segment: Tensor, empty: Tensor, outside: Tensor, first: Tensor) -> None:
    """Raise an error for the first fault, with the rows. May read from the device several times."""
    rows = empty.nonzero().flatten().tolist()
    if rows:
        raise BatchError(f"every row needs a token; rows {rows[:10]} have none")
    rows = [row for row, entries in enumerate(outside.split(sizes)) if bool(entries.any())]
    if rows:
        raise _outside(rows)
    raise BatchError(
        "the first token of a row has no context to predict it from, and it is in the loss in rows "
        f"{segment[first].tolist()[:10]}: remove it from the loss mask, or from the mask of the component"
    )

"""The tree of tokens that rows make where they begin alike, and what a model needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.prefixes import END, as_words, prefix_order, rank_rows, same_content
from headrace.transforms.schema import require

READ = "written by pack(..., tree=True)"


class PrefixTree(NamedTuple):
    """The nodes of rows, depth first: a node, then all that come behind it, then its next sibling."""

    node: Tensor
    """(N, T) int64, the node of each token; anything where there is none."""
    row: Tensor
    """(M,) int64, a row that each node is on."""
    depth: Tensor
    """(M,) int64, tokens before it in its rows."""
    parent: Tensor
    """(M,) int64, the node of the token before it; −1 at a root."""
    end: Tensor
    """(M,) int64: the nodes behind node m, and m itself, are those from m to end[m] − 1."""
    tree: Tensor
    """(M,) int64, which tree it is in, from 0."""


def prefix_tree(labels: Tensor) -> PrefixTree:
    """Find the tokens that rows share: equal ones at equal places, with all before them equal, too.

    Rows are sorted (:func:`~headrace.transforms.prefixes.prefix_order`). Of each row those tokens are new
    that it does not share with the row before it; numbered in this order they are a depth-first order of the
    tree. What is sorted is 2 entries a token. One device read, the number of nodes.

    Args:
        labels: (N, T) int64 from the left on, with ``END`` behind; equal where tokens can be shared.

    Example:
        >>> tree = prefix_tree(torch.tensor([[5, 1, 1], [5, 2, END], [5, 1, 3]]))
        >>> tree.node.tolist(), tree.depth.tolist(), tree.parent.tolist(), tree.end.tolist()
        ([[0, 1, 2], [0, 4, 3], [0, 1, 3]], [0, 1, 2, 2, 1], [-1, 0, 1, 1, 0], [5, 4, 3, 4, 5])
    """
    (order, shared), width = prefix_order(labels), labels.shape[1]
    place = torch.arange(width, device=labels.device)
    length = (labels != END).sum(1)
    new = (place >= shared[:, None]) & (place < length.index_select(0, order)[:, None])
    count = new.sum(1).cumsum(0)
    at = new.flatten().nonzero().flatten()
    depth, parent = at % width, torch.full_like(at, -1)
    numbers = torch.arange(len(at), device=at.device)
    node = labels.new_full((labels.numel(),), -1).index_copy_(0, at, numbers).view(labels.shape)
    node = node.cummax(0).values  # what is not new is the node of the row above it
    parent = torch.where(depth == 0, -1, node.flatten().index_select(0, (at - 1).clamp_min(0)))
    by_row = torch.empty_like(node).index_copy_(0, order, node)
    behind = torch.empty_like(count).index_copy_(0, order, count)[:, None].expand_as(by_row)
    present = place < length[:, None]
    inside = torch.where(present, by_row, len(at))
    end = torch.zeros(len(at) + 1, dtype=torch.int64, device=at.device)
    end.scatter_reduce_(0, inside.flatten(), behind.flatten(), "amax")
    row = order.index_select(0, at // max(width, 1))
    return PrefixTree(by_row, row, depth, parent, end[:-1], (depth == 0).cumsum(0) - 1)


def tree_columns(
    rows: Mapping[NestedKey, Tensor],
    inputs: Mapping[NestedKey, Tensor],
    row_inputs: Mapping[NestedKey, Tensor | Sequence[Tensor]],
    shape: tuple[int, int],
) -> dict[NestedKey, Tensor]:
    """The columns of the M nodes, and the node of each of the L tokens. One device read, M.

    Args:
        rows: (1, L) int64 each, of rows end to end: ``input_ids``, and of each token its row,
            ``segment_ids``, and its place in that, ``position_ids``.
        inputs: (1, L, ...), in which tokens must agree to be one.
        row_inputs: (n, ...), or n tensors, in which rows must agree to share any.
        shape: n rows, and at least as many tokens as the longest has.
    """
    tokens, segment, position = (rows[key][0] for key in ("input_ids", "segment_ids", "position_ids"))
    others = [as_words(column[0]).reshape(len(tokens), -1) for column in inputs.values()]
    for content in map(same_content, row_inputs.values()):
        # On the first token of a row, behind which all others are.
        others.append(torch.where(position == 0, content.index_select(0, segment), 0)[:, None])
    labels = rank_rows(torch.cat([tokens[:, None].long(), *others], 1)) if others else tokens.long()
    at = segment * shape[1] + position
    grid = labels.new_full((shape[0] * shape[1],), END).index_copy_(0, at, labels)
    tree = prefix_tree(grid.view(shape))
    number = torch.zeros_like(grid).index_copy_(0, at, torch.arange(len(at), device=at.device))
    source = number.index_select(0, tree.row * shape[1] + tree.depth)  # the token of some row
    columns = {
        "input_ids": tokens.index_select(0, source),
        "position_ids": tree.depth,
        "segment_ids": tree.tree,
        "tree_start": torch.arange(len(source), device=at.device),
        "tree_end": tree.end,
        "tree_parent": tree.parent,
        "packed_node": tree.node.flatten().index_select(0, at),
    } | {key: column[0].index_select(0, source) for key, column in inputs.items()}
    return {key: column.unsqueeze(0) for key, column in columns.items()}


def tree_mask(packed: TensorDictBase, dtype: torch.dtype | None = None) -> Tensor:
    """Which token of a tree sees which: itself, and those before it in its rows. No device read.

    Args:
        packed: TensorDict ``[1]``, as ``pack(batch, tree=True)`` returns it.
        dtype: a floating-point one makes a mask to add to attention scores, 0 or the least number of the
            dtype. Models of transformers take that one: of a bool mask their ``eager`` attention makes
            something wrong without a word.

    Returns:
        (1, 1, M, M), query by key: bool, True where it sees; or `dtype`.

    Raises:
        MissingKeyError: it was not packed as a tree.

    Example:
        >>> from headrace.transforms import pack
        >>> from tensordict import TensorDict
        >>> rows = {"tokens": {"full": torch.tensor([[5, 6], [5, 7]])}}
        >>> rows["masks"] = {"all_attention_mask": torch.ones(2, 2, dtype=torch.bool)}
        >>> tree_mask(pack(TensorDict(rows, batch_size=[2]), tree=True)).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
    """
    start, end = _spans(packed, "tree_mask")
    query = start[:, None]
    sees = ((start <= query) & (query < end))[None, None]
    if dtype is None:
        return sees
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(
        ~sees, torch.finfo(dtype).min
    )


def tree_mask_mod(packed: TensorDictBase) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """:func:`tree_mask` as FlexAttention takes it, which computes it block by block.

    ``create_block_mask(tree_mask_mod(packed), 1, None, M, M)`` of ``torch.nn.attention.flex_attention`` makes
    of it what ``flex_attention(query, key, value, block_mask=...)`` takes.

    Args:
        packed: TensorDict ``[1]``, as ``pack(batch, tree=True)`` returns it.

    Returns:
        A function of batch, head, query and key, int64 each, to bool: True where the query sees the key.

    Raises:
        MissingKeyError: it was not packed as a tree.

    Example:
        >>> from headrace.transforms import pack
        >>> from tensordict import TensorDict
        >>> rows = {"tokens": {"full": torch.tensor([[5, 6], [5, 7]])}}
        >>> rows["masks"] = {"all_attention_mask": torch.ones(2, 2, dtype=torch.bool)}
        >>> sees = tree_mask_mod(pack(TensorDict(rows, batch_size=[2]), tree=True))
        >>> zero, one, two = torch.arange(3)
        >>> bool(sees(zero, zero, two, zero)), bool(sees(zero, zero, two, one))
        (True, False)
    """
    start, end = _spans(packed, "tree_mask_mod")

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (start[key] <= start[query]) & (start[query] < end[key])

    return sees


def tree_log_probs(logits: Tensor, packed: TensorDictBase) -> Tensor:
    """The log-probability of each node's token, after those before it. No device read.

    A node's distribution is over the tokens behind it, and rows part behind a node: what is read of it is the
    log-probability of each of its children. So nothing is as large as the logits but they and one copy of
    them, however many rows there are.

    Args:
        logits: (1, M, V) of a model, at each node those of the next token.
        packed: TensorDict ``[1]``, as ``pack(batch, tree=True)`` returns it.

    Returns:
        (1, M), 0 at a root, before which there is nothing. :func:`unpack_tokens` makes rows of it, (n, T),
        and ``found[:, packed["packed_node"][0]]`` the (1, L) that packed columns are.

    Raises:
        MissingKeyError: it was not packed as a tree.
        BatchError: the logits are not those of its nodes.

    Example:
        >>> from headrace.transforms import pack, unpack_tokens
        >>> from tensordict import TensorDict
        >>> rows = {"tokens": {"full": torch.tensor([[0, 1], [0, 2]])}}
        >>> rows["masks"] = {"all_attention_mask": torch.ones(2, 2, dtype=torch.bool)}
        >>> packed = pack(TensorDict(rows, batch_size=[2]), tree=True)
        >>> unpack_tokens(tree_log_probs(torch.zeros(1, 3, 4), packed), packed).exp().tolist()
        [[1.0, 0.25], [1.0, 0.25]]
    """
    parent = require(packed, "tree_parent", reader="tree_log_probs", option=READ)[0]
    _check_nodes(logits, packed)
    token, before = packed["input_ids"][0].long(), parent.clamp_min(0)
    token = torch.where(token < 0, logits.shape[-1], token)  # refused, as other ids that there are not
    token = torch.where(parent < 0, 0, token)  # nothing is read for a root
    chosen = logits[0, before, token] - logits[0].logsumexp(-1).index_select(0, before)
    return torch.where(parent < 0, 0.0, chosen).unsqueeze(0)


def logits_of_tokens(logits: Tensor, packed: TensorDictBase) -> Tensor:
    """The logits from which each token of the rows was sampled, as large as plain packing has them.

    Args:
        logits: (1, M, V) of a model, at each node those of the next token.
        packed: TensorDict ``[1]``, as ``pack(batch, tree=True)`` returns it.

    Returns:
        (1, L, V), those of the node before; for the first token of a row, before which there is none, some.

    Raises:
        MissingKeyError: it was not packed as a tree.

    Example:
        >>> from headrace.transforms import pack
        >>> from tensordict import TensorDict
        >>> rows = {"tokens": {"full": torch.tensor([[5, 6], [5, 7]])}}
        >>> rows["masks"] = {"all_attention_mask": torch.ones(2, 2, dtype=torch.bool)}
        >>> packed = pack(TensorDict(rows, batch_size=[2]), tree=True)
        >>> logits_of_tokens(torch.tensor([[[0.5], [0.6], [0.7]]]), packed).shape
        torch.Size([1, 4, 1])
    """
    parent = require(packed, "tree_parent", reader="logits_of_tokens", option=READ)[0]
    _check_nodes(logits, packed)
    before = parent.clamp_min(0).index_select(0, packed["packed_node"][0])
    return logits.index_select(1, before)


def _check_nodes(logits: Tensor, packed: TensorDictBase) -> None:
    nodes = packed["input_ids"].shape[1]
    if logits.ndim != 3 or logits.shape[:2] != (1, nodes):
        raise BatchError(
            f"logits are those of the tree's {nodes} nodes, (1, {nodes}, V), of model(packed['input_ids'], "
            f"...); got {tuple(logits.shape)}"
        )


def _spans(packed: TensorDictBase, reader: str) -> tuple[Tensor, Tensor]:
    start = require(packed, "tree_start", reader=reader, option=READ)[0]
    return start, require(packed, "tree_end", reader=reader, option=READ)[0]

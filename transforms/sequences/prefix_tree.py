"""The tree of tokens that rows make where they begin alike, and what a model needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.prefixes import END, as_words, branches, prefix_order, repeated, ways, words_of
from headrace.transforms.schema import require
from headrace.transforms.tensordicts import count_true, send_packed

READ = "written by pack(..., tree=True)"


class PrefixTree(NamedTuple):
    """The nodes of rows, depth first: a node, then all that come behind it, then its next sibling."""

    node: Tensor
    """(L,) int64, the node of each token, row by row."""
    source: Tensor
    """(M,) int64, a token that is each node, by its number among all."""
    depth: Tensor
    """(M,) int64, tokens before it in its rows."""
    parent: Tensor
    """(M,) int64, the node of the token before it; −1 at a root."""
    end: Tensor
    """(M,) int64: the nodes behind node m, and m itself, are those from m to end[m] − 1."""
    tree: Tensor
    """(M,) int64, which tree it is in, from 0."""


def prefix_tree(order: Tensor, shared: Tensor, lengths: Tensor) -> PrefixTree:
    """Find the tokens that rows share: equal ones at equal places, with all before them equal, too.

    Tokens of the same rows that follow one another are a branch
    (:func:`~headrace.transforms.prefixes.branches`), and their nodes have numbers that do, too.

    Args:
        order: (N,) int64, the row at each place, by :func:`~headrace.transforms.prefixes.prefix_order`.
        shared: (N,) int64, by place, the tokens that a row shares with the one before.
        lengths: (N,) int64, tokens of each row, at least one.

    Example:
        >>> labels = torch.tensor([[5, 1, 1], [5, 2, END], [5, 1, 3]])
        >>> tree = prefix_tree(*prefix_order(labels), torch.tensor([3, 2, 3]))
        >>> tree.node.tolist(), tree.depth.tolist(), tree.parent.tolist(), tree.end.tolist()
        ([0, 1, 2, 0, 4, 0, 1, 3], [0, 1, 2, 2, 1], [-1, 0, 1, 1, 0], [5, 4, 3, 4, 5])
    """
    apart = shared.masked_fill(shared == 0, -1)  # rows that share nothing are of two trees
    tree = branches(apart.tolist(), lengths.index_select(0, order).tolist())
    found = torch.tensor(tree, dtype=torch.int64)
    first, last, begin, end = found.t().contiguous()[:4]
    size, starts = end - begin, lengths.cumsum(0) - lengths
    before = torch.cat([size.new_zeros(1), size.cumsum(0)])  # nodes in front of each branch
    behind = before[torch.searchsorted(first, last)]
    # Numbers that follow one another, from one that each branch begins with.
    nodes = torch.arange(int(before[-1]))
    branch = ways(found, order)[1]
    counts = size.index_select(0, branch)
    node = torch.arange(int(counts.sum()))
    node += repeated((before[:-1].index_select(0, branch) - counts.cumsum(0) + counts), counts)
    depth = nodes + repeated(begin - before[:-1], size)
    at = starts.index_select(0, order.index_select(0, first)) + begin  # a branch's first token, in some row
    parent, has_own = nodes - 1, size > 0
    is_root = begin == 0
    parent[before[:-1][has_own]] = torch.where(is_root, -1, node[(at - 1).clamp_min(0)])[has_own]
    source = nodes + repeated(at - before[:-1], size)
    return PrefixTree(
        node, source, depth, parent, repeated(behind, size), repeated(is_root.cumsum(0) - 1, size)
    )


def tree_columns(
    rows: Mapping[NestedKey, Tensor],
    inputs: Mapping[NestedKey, Tensor],
    row_inputs: Mapping[NestedKey, Tensor | Sequence[Tensor]],
    shape: tuple[int, int],
) -> dict[NestedKey, Tensor]:
    """The columns of the M nodes, and the node of each of the L tokens. One device read: the tokens.

    Args:
        rows: (1, L) int64 each, of rows end to end: ``input_ids``, and of each token its row,
            ``segment_ids``, and its place in that, ``position_ids``.
        inputs: (1, L, ...), in which tokens must agree to be one.
        row_inputs: (n, ...), or n tensors, in which rows must agree to share any.
        shape: n rows, and at least as many tokens as the longest has.
    """
    tokens, segment, position = (rows[key][0] for key in ("input_ids", "segment_ids", "position_ids"))
    # A row in words: those of its first token and its inputs, those of the row's inputs, and so on.
    words = [
        tokens[:, None].long(),
        *(as_words(each[0]).reshape(len(tokens), -1) for each in inputs.values()),
    ]
    of_token = torch.cat(words, 1) if inputs else words[0]
    each, (count, width) = of_token.shape[1], shape
    grid = of_token.new_full((count * width, each), END)
    grid.index_copy_(0, segment * width + position, of_token)
    of_row = [words_of(content) for content in row_inputs.values()]
    more = sum(content.shape[1] for content in of_row)
    grid = grid.view(count, width * each)
    grid = torch.cat([grid[:, :each], *of_row, grid[:, each:]], 1).cpu() if of_row else grid.cpu()
    lengths = 1 + count_true(grid[:, each + more :: each] != END)
    order, shared = prefix_order(grid, lengths=lengths * each + more)
    shared = torch.where(shared < each + more, 0, (shared - more) // each)
    tree = prefix_tree(order, shared, lengths)
    node, source, depth, parent, end, number = send_packed(tree, tokens.device)
    columns = {
        "input_ids": tokens.index_select(0, source),
        "position_ids": depth,
        "segment_ids": number,
        "tree_start": torch.arange(len(source), device=tokens.device),
        "tree_end": end,
        "tree_parent": parent,
        "packed_node": node,
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

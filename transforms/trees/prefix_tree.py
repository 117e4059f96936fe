"""The tree of tokens of rows with common prefixes, and its masks and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.stages.sequences import END, as_words, repeated, words_of
from headrace.transforms.table import BatchError
from headrace.transforms.table.schema import require
from headrace.transforms.table.tensordicts import count_true, send_packed

from .prefixes import branches, prefix_order, ways

READ = "written by pack(..., tree=True)"


class PrefixTree(NamedTuple):
    """The nodes of rows in depth-first order: a node, then its descendants, then its next sibling."""

    node: Tensor
    """(L,) int64, the node of each token, row by row."""
    source: Tensor
    """(M,) int64, the index of one token of each node."""
    depth: Tensor
    """(M,) int64, the number of tokens before each node in its rows."""
    parent: Tensor
    """(M,) int64, the node of the token before each node; −1 at a root."""
    end: Tensor
    """(M,) int64: node m and its descendants are the nodes m to end[m] − 1."""
    tree: Tensor
    """(M,) int64, the number of each node's tree, from 0."""


def prefix_tree(order: Tensor, shared: Tensor, lengths: Tensor) -> PrefixTree:
    """Find the nodes of common prefixes. Rows with equal tokens up to a position share the node there.

    Consecutive tokens of the same rows are a branch (:func:`~headrace.transforms.trees.branches`). Their
    nodes have consecutive numbers.

    Args:
        order: (N,) int64, row numbers sorted by prefix (:func:`~headrace.transforms.trees.prefix_order`).
        shared: (N,) int64, the number of leading tokens that each row of `order` shares with the one before.
        lengths: (N,) int64, tokens per row, at least one.

    Example:
        >>> labels = torch.tensor([[5, 1, 1], [5, 2, END], [5, 1, 3]])
        >>> tree = prefix_tree(*prefix_order(labels), torch.tensor([3, 2, 3]))
        >>> tree.node.tolist(), tree.depth.tolist(), tree.parent.tolist(), tree.end.tolist()
        ([0, 1, 2, 0, 4, 0, 1, 3], [0, 1, 2, 2, 1], [-1, 0, 1, 1, 0], [5, 4, 3, 4, 5])
    """
    shared = shared.masked_fill(shared == 0, -1)  # rows without a common token are in different trees
    tree = branches(shared.tolist(), lengths.index_select(0, order).tolist())
    found = torch.tensor(tree, dtype=torch.int64)
    first, last, begin, end = found.t().contiguous()[:4]
    size, starts = end - begin, lengths.cumsum(0) - lengths
    before = torch.cat([size.new_zeros(1), size.cumsum(0)])  # number of nodes before each branch
    # Branches are in depth-first order: descendants end where the first branch of later rows begins.
    behind = before[torch.searchsorted(first, last)]
    # Consecutive numbers in each branch, from its first node on.
    nodes = torch.arange(int(before[-1]))
    branch = ways(found, order)[1]
    counts = size.index_select(0, branch)
    node = torch.arange(int(counts.sum()))
    node += repeated((before[:-1].index_select(0, branch) - counts.cumsum(0) + counts), counts)
    depth = nodes + repeated(begin - before[:-1], size)
    at = starts.index_select(0, order.index_select(0, first)) + begin  # a branch's first token, in one row
    parent, has_own = nodes - 1, size > 0
    is_root = begin == 0
    # The first node of a branch follows the node of the token before it, the same in all rows of the branch.
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
    """The columns of the M nodes, and the node of each of the L tokens. Reads the tokens from the device.

    Args:
        rows: (1, L) int64 each: the tokens ``input_ids``, their rows ``segment_ids``, and their positions
            ``position_ids``.
        inputs: (1, L, ...), which must be equal in shared tokens.
        row_inputs: (n, ...), or n tensors, which must be equal in rows that share tokens.
        shape: the number of rows n, and a width ≥ the length of the longest row.
    """
    tokens, segment, position = (rows[key][0] for key in ("input_ids", "segment_ids", "position_ids"))
    # The words of a row, in order: its first token with inputs, the inputs of the row, its other tokens.
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
    # A token is shared if all its words are. The first token also needs equal inputs of the row.
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
    """The attention mask of a tree: a token attends to itself and its ancestors. No device read.

    Args:
        packed: TensorDict ``[1]``, the output of ``pack(batch, tree=True)``.
        dtype: None for a bool mask. A floating-point dtype makes a mask to add to attention scores, with 0
            and the smallest number of the dtype. Models of transformers need such a mask: with a bool mask
            their ``eager`` attention silently computes wrong results.

    Returns:
        (1, 1, M, M), query by key: bool, True where the query attends to the key; or `dtype`.

    Raises:
        MissingKeyError: `packed` is not a tree.

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
    """:func:`tree_mask` as a function for FlexAttention, which computes the mask block by block.

    Use ``create_block_mask(tree_mask_mod(packed), 1, None, M, M)`` of ``torch.nn.attention.flex_attention``
    for the argument `block_mask` of ``flex_attention``.

    Args:
        packed: TensorDict ``[1]``, the output of ``pack(batch, tree=True)``.

    Returns:
        A function of batch, head, query and key, int64 each: True where the query attends to the key.

    Raises:
        MissingKeyError: `packed` is not a tree.

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
    """The log-probability of each node's token, given its ancestors. No device read.

    The logits of a node are for the next token, and rows may continue differently after a node. So the
    log-probability of a node is read from the logits of its parent. The function makes one copy of the
    logits, for any number of rows.

    Args:
        logits: (1, M, V), the model's logits of the token after each node.
        packed: TensorDict ``[1]``, the output of ``pack(batch, tree=True)``.

    Returns:
        (1, M), 0 at a root, which has no context. :func:`unpack_tokens` converts it to rows, (n, T), and
        ``found[:, packed["packed_node"][0]]`` to packed columns, (1, L).

    Raises:
        MissingKeyError: `packed` is not a tree.
        BatchError: the logits have another number of nodes.

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
    token = torch.where(token < 0, logits.shape[-1], token)  # indexing then refuses negative ids, too
    token = torch.where(parent < 0, 0, token)  # a valid id, because the value of a root is not used
    chosen = logits[0, before, token] - logits[0].logsumexp(-1).index_select(0, before)
    return torch.where(parent < 0, 0.0, chosen).unsqueeze(0)


def logits_of_tokens(logits: Tensor, packed: TensorDictBase) -> Tensor:
    """Return the logits of each token of each row. The result is as large as without a tree.

    Args:
        logits: (1, M, V), the model's logits of the token after each node.
        packed: TensorDict ``[1]``, the output of ``pack(batch, tree=True)``.

    Returns:
        (1, L, V), the logits of the node before each token. Those of the first token of a row are arbitrary.

    Raises:
        MissingKeyError: `packed` is not a tree.
        BatchError: the logits have another number of nodes.

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
            f"logits must be (1, {nodes}, V), for the {nodes} nodes of packed['input_ids']; got "
            f"{tuple(logits.shape)}"
        )


def _spans(packed: TensorDictBase, reader: str) -> tuple[Tensor, Tensor]:
    start = require(packed, "tree_start", reader=reader, option=READ)[0]
    return start, require(packed, "tree_end", reader=reader, option=READ)[0]

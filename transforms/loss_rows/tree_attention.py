"""Attention and log-probabilities over rows that are packed as a tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.schema import require

READ = "written by pack(..., tree=True)"


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

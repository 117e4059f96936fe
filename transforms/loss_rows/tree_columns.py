"""What packed rows are where tokens that they share are one node of a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import NestedKey
from torch import Tensor

from headrace.transforms.prefixes import END, as_words, rank_rows, same_content

from .prefix_tree import prefix_tree


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

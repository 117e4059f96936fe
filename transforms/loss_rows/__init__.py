"""Rows as a loss and its model take them."""

from .dense import DenseRows
from .merging import MergeTurns, merge_turns
from .packing import pack, unpack, unpack_tokens
from .scoring import ScoreRows
from .tree_attention import logits_of_tokens, tree_log_probs, tree_mask, tree_mask_mod

__all__ = [
    "DenseRows",
    "MergeTurns",
    "ScoreRows",
    "logits_of_tokens",
    "merge_turns",
    "pack",
    "tree_log_probs",
    "tree_mask",
    "tree_mask_mod",
    "unpack",
    "unpack_tokens",
]

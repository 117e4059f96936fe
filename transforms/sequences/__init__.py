"""Prepare rows for a model and its loss: pad, merge, score, pack, or build a tree."""

from .dense import DenseRows
from .merge import MergeTurns, merge_turns
from .packing import pack, unpack, unpack_tokens
from .prefix_tree import logits_of_tokens, tree_log_probs, tree_mask, tree_mask_mod
from .score import ScoreRows

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

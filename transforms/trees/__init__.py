"""Rows that share prefixes: the tree of their tokens, and stages that use shared tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .by_prefix import TreeAdvantage, tree_advantage
    from .prefix_tree import logits_of_tokens, tree_columns, tree_log_probs, tree_mask, tree_mask_mod
    from .shared_once import TrainSharedOnce, train_shared_once

__all__ = [
    "TrainSharedOnce",
    "TreeAdvantage",
    "logits_of_tokens",
    "train_shared_once",
    "tree_advantage",
    "tree_columns",
    "tree_log_probs",
    "tree_mask",
    "tree_mask_mod",
]

__getattr__, __dir__ = lazy(__name__, __all__)

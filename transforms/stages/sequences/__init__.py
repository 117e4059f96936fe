"""Prepare rows for a model and its loss: pad, merge, score, pack, or build a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .dense import DenseRows
    from .merge import MergeTurns, merge_turns, with_merged
    from .packing import pack, unpack, unpack_tokens
    from .score import ScoreRows
    from .words import END, as_words, left_aligned, repeated, words_of

__all__ = [
    "END",
    "DenseRows",
    "MergeTurns",
    "ScoreRows",
    "as_words",
    "left_aligned",
    "merge_turns",
    "pack",
    "repeated",
    "unpack",
    "unpack_tokens",
    "with_merged",
    "words_of",
]

__getattr__, __dir__ = lazy(__name__, __all__)

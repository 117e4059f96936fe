"""Rows as a loss and its model take them."""

from .dense import DenseRows
from .packing import pack, unpack, unpack_tokens
from .scoring import ScoreRows

__all__ = ["DenseRows", "ScoreRows", "pack", "unpack", "unpack_tokens"]

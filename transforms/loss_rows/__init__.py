"""Rows as a loss and its model take them."""

from .packing import pack, unpack, unpack_tokens

__all__ = ["pack", "unpack", "unpack_tokens"]

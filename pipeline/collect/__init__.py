"""Rollouts as they come, from wherever TorchRL collects them."""

from .assembling import assembled
from .stamping import StampIds, stamp_ids

__all__ = ["StampIds", "assembled", "stamp_ids"]

"""Rollouts as they come, from wherever TorchRL collects them."""

from .assembling import assembled
from .drain import drained
from .stamping import StampIds, stamp_ids

__all__ = ["StampIds", "assembled", "drained", "stamp_ids"]

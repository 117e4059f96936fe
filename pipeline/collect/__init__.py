"""Rollouts as they come, from wherever TorchRL collects them."""

from .assembling import assembled
from .drain import DrainWriter, drained
from .informing import informative
from .stamping import StampIds, stamp_ids

__all__ = ["DrainWriter", "StampIds", "assembled", "drained", "informative", "stamp_ids"]

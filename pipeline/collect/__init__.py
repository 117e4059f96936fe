"""Rollouts as they come, from wherever TorchRL collects them."""

from .assembling import assembled
from .drain import DrainWriter, drained
from .informing import informative
from .on_write import AssembleOnWrite
from .pacing import paced
from .stamping import StampIds, stamp_ids

__all__ = [
    "AssembleOnWrite",
    "DrainWriter",
    "StampIds",
    "assembled",
    "drained",
    "informative",
    "paced",
    "stamp_ids",
]

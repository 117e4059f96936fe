"""Rollouts as they come, from wherever TorchRL collects them, and steps to wherever they are trained."""

from .assembling import assembled
from .drain import DrainWriter, drained
from .informing import informative
from .on_ray import RayAssembler
from .on_transfer_queue import RolloutQueue, StepQueue
from .on_write import AssembleOnWrite
from .stamping import StampIds, stamp_ids

__all__ = [
    "AssembleOnWrite",
    "DrainWriter",
    "RayAssembler",
    "RolloutQueue",
    "StampIds",
    "StepQueue",
    "assembled",
    "drained",
    "informative",
    "stamp_ids",
]

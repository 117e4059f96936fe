"""Rollouts as they come, from wherever TorchRL collects them, and steps to wherever they are trained."""

from .assembling import assembled
from .on_ray import RayAssembler
from .on_transfer_queue import RolloutQueue, StepQueue

__all__ = ["RayAssembler", "RolloutQueue", "StepQueue", "assembled"]

"""Rollouts as they come, from wherever TorchRL collects them."""

from .assembling import assembled
from .on_ray import RayAssembler

__all__ = ["RayAssembler", "assembled"]

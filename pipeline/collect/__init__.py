"""Rollouts as they come, from wherever TorchRL collects them."""

from .assembling import assembled
from .drain import drained

__all__ = ["assembled", "drained"]

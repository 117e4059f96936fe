"""Rollouts as they come, from wherever TorchRL collects them."""

from .assembling import assembled

__all__ = ["assembled"]

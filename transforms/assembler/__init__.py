"""Rollouts that come one by one, from many workers, become whole groups."""

from .assembler import GroupAssembler
from .limits import StalledError

__all__ = ["GroupAssembler", "StalledError"]

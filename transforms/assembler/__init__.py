"""Assemble whole groups from rollouts that arrive one by one, from many workers."""

from .assembler import GroupAssembler
from .limits import StalledError

__all__ = ["GroupAssembler", "StalledError"]

"""Ranks that share a batch: barriers, and exchange of tables."""

from .ranks import Ranks, tell_apart

__all__ = ["Ranks", "tell_apart"]

"""Ranks that share a batch: barriers, and exchange of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .ranks import Ranks, tell_apart

__all__ = ["Ranks", "tell_apart"]

__getattr__, __dir__ = lazy(__name__, __all__)

"""What one batch leaves to the next: rows that a split holds back, and the place where a run resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .memory import SplitMemory

__all__ = ["SplitMemory"]

__getattr__, __dir__ = lazy(__name__, __all__)

"""The default experiment: a small transformer learns from scratch to reverse digit strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

from . import digits

if TYPE_CHECKING:
    from .env import ReverseEnv
    from .policy import DigitPolicy

__all__ = ["DigitPolicy", "ReverseEnv", "digits"]

__getattr__, __dir__ = lazy(__name__, __all__)

"""Show all rows of all steps of one run or two in a browser on this machine: ``headrace view FOLDER``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .server import view

__all__ = ["view"]

__getattr__, __dir__ = lazy(__name__, __all__)

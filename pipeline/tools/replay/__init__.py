"""``task=replay`` and ``task=compare``: the steps of a dump through one recipe, or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .compare_task import compare
    from .replay_task import replay

__all__ = ["compare", "replay"]

__getattr__, __dir__ = lazy(__name__, __all__)

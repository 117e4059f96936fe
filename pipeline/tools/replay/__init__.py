"""Run the steps of a dump through one recipe (``task=replay``) or two (``task=compare``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .compare_task import compare_recipes
    from .replay_task import replay_dump

__all__ = ["compare_recipes", "replay_dump"]

__getattr__, __dir__ = lazy(__name__, __all__)

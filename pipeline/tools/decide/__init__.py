"""Decisions of a recipe on plain columns, for loops that have no TensorDict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .decision import Decider, Decision, RowAdvantages, advantages_of, decide, pipeline_of, refuse_state

__all__ = ["Decider", "Decision", "RowAdvantages", "advantages_of", "decide", "pipeline_of", "refuse_state"]

__getattr__, __dir__ = lazy(__name__, __all__)

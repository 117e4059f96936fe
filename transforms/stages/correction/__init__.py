"""Rollout correction: importance weights and rejection, from the log-probabilities of two policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .diverged import Diverged, divergence
    from .importance import importance_weight
    from .stage import RolloutCorrection
    from .token_filter import TokenFilter

__all__ = ["Diverged", "RolloutCorrection", "TokenFilter", "divergence", "importance_weight"]

__getattr__, __dir__ = lazy(__name__, __all__)

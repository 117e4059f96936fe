"""Rollout correction: importance weights and rejection, from the log-probabilities of two policies."""

from .diverged import Diverged, divergence
from .importance import importance_weight
from .stage import RolloutCorrection
from .token_filter import TokenFilter

__all__ = ["Diverged", "RolloutCorrection", "TokenFilter", "divergence", "importance_weight"]

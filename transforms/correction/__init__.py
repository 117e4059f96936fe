"""Two recorded policies: the one that sampled and the one that is trained, and how far they are apart."""

from .diverged import Diverged, divergence
from .importance import importance_weight
from .stage import RolloutCorrection
from .token_filter import TokenFilter

__all__ = ["Diverged", "RolloutCorrection", "TokenFilter", "divergence", "importance_weight"]

"""Loss weights. They make the loss a mean over the optimiser step, however its rows are split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .stage import LossWeight, Mean, Weighed, loss_weight, turn_weight, weighted_loss

__all__ = ["LossWeight", "Mean", "Weighed", "loss_weight", "turn_weight", "weighted_loss"]

__getattr__, __dir__ = lazy(__name__, __all__)

"""Train: a prompt sampler, optimiser steps, losses, and the hook for TorchRL's trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .optimiser_record import OptimiserRecord
    from .optimiser_steps import Packed, optimise, total_loss
    from .sampler import RepeatSampler
    from .token_loss import TokenGRPOLoss
    from .trainer_hook import PipelineHook

__all__ = [
    "Checkpoint",
    "OptimiserRecord",
    "Packed",
    "PipelineHook",
    "RepeatSampler",
    "TokenGRPOLoss",
    "optimise",
    "total_loss",
]

__getattr__, __dir__ = lazy(__name__, __all__)

"""Training: the task ``train``, its prompt sampler, optimiser steps and losses."""

from .display import TrainingDisplay, history_table
from .job import TrainingInterrupted, train
from .optimiser_record import OptimiserRecord
from .optimiser_steps import optimise, total_loss
from .sampler import RepeatSampler
from .token_loss import TokenGRPOLoss

__all__ = [
    "OptimiserRecord",
    "RepeatSampler",
    "TokenGRPOLoss",
    "TrainingDisplay",
    "TrainingInterrupted",
    "history_table",
    "optimise",
    "total_loss",
    "train",
]

"""The pipeline, how it is composed, and the command that trains through it."""

from .load import ConfigError, build_pipeline, load_pipeline
from .optimise import optimise, total_loss
from .pipeline import Pipeline, StageError
from .sampler import RepeatSampler, stamp_ids
from .token_loss import TokenGRPOLoss

__all__ = [
    "ConfigError",
    "Pipeline",
    "RepeatSampler",
    "StageError",
    "TokenGRPOLoss",
    "build_pipeline",
    "load_pipeline",
    "optimise",
    "stamp_ids",
    "total_loss",
]

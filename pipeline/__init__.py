"""The pipeline, how it is composed, and the command that trains through it."""

from .load import ConfigError, build_pipeline, load_pipeline
from .optimise import optimise
from .pipeline import Pipeline, StageError
from .sampler import RepeatSampler, stamp_ids

__all__ = [
    "ConfigError",
    "Pipeline",
    "RepeatSampler",
    "StageError",
    "build_pipeline",
    "load_pipeline",
    "optimise",
    "stamp_ids",
]

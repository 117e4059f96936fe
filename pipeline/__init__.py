"""The pipeline, how it is composed, and the command that trains through it."""

from .load import ConfigError, build_pipeline, load_pipeline
from .optimise import optimise, total_loss
from .pipeline import Pipeline
from .report import StepReport, log_report, make_report, page_data, write_dump, write_page
from .sampler import RepeatSampler, stamp_ids
from .stage import StageError
from .token_loss import TokenGRPOLoss

__all__ = [
    "ConfigError",
    "Pipeline",
    "RepeatSampler",
    "StageError",
    "StepReport",
    "TokenGRPOLoss",
    "build_pipeline",
    "load_pipeline",
    "log_report",
    "make_report",
    "optimise",
    "page_data",
    "stamp_ids",
    "total_loss",
    "write_dump",
    "write_page",
]

"""The pipeline, how it is composed, and the command that trains through it."""

from .collect import AssembleOnWrite, DrainWriter, StampIds, assembled, drained, stamp_ids
from .load import ConfigError, build_pipeline, load_pipeline
from .pipeline import Pipeline
from .report import StepReport, log_report, make_report, page_data, write_dump, write_page
from .run import Run
from .stage import StageError
from .train import RepeatSampler, TokenGRPOLoss, optimise, total_loss

__all__ = [
    "AssembleOnWrite",
    "ConfigError",
    "DrainWriter",
    "Pipeline",
    "RepeatSampler",
    "Run",
    "StageError",
    "StampIds",
    "StepReport",
    "TokenGRPOLoss",
    "assembled",
    "build_pipeline",
    "drained",
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

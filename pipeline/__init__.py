"""The pipeline, how it is composed, and the command that trains through it."""

from .collect import AssembleOnWrite, DrainWriter, StampIds, assembled, drained, informative, paced, stamp_ids
from .collect.group_unit import GroupUnit
from .collect.on_ray import RayAssembler
from .collect.rollout_queue import RolloutQueue
from .collect.step_queue import StepQueue
from .collect.torchrl_configs import register_configs
from .collect.trainer_hook import PipelineHook
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
    "GroupUnit",
    "Pipeline",
    "PipelineHook",
    "RayAssembler",
    "RepeatSampler",
    "RolloutQueue",
    "Run",
    "StageError",
    "StampIds",
    "StepQueue",
    "StepReport",
    "TokenGRPOLoss",
    "assembled",
    "build_pipeline",
    "drained",
    "informative",
    "load_pipeline",
    "log_report",
    "make_report",
    "optimise",
    "paced",
    "page_data",
    "register_configs",
    "stamp_ids",
    "total_loss",
    "write_dump",
    "write_page",
]

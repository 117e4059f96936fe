"""The pipeline, how it is composed, and the command that trains through it.

Names are imported when they are asked for: ``headrace --help`` needs no torch, which takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collect.assembling import assembled
    from .collect.drain import DrainWriter, drained
    from .collect.group_unit import GroupUnit
    from .collect.informing import informative
    from .collect.on_ray import RayAssembler
    from .collect.on_write import AssembleOnWrite
    from .collect.pacing import paced
    from .collect.queues import RolloutQueue, StepQueue
    from .collect.stamping import StampIds, stamp_ids
    from .collect.torchrl_configs import register_configs
    from .collect.trainer_hook import PipelineHook
    from .credit import Credit, advantages_of
    from .load import ConfigError, build_pipeline, load_pipeline
    from .pipeline import Pipeline
    from .report import ReportFolder, StepReport, log_report, make_report, page_data, write_dump, write_page
    from .run import Run
    from .stage import StageError
    from .train import RepeatSampler, TokenGRPOLoss, optimise, total_loss

__all__ = [
    "AssembleOnWrite",
    "ConfigError",
    "Credit",
    "DrainWriter",
    "GroupUnit",
    "Pipeline",
    "PipelineHook",
    "RayAssembler",
    "RepeatSampler",
    "ReportFolder",
    "RolloutQueue",
    "Run",
    "StageError",
    "StampIds",
    "StepQueue",
    "StepReport",
    "TokenGRPOLoss",
    "advantages_of",
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

_HOMES = {
    "stage": "StageError",
    "collect.assembling": "assembled",
    "collect.drain": "DrainWriter drained",
    "collect.group_unit": "GroupUnit",
    "collect.informing": "informative",
    "collect.on_ray": "RayAssembler",
    "collect.on_write": "AssembleOnWrite",
    "collect.pacing": "paced",
    "collect.queues": "RolloutQueue StepQueue",
    "collect.stamping": "StampIds stamp_ids",
    "collect.torchrl_configs": "register_configs",
    "collect.trainer_hook": "PipelineHook",
    "credit": "Credit advantages_of",
    "load": "ConfigError build_pipeline load_pipeline",
    "pipeline": "Pipeline",
    "report": "ReportFolder StepReport log_report make_report page_data write_dump write_page",
    "run": "Run",
    "train": "RepeatSampler TokenGRPOLoss optimise total_loss",
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

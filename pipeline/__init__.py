"""The pipeline, how it is composed, and the command that trains through it.

Names are imported when they are asked for: ``headrace --help`` needs no torch, which takes seconds.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chain.stage import StageError
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

# Where each name is: by the imports above, which only type checkers execute.
_HOMES = {
    alias.name: f".{node.module}"
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.level
    for alias in node.names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

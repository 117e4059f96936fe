"""The pipeline, its composition from recipes, reports, and the ``headrace`` command.

A name is imported when it is first used, so that ``headrace --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import hint, lazy

if TYPE_CHECKING:
    from .collect.assembling import assembled
    from .collect.drain import DrainWriter, drained
    from .collect.group_unit import GroupUnit
    from .collect.informing import informative
    from .collect.lockstep import on_every_rank
    from .collect.on_ray import RayAssembler
    from .collect.on_write import AssembleOnWrite, BufferAccount, buffer_account, groups_on_write
    from .collect.pacing import paced
    from .collect.rollout_stream import RolloutStream
    from .collect.stamping import StampIds, stamp_ids
    from .collect.torchrl_configs import register_configs
    from .composing.compose import recipes
    from .load import ConfigError, build_pipeline, load_pipeline
    from .pipeline import Pipeline
    from .queues.in_place import GroupReplayBuffer, QueuedGroups
    from .queues.queue_sampler import group_sampler, group_tags
    from .queues.queues import RolloutQueue, StepQueue
    from .run import Run
    from .stage import StageError
    from .tools.decide.decision import Decider, Decision, RowAdvantages, advantages_of, decide
    from .tools.dumps.readers.open import open_dump
    from .tools.dumps.task_result import TaskResult
    from .tools.report.dump import write_dump
    from .tools.report.folder import ReportFolder
    from .tools.report.html import write_page
    from .tools.report.loggers import log_report
    from .tools.report.page_contents import page_data
    from .tools.report.step import StepReport, make_report
    from .tools.tasks import audit, compare, plan, replay
    from .tools.xray.causal_lm import table_as_causal_lm
    from .tools.xray.measure import XRay, xray
    from .tools.xray.of_trl import trl_step
    from .tools.xray.page import xray_page
    from .tools.xray.token_table import TokenTable, kl_weights, token_weights
    from .tools.xray.unique_pairs import xray_batch
    from .train.checkpoint import Checkpoint
    from .train.optimiser_record import OptimiserRecord
    from .train.optimiser_steps import optimise, total_loss
    from .train.sampler import RepeatSampler
    from .train.token_loss import TokenGRPOLoss
    from .train.trainer_hook import PipelineHook

__all__ = [
    "AssembleOnWrite",
    "BufferAccount",
    "Checkpoint",
    "ConfigError",
    "Decider",
    "Decision",
    "DrainWriter",
    "GroupReplayBuffer",
    "GroupUnit",
    "OptimiserRecord",
    "Pipeline",
    "PipelineHook",
    "QueuedGroups",
    "RayAssembler",
    "RepeatSampler",
    "ReportFolder",
    "RolloutQueue",
    "RolloutStream",
    "RowAdvantages",
    "Run",
    "StageError",
    "StampIds",
    "StepQueue",
    "StepReport",
    "TaskResult",
    "TokenGRPOLoss",
    "TokenTable",
    "XRay",
    "advantages_of",
    "assembled",
    "audit",
    "buffer_account",
    "build_pipeline",
    "compare",
    "decide",
    "drained",
    "group_sampler",
    "group_tags",
    "groups_on_write",
    "informative",
    "kl_weights",
    "load_pipeline",
    "log_report",
    "make_report",
    "on_every_rank",
    "open_dump",
    "optimise",
    "paced",
    "page_data",
    "plan",
    "recipes",
    "register_configs",
    "replay",
    "stamp_ids",
    "table_as_causal_lm",
    "token_weights",
    "total_loss",
    "trl_step",
    "write_dump",
    "write_page",
    "xray",
    "xray_batch",
    "xray_page",
]


__getattr__, __dir__ = lazy(__name__, __all__, hint)

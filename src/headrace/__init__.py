"""RL post-training steps between a TorchRL collector and the loss.

:mod:`headrace.transforms` has the stages that process a batch. :mod:`headrace.pipeline` chains them, runs
them and shows the results. :mod:`headrace.conf` has the recipes, and :mod:`headrace.adapters` attaches them
to other trainers. The public names of the first two are also here. Each is imported when it is first used:
``import headrace`` needs no torch, which takes seconds. ``dir(headrace)`` shows the names that most users
need, by task:

============================ =========================================================================
from a recipe to minibatches recipes, load_pipeline, Pipeline, Run
the same on plain columns    decide, Decider, Decision, advantages_of
ids and complete groups      StampIds, stamp_ids, RepeatSampler, GroupAssembler, assembled
groups from workers          informative, paced, RolloutStream
optimiser steps              optimise, weighted_loss, TokenGRPOLoss, PipelineHook, Checkpoint
what happened to the rows    make_report, ReportFolder, log_report, write_page
finished runs                write_dump, open_dump, replay, compare, audit, plan, xray
parts of your own            BatchTransform, RewardShaping, Criterion, TokenTerm, Rows
errors                       ConfigError, BatchError, MissingKeyError, IncompleteGroupsError, StageError
============================ =========================================================================

The other names are in ``dir(headrace.transforms)`` and ``dir(headrace.pipeline)``. Each stage of a recipe is
a class with a function of tensors beside it, such as ``GroupRelativeAdvantage`` and
``group_relative_advantage``.

Example:
    >>> import headrace
    >>> headrace.load_pipeline("grpo", group_size=8).stages["gate"]
    CompletenessGate(group_size=8)
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .pipeline.public_names import HOMES, PACKAGES, SHOWN, hint

# A library prints nothing by itself: to see its messages, configure `logging`.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:  # type checkers follow the two packages by their `__all__`, and refuse any other name
    from .pipeline import *  # noqa: F403
    from .transforms import *  # noqa: F403

    __version__: str
else:
    __all__ = ["__version__", *sorted(HOMES)]

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version  # here: it is rarely used, and takes as long as all else

            value = version("headrace")
        elif name in PACKAGES:
            value = import_module(f".{name}", __name__)
        elif name in HOMES:
            value = getattr(import_module(f".{HOMES[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint(name)}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return SHOWN

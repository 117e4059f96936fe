"""RL post-training steps between a TorchRL collector and the loss.

:mod:`headrace.transforms` has what happens to a batch, :mod:`headrace.pipeline` how it is chained, run and
shown, :mod:`headrace.conf` the recipes, and :mod:`headrace.adapters` how other trainers get one. The public
names of the first two are here as well, each imported when it is first used: ``import headrace`` needs no
torch, which takes seconds. Those to begin with:

============================== =================================================================
from a recipe to minibatches   load_pipeline, Pipeline, Run
the same on plain columns      decide, Decider, Decision
ids and whole groups           StampIds, RepeatSampler, GroupAssembler, assembled
optimiser steps                optimise, weighted_loss, TokenGRPOLoss
what happened to the rows      make_report, ReportFolder, log_report
parts of your own              BatchTransform, Criterion, TokenTerm, Rows
errors                         ConfigError, BatchError, MissingKeyError, IncompleteGroupsError
============================== =================================================================

Each stage of a recipe is a class, and beside it is a function of tensors, such as ``GroupRelativeAdvantage``
and ``group_relative_advantage``.

Example:
    >>> import headrace
    >>> headrace.load_pipeline("grpo", group_size=8).stages["gate"]
    CompletenessGate(group_size=8)
"""

from __future__ import annotations

import ast
import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A library prints nothing by itself: who wants to see it configures `logging`.
logging.getLogger(__name__).addHandler(logging.NullHandler())

FOLDER = Path(__file__).parent
PACKAGES = ("adapters", "conf", "pipeline", "transforms")
# Where names are that somebody may look for here.
INNER = (
    "adapters",
    "pipeline.certify",
    "pipeline.report",
    "pipeline.reverse",
    "pipeline.sources",
    "pipeline.train",
)
OF_OTHERS = {
    "tensordict": ("TensorDict", "LazyStackedTensorDict", "NonTensorData"),
    "torchrl.collectors": ("Collector", "MultiCollector"),
    "torchrl.collectors.llm": ("LLMCollector",),
    "torchrl.data": ("ReplayBuffer",),
    "torchrl.objectives.llm": ("CISPOLoss", "DAPO", "GRPOLoss", "MCAdvantage"),
}


def names_in(package: str) -> list[str]:
    """The `__all__` of a package, read from its text: to import it may bring torch along."""
    text = FOLDER.joinpath(*package.split("."), "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


HOMES = {name: package for package in ("pipeline", "transforms") for name in names_in(package)}

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
    return sorted(["__version__", *HOMES, *PACKAGES])


def hint(name: str) -> str:
    """Where a name is that is not here, or which is meant; nothing for those that Python asks for itself."""
    if name.startswith("_"):
        return ""
    for package in INNER:
        if name in names_in(package):
            return f": it is headrace.{package}.{name}"
    for module, names in OF_OTHERS.items():
        if name in names:
            return f": it is {module}.{name}"
    if (FOLDER / "conf" / "pipeline" / f"{name}.yaml").exists():
        return f": it is a recipe, headrace.load_pipeline({name!r})"
    from .pipeline.wording import suggest

    return suggest(name, __dir__()) or "; dir(headrace) lists the public names"

"""A recipe with one group an optimiser step, as a certificate is of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, open_dict

from headrace.pipeline.load import build_pipeline
from headrace.pipeline.pipeline import Pipeline

from .small_task import SmallTask

CUT = {
    "minibatches": None,
    "minibatch_size": 1,
    "unit": "group",
    "remainder": "raise",
    "microbatches": None,
    "microbatch_size": None,
    "max_tokens": None,
    "multiple_of": 1,
    "ranks": 1,
    "rank": None,
    "shuffle": False,
}
"""Options of the stage that cuts the batch: each group is a step, in order, on one rank."""


def one_group_a_step(config: DictConfig, task: SmallTask, words: Sequence[str] = ()) -> Pipeline:
    """Build a composed ``pipeline`` node for the groups of a task, one group an optimiser step.

    What is changed is how a batch is cut, by the stage's trait `cuts`; that the gate learns the size of
    groups from their column, by its trait `gates`; that weights are written and not folded into the
    advantage, which is the same loss; how many rewards there are; and what the task itself needs (its
    `settings`), where the recipe leaves it at its default. Everything else is the recipe's.

    Args:
        config: composed; it is left alone.
        task: whose rows are to pass.
        words: overrides of the command line; what they set, no setting of the task changes.

    Raises:
        ConfigError: as :func:`build_pipeline`.
    """
    node = copy.deepcopy(config)
    stages = node.get("stages") or {}
    settings: dict[str, Any] = {"collapse.columns": task.columns, **task.settings}
    with open_dict(node):
        if "process_group" in node:
            node["process_group"] = None  # all outcomes are here
        for name, stage in stages.items():
            if stage is None or "_target_" not in stage:
                continue
            traits = _class_of(stage)
            options: dict[str, Any] = {}
            if getattr(traits, "cuts", False):
                options |= CUT
            if getattr(traits, "gates", False):
                options["group_size"] = None
            options["fold"] = "none"
            options |= {
                option: value
                for option, value in _settings_of(str(name), settings, words).items()
                if option == "columns" or _by_default(traits, option, stage.get(option))
            }
            for option in options.keys() & set(stage.keys()):
                stage[option] = options[option]
    return build_pipeline(node)


def _class_of(stage: DictConfig) -> Any:
    """The class of a stage; None where it cannot be imported, which :func:`build_pipeline` says."""
    try:
        return get_object(str(stage["_target_"]))
    except Exception:
        return None


def _by_default(stage: Any, option: str, value: Any) -> bool:
    """Whether an option is as the stage's signature has it: a recipe that sets another means it."""
    parameter = inspect.signature(stage).parameters.get(option) if callable(stage) else None
    return parameter is None or parameter.default == value


def _settings_of(name: str, settings: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The settings of one stage that no word of the user sets."""
    return {
        path.partition(".")[2]: value
        for path, value in settings.items()
        if path.partition(".")[0] == name
        and not any(word.lstrip("+").startswith(f"pipeline.stages.{path}=") for word in words)
    }

"""Which recipe an adapter runs that a trainer knows by an import path alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from headrace.pipeline import Decider, Decision, Pipeline, load_pipeline
from headrace.pipeline.decision import refuse_state
from headrace.pipeline.halves import before_the_cut

RECIPE, OVERRIDES = "HEADRACE_RECIPE", "HEADRACE_OVERRIDES"


def recipe_of_environment(default: str, *words: str) -> Pipeline:
    """The recipe that the environment names: HEADRACE_RECIPE, changed by HEADRACE_OVERRIDES.

    The trainer calls a function in a process that it started, with arguments of its own: what reaches all of
    them is the environment. HEADRACE_OVERRIDES has Hydra overrides as on a command line, between spaces. Both
    are read at each call, and what was composed once is kept.

    Args:
        default: without HEADRACE_RECIPE.
        words: overrides in front of those of the environment.

    Raises:
        ConfigError: as :func:`load_pipeline`.
        ValueError: a recipe that remembers something from batch to batch: the trainer would not save it.

    Example:
        >>> os.environ["HEADRACE_OVERRIDES"] = "pipeline.stages.gate.group_size=4 ~pipeline.stages.filter"
        >>> recipe_of_environment("grpo").order
        ['gate', 'collapse', 'advantage']
        >>> del os.environ["HEADRACE_OVERRIDES"]
    """
    said = shlex.split(os.environ.get(OVERRIDES, ""))
    return _decider(os.environ.get(RECIPE, default), (*words, *said)).pipeline


def decide_here(default: str, columns: Mapping[str, Any], *words: str) -> Decision:
    """What that recipe decides about rows; of the columns those that it reads.

    Args:
        default: as of :func:`recipe_of_environment`.
        columns: as of :func:`headrace.decide`.
        words: as of :func:`recipe_of_environment`.
    """
    said = shlex.split(os.environ.get(OVERRIDES, ""))
    decider = _decider(os.environ.get(RECIPE, default), (*words, *said))
    return decider.decide({name: values for name, values in columns.items() if decider.reads(name)})


@cache
def _decider(recipe: str, words: tuple[str, ...]) -> Decider:
    pipeline = load_pipeline(recipe, *words)
    refuse_state(pipeline)
    return Decider(before_the_cut(pipeline))

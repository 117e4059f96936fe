"""Which recipe an adapter runs that a trainer knows by an import path alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from headrace.pipeline import Decider, Decision, Pipeline, advantages_of, load_pipeline
from headrace.pipeline.decision import refuse_state
from headrace.pipeline.halves import before_the_split, part_of
from headrace.transforms import MissingKeyError, TokenAdvantage

from .before_rollouts import require_columns, scale_overrides

RECIPE, OVERRIDES = "HEADRACE_RECIPE", "HEADRACE_OVERRIDES"
Part = Literal["advantages", "rows", "whole"]


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
    return _decider(default, words).pipeline


def check_recipe(
    default: str,
    hook: str,
    columns: Sequence[str],
    *,
    of_tokens: bool = False,
    part: Part = "advantages",
) -> None:
    """Refuse, before any rollout, a recipe of the environment variables that is unknown or does not fit.

    Args:
        default: see :func:`recipe_of_environment`.
        hook: name of the trainer, for the message.
        columns: those that the hook has, see :func:`require_columns`.
        of_tokens: see :func:`require_columns`.
        part: see :func:`decide_here`.

    Raises:
        ConfigError, ValueError: see :func:`recipe_of_environment`.
        MissingKeyError: the recipe reads another column.
    """
    with options_are_words():
        require_columns(_decider(default, (), part).pipeline, columns, hook, of_tokens=of_tokens)


def scale_here(default: str, trainers: Any) -> tuple[str, ...]:
    """The override that gives the default recipe the trainer's scale, see :func:`scale_overrides`."""
    return scale_overrides(trainers, os.environ.get(RECIPE), default, _overrides())


def decide_here(default: str, columns: Mapping[str, Any], *words: str, part: Part = "advantages") -> Decision:
    """What that recipe decides about rows; of the columns those that it reads.

    Args:
        default: as of :func:`recipe_of_environment`.
        columns: as of :func:`headrace.decide`.
        words: as of :func:`recipe_of_environment`.
        part: ``advantages``, the stages in front of the cut; ``rows``, those without their
            :func:`token_stages`; ``whole``, cut and weight, too.
    """
    decider = _decider(default, words, part)
    with options_are_words():
        return decider.decide({name: values for name, values in columns.items() if decider.reads(name)})


def advantages_by_uid(
    default: str, token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], *words: str
) -> Tensor:
    """(N, T) advantages by that recipe of rows that are a rollout each, as verl and SkyRL see them.

    Args:
        default: as of :func:`recipe_of_environment`.
        token_level_rewards: (N, T) float, added up over a row.
        response_mask: (N, T), 1 at tokens in the loss.
        index: the group of each row.
        words: as of :func:`recipe_of_environment`.
    """
    batch = TensorDict({"group_id": [str(uid) for uid in index]}, [len(index)], device=response_mask.device)
    batch["rollout_id"] = torch.arange(len(index), device=response_mask.device)
    batch["next", "reward"] = token_level_rewards.sum(-1)
    batch["masks", "all_assistant_mask"] = response_mask.bool()
    with options_are_words():
        return advantages_of(recipe_of_environment(default, *words), batch).advantage * response_mask


@contextmanager
def options_are_words() -> Iterator[None]:
    """Say of a column that is not there where the options are that an error names.

    Raises:
        MissingKeyError: the same, with the variables.
    """
    try:
        yield
    except MissingKeyError as err:
        raise MissingKeyError(
            "{why}. Options are overrides of the recipe {recipe}, in the environment of every process: "
            f'{OVERRIDES}="pipeline.stages.gate.group_size=8"',
            why=str(err),
            recipe=os.environ.get(RECIPE) or "by default",
        ) from err


def token_stages(pipeline: Pipeline) -> dict[str, TokenAdvantage]:
    """The stages that change the advantage of each token by its own numbers, last in front of the cut.

    Raises:
        ValueError: one of them compares rows, or a stage comes after it.
    """
    names = [name for name, stage in pipeline.stages.items() if isinstance(stage, TokenAdvantage)]
    refused = [name for name in names if not getattr(pipeline.stages[name].term, "elementwise", False)]
    if refused or names != (pipeline.order[-len(names) :] if names else []):
        raise ValueError(
            "the trainer's function sees some rows at a time and no group: the stages of tokens must come "
            f"last, and change each token by its own numbers; found {', '.join(pipeline.order)}"
            + (f", of which {', '.join(refused)} compare rows" if refused else "")
        )
    return {name: pipeline.stages[name] for name in names}


def _overrides() -> list[str]:
    return shlex.split(os.environ.get(OVERRIDES, ""))


def _decider(default: str, words: tuple[str, ...], part: Part = "advantages") -> Decider:
    return _composed(os.environ.get(RECIPE, default), (*words, *_overrides()), part)


@cache
def _composed(recipe: str, words: tuple[str, ...], part: Part) -> Decider:
    whole = load_pipeline(recipe, *words)
    refuse_state(whole)
    if part == "whole":
        return Decider(whole)
    first = before_the_split(whole)
    if part == "advantages":
        return Decider(first)
    by_token = token_stages(first)
    return Decider(part_of(first, [name for name in first.order if name not in by_token], None))

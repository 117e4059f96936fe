"""Find the recipe for an adapter that a trainer calls by an import path."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from headrace.pipeline import Decider, Decision, Pipeline, advantages_of, load_pipeline
from headrace.pipeline.halves import before_the_split, part_of
from headrace.pipeline.tools.decide import refuse_state
from headrace.transforms import MissingKeyError, TokenAdvantage

RECIPE, OVERRIDES = "HEADRACE_RECIPE", "HEADRACE_OVERRIDES"
Part = Literal["advantages", "rows", "whole"]


def recipe_of_environment(default: str, *words: str) -> Pipeline:
    """Return the recipe that the environment names: HEADRACE_RECIPE, changed by HEADRACE_OVERRIDES.

    The trainer calls the adapter with arguments of its own, in processes that the trainer starts. So only the
    environment can name the recipe. HEADRACE_OVERRIDES has Hydra overrides, separated by spaces, as on a
    command line. Both variables are read at each call. Composed recipes are cached.

    Args:
        default: name of the recipe if HEADRACE_RECIPE is not set.
        words: overrides that come before the overrides of the environment.

    Raises:
        ConfigError: see :func:`load_pipeline`.
        ValueError: the recipe has a state from batch to batch, which the trainer would not save.

    Example:
        >>> os.environ["HEADRACE_OVERRIDES"] = "pipeline.stages.gate.group_size=4 ~pipeline.stages.filter"
        >>> recipe_of_environment("grpo").order
        ['gate', 'collapse', 'advantage']
        >>> del os.environ["HEADRACE_OVERRIDES"]
    """
    return _decider(default, words).pipeline


def scale_of(trainers: Any) -> str:
    """Return the scale for a trainer's setting: ``group`` (or True), ``batch`` or ``none`` (or False).

    Example:
        >>> scale_of(True), scale_of("batch")
        ('group', 'batch')
    """
    return {"True": "group", "False": "none"}.get(str(trainers), str(trainers))


def scale_overrides(
    trainers: Any, recipe: str | None, default: str, overrides: Iterable[str]
) -> tuple[str, ...]:
    """Return the override that gives the default recipe the trainer's scale.

    Return no override if you name another recipe, or set the scale yourself.

    Args:
        trainers: the trainer's setting, as for :func:`scale_of`.
        recipe: the recipe that you name; None: the default recipe.
        default: name of the adapter's default recipe.
        overrides: your overrides.

    Example:
        >>> scale_overrides(False, None, "as/verl", ["pipeline.stages.gate.group_size=8"])
        ('pipeline.stages.advantage.scale=none',)
        >>> scale_overrides(False, None, "as/verl", ["pipeline.stages.advantage.scale=batch"])
        ()
    """
    if recipe not in (None, default) or sets_option("advantage.scale", overrides):
        return ()
    return (f"pipeline.stages.advantage.scale={scale_of(trainers)}",)


def sets_option(option: str, overrides: Iterable[str]) -> bool:
    """Whether overrides set an option of a stage, or replace or remove the stage.

    Example:
        >>> sets_option("advantage.scale", ["pipeline.stages.advantage={clip: [-5, 5]}"])
        False
        >>> sets_option("advantage.scale", ["pipeline.stages.advantage={scale: none}"])
        True
    """
    stage, _, name = option.partition(".")
    # A mapping of options is merged with the recipe's options, unless the mapping names a class.
    values = rf"(\.{name}(=.*)?|=(?!\{{).*|=.*\b({name}|_target_)\b.*)?"
    word = re.compile(rf"[+~]*(\S*@)?pipeline\.stages\.{stage}{values}", re.DOTALL)
    return any(word.fullmatch(each) for each in overrides)


def scale_here(default: str, trainers: Any) -> tuple[str, ...]:
    """Return the override that gives the default recipe the trainer's scale, see :func:`scale_overrides`."""
    return scale_overrides(trainers, os.environ.get(RECIPE), default, _overrides())


def decide_here(default: str, columns: Mapping[str, Any], *words: str, part: Part = "advantages") -> Decision:
    """Return what the recipe of the environment decides about rows. It gets only the columns that it reads.

    Args:
        default: see :func:`recipe_of_environment`.
        columns: see :func:`headrace.decide`.
        words: see :func:`recipe_of_environment`.
        part: the stages that run. ``advantages``: those before the split. ``rows``: those before the split
            except the :func:`token_stages`. ``whole``: all stages, with split and weight.
    """
    decider = _decider(default, words, part)
    with options_are_words():
        return decider.decide({name: values for name, values in columns.items() if decider.reads(name)})


def advantages_by_uid(
    default: str, token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], *words: str
) -> Tensor:
    """Compute (N, T) advantages with the recipe of the environment, for trainers with a row per rollout.

    Args:
        default: see :func:`recipe_of_environment`.
        token_level_rewards: (N, T) float; their sum over a row is its reward.
        response_mask: (N, T), 1 at tokens in the loss.
        index: the group of each row.
        words: see :func:`recipe_of_environment`.
    """
    batch = TensorDict({"group_id": [str(uid) for uid in index]}, [len(index)], device=response_mask.device)
    batch["rollout_id"] = torch.arange(len(index), device=response_mask.device)
    batch["next", "reward"] = token_level_rewards.sum(-1)
    batch["masks", "all_assistant_mask"] = response_mask.bool()
    with options_are_words():
        return advantages_of(recipe_of_environment(default, *words), batch).advantage * response_mask


@contextmanager
def options_are_words() -> Iterator[None]:
    """Let the error for a missing column say where to set the options that it names.

    Raises:
        MissingKeyError: the error with this hint.
    """
    try:
        yield
    except MissingKeyError as err:
        err.more += (
            ". Options are overrides of the recipe, in the environment of every process: "
            f'{OVERRIDES}="pipeline.stages.gate.group_size=8"'
        )
        raise


def token_stages(pipeline: Pipeline) -> dict[str, TokenAdvantage]:
    """Return the token stages of a recipe, which change each token's advantage from its own numbers alone.

    Raises:
        ValueError: a token stage compares rows, or a stage of another kind comes after it.
    """
    names = [name for name, stage in pipeline.stages.items() if isinstance(stage, TokenAdvantage)]
    refused = [name for name in names if not getattr(pipeline.stages[name].term, "elementwise", False)]
    if refused or names != (pipeline.order[-len(names) :] if names else []):
        raise ValueError(
            "the trainer's function sees only some rows, without their groups: stages of tokens must come "
            f"last, and change each token from its own numbers; found {', '.join(pipeline.order)}"
            + (f"; these compare rows: {', '.join(refused)}" if refused else "")
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

"""A recipe in a trainer that is an object."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeVar

from typing_extensions import Unpack

from headrace.pipeline import Pipeline, Run
from headrace.pipeline.load import KEYWORDS, PipelineOptions, settings_of, shows_options
from headrace.pipeline.tools.decide import pipeline_of

from .environment import scale_overrides, sets_option

OBJECTS = {"swift": "as/trl", "trl": "as/trl"}  # packages of trainers, a subclass in front of its base

Trainer = TypeVar("Trainer")


def log_run(trainer: Any, run: Run) -> None:
    """Keep what the recipe made of a batch, and log its metrics among the trainer's own."""
    run.step = trainer.state.global_step
    trainer.last_run = run
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in run.metrics.items():
        logged[f"headrace/{name}"].append(value)


@shows_options
def attach(
    trainer: Trainer,
    recipe: str | Pipeline | None = None,
    *overrides: str,
    **options: Unpack[PipelineOptions],
) -> Trainer:
    """Make the advantages of a trainer of TRL or ms-swift those of a recipe.

    Its class becomes a subclass of its own, so that what the trainer does else, and what a subclass of yours
    does, stays. `trainer.pipeline` is the recipe; it may be changed between steps, and one that remembers
    something has its state there: `trainer.pipeline.state_dict()`. `trainer.last_run` is the last batch's
    :class:`Run`, and its report has the trainer's global step. Its metrics are logged among the trainer's
    own, under ``headrace/``. Several reward functions are as many columns of rewards.

    Args:
        trainer: a ``GRPOTrainer``, before ``train()``.
        recipe: its name, or a pipeline; by default the one that computes what the trainer computes,
            by its `scale_rewards`, unless you set the scale. Options that you set change no other.
        overrides: as of :func:`load_pipeline`.
        options: keywords of :func:`load_pipeline`.

    Returns:
        The trainer.

    Raises:
        TypeError: a trainer that has no such hook; docs/coming-from/ has the way for others.
        ValueError: the trainer has a recipe already, weighs rewards itself, or a pipeline comes with options.
        ConfigError: as :func:`load_pipeline`.

    Example:
        >>> try:
        ...     attach(object(), "grpo")
        ... except TypeError as error:
        ...     print(str(error).partition(". ")[0])
        attach takes a GRPOTrainer of trl or swift; got a builtins.object
    """
    homes = {base.__module__.partition(".")[0] for base in type(trainer).__mro__}
    found = [name for name in OBJECTS if name in homes and hasattr(trainer, "reward_weights")]
    if not found:
        raise TypeError(
            f"attach takes a GRPOTrainer of {' or '.join(sorted(OBJECTS, reverse=True))}; got a "
            f"{type(trainer).__module__}.{type(trainer).__qualname__}. Others take an import path in their "
            "configuration: docs/coming-from/README.md"
        )
    if isinstance(getattr(trainer, "pipeline", None), Pipeline):
        raise ValueError("this trainer has a recipe already: set trainer.pipeline to change it")
    rewards = len(trainer.reward_weights)  # type: ignore[attr-defined]
    if not isinstance(recipe, Pipeline):
        keywords = {word: value for word, value in options.items() if word in KEYWORDS and value is not ...}
        settings = settings_of(overrides, keywords, options.get("stages") or {})
        set_here = [*overrides, *(f"pipeline.{key}" for key in settings)]
        scale = getattr(trainer, "scale_rewards", "group")
        of_trainer = scale_overrides(scale, recipe, OBJECTS[found[0]], set_here)
        if of_trainer:
            refuse_separate_rewards(trainer)
        if rewards > 1 and not sets_option("collapse.columns", set_here):
            of_trainer = (f"pipeline.stages.collapse.columns={rewards}", *of_trainer)
        overrides = (*of_trainer, *overrides)
    pipeline = pipeline_of(recipe or OBJECTS[found[0]], *overrides, **options)
    if (trainer.reward_weights != 1).any():  # type: ignore[attr-defined]
        weights = f"[{','.join(f'{float(each):g}' for each in trainer.reward_weights)}]"  # type: ignore[attr-defined]
        raise ValueError(
            "the recipe weighs rewards: remove reward_weights from the trainer, and give attach "
            f"'pipeline.stages.collapse.columns={rewards}', 'pipeline.stages.collapse.weights={weights}'"
        )
    adapter = import_module(f"headrace.adapters.{found[0]}")
    trainer.__class__ = type(type(trainer).__name__, (adapter.RecipeAdvantages, type(trainer)), {})
    trainer.pipeline = pipeline  # type: ignore[attr-defined]
    return trainer


def refuse_separate_rewards(trainer: Any) -> None:
    """Refuse a trainer that normalizes each reward before it adds them up, which the default recipe does not.

    Raises:
        ValueError: it does.
    """
    together = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize")
    if together != "sum_then_normalize":
        raise ValueError(
            f"the default recipe adds rewards up before it normalizes them, and the trainer has "
            f"multi_objective_aggregation={together!r}: name a recipe, attach(trainer, 'gdpo')"
        )

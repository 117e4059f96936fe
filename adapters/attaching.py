"""A recipe in a trainer that is an object."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, TypeVar

from typing_extensions import Unpack

from headrace.pipeline import Pipeline, Run
from headrace.pipeline.load import KEYWORDS, PipelineOptions, settings_of, shows_options
from headrace.pipeline.tools.decide import pipeline_of
from headrace.transforms import SampleFilter

from .environment import sets_option
from .over_generation import check_over_generation

log = logging.getLogger(__name__)

DEFAULT = "as/trl"
TRAINERS = {  # by package and class: the adapter's variant
    ("swift", "GRPOTrainer"): "RecipeAdvantages",
    ("trl", "GRPOTrainer"): "RecipeAdvantages",
    ("trl", "RLOOTrainer"): "RecipeAdvantagesOfRows",
    ("trl", "AsyncGRPOTrainer"): "RecipeAdvantagesOfQueue",
    ("trl", "_UnslothGRPOTrainer"): "RecipeAdvantagesOfUnsloth",  # Unsloth's rewritten copy of TRL's
}

Trainer = TypeVar("Trainer")


class Follows:
    """What the default recipe takes from a trainer's settings; adapters derive from it."""

    @staticmethod
    def check(trainer: Any) -> None:
        """Check the trainer's settings.

        Raises:
            ValueError: one of them would have no effect.
        """

    @staticmethod
    def of_trainer(trainer: Any) -> dict[str, str]:
        """Options of the default recipe that follow the trainer's settings."""
        scale = str(getattr(trainer, "scale_rewards", "group"))
        return {"advantage.scale": {"True": "group", "False": "none"}.get(scale, scale)}


def log_run(trainer: Any, run: Run, training: bool | None = None) -> None:
    """Keep what the recipe made of a batch, and log its metrics among the trainer's own."""
    run.step = trainer.state.global_step
    trainer.last_run = run
    training = trainer.model.training if training is None else training
    logged = trainer._metrics["train" if training else "eval"]
    for name, value in run.metrics.items():
        logged[f"headrace/{name}"].append(value)


@shows_options
def attach(
    trainer: Trainer,
    recipe: str | Pipeline | None = None,
    *overrides: str,
    over_generation: int = 1,
    **options: Unpack[PipelineOptions],
) -> Trainer:
    """Make the advantages of a trainer of TRL or ms-swift those of a recipe.

    Its class becomes a subclass of its own, so that what the trainer does else, and what a subclass of yours
    does, stays. `trainer.pipeline` is the recipe; it may be changed between steps, and one that remembers
    something has its state there: `trainer.pipeline.state_dict()`. `trainer.last_run` is the last batch's
    :class:`Run`, and its report has the trainer's global step. Its metrics are logged among the trainer's
    own, under ``headrace/``. Several reward functions are as many columns of rewards.

    Args:
        trainer: a ``GRPOTrainer``, also as Unsloth patches it, or TRL's ``RLOOTrainer`` or
            ``AsyncGRPOTrainer``, before ``train()``.
        recipe: its name, or a pipeline; by default the one that computes what the trainer computes: for
            RLOOTrainer with the leave-one-out baseline, for others by its `scale_rewards`. Options that you
            set change no other.
        overrides: as of :func:`load_pipeline`.
        over_generation: k ≥ 1, for TRL. Of the completions that TRL generates, 1/k are trained: the first
            groups that pass the recipe's filter. The others have the reason ``over_generation/left_over``.
            `per_device_train_batch_size` counts what is generated, so it must be k times as large.
        options: keywords of :func:`load_pipeline`.

    Returns:
        The trainer.

    Raises:
        TypeError: a trainer that has no such hook; docs/coming-from/ has the way for others.
        ValueError: the trainer has a recipe already or weighs rewards itself, a pipeline comes with options,
            or a setting of the trainer would have no effect.
        ConfigError: as :func:`load_pipeline`.

    Example:
        >>> try:
        ...     attach(object(), "grpo")
        ... except TypeError as error:
        ...     print(str(error).partition("; ")[0])
        attach takes a GRPOTrainer of trl, unsloth or swift, or trl's RLOOTrainer or AsyncGRPOTrainer
    """
    it: Any = trainer
    bases = [(package_of(base), base.__name__) for base in type(trainer).__mro__]
    found = [key for key in bases if key in TRAINERS]
    kind = found[0][1] if found else ""
    asynchronous = kind == "AsyncGRPOTrainer"  # it adds rewards up in another process, without weights
    if not (asynchronous or (kind and hasattr(trainer, "reward_weights"))):
        raise TypeError(
            "attach takes a GRPOTrainer of trl, unsloth or swift, or trl's RLOOTrainer or AsyncGRPOTrainer; "
            f"got a {type(trainer).__module__}.{type(trainer).__qualname__}. Others take an import path in "
            "their configuration: docs/coming-from/README.md"
        )
    if isinstance(getattr(trainer, "pipeline", None), Pipeline):
        raise ValueError("this trainer has a recipe already: set trainer.pipeline to change it")
    package = found[0][0]
    module = "trl_async" if asynchronous else package
    variant = getattr(import_module(f"headrace.adapters.{module}"), TRAINERS[found[0]])
    variant.check(trainer)
    weights = [] if asynchronous else it.reward_weights.tolist()
    rewards = len(weights)
    if not isinstance(recipe, Pipeline):
        keywords = {word: value for word, value in options.items() if word in KEYWORDS and value is not ...}
        settings = settings_of(overrides, keywords, options.get("stages") or {})
        set_here = [*overrides, *(f"pipeline.{key}" for key in settings)]
        follows = variant.of_trainer(trainer) if recipe in (None, DEFAULT) else {}
        of_trainer = {key: value for key, value in follows.items() if not sets_option(key, set_here)}
        if "advantage.scale" in of_trainer:
            refuse_separate_rewards(trainer)
        if rewards > 1 and not sets_option("collapse.columns", set_here):
            of_trainer["collapse.columns"] = str(rewards)
        overrides = (*(f"pipeline.stages.{key}={value}" for key, value in of_trainer.items()), *overrides)
    pipeline = pipeline_of(recipe or DEFAULT, *overrides, **options)
    if any(weight != 1 for weight in weights):
        listed = f"[{','.join(f'{weight:g}' for weight in weights)}]"
        raise ValueError(
            "the recipe weighs rewards: remove reward_weights from the trainer, and give attach "
            f"'pipeline.stages.collapse.columns={rewards}', 'pipeline.stages.collapse.weights={listed}'"
        )
    if over_generation != 1 and (package != "trl" or asynchronous):
        raise ValueError(
            "over_generation is an option for TRL's GRPOTrainer and RLOOTrainer; the others sample new "
            "prompts for groups that a filter drops: AsyncGRPOTrainer always, ms-swift by dynamic_sample=true"
        )
    if package == "trl" and not asynchronous:
        check_over_generation(trainer, pipeline, over_generation)
        it.over_generation = over_generation
    if over_generation == 1 and not asynchronous:
        warn_of_fewer_rows(kind, package, pipeline)
    it.__class__ = type(type(trainer).__name__, (variant, type(trainer)), {})
    it.pipeline = pipeline
    return trainer


INSTEAD = {
    "trl": "attach(trainer, ..., over_generation=2) samples twice as many groups and trains those that pass",
    "swift": "set dynamic_sample=true, and ms-swift samples other groups",
}


def warn_of_fewer_rows(kind: str, package: str, pipeline: Pipeline) -> None:
    """Log a warning if a filter drops rows, for which the trainer samples no others."""
    drops = [
        name
        for name, stage in pipeline.stages.items()
        if isinstance(stage, SampleFilter) and stage.action == "drop"
    ]
    if drops:
        log.warning(
            "the recipe drops rows (%s), and %s samples no new prompts in their place: a step trains fewer "
            "rows, see headrace/rows/trained in its log. %s",
            ", ".join(drops),
            kind,
            INSTEAD[package],
        )


def package_of(kind: type) -> str:
    """The package of a class. Unsloth writes its own to a module that is in none."""
    return "trl" if kind.__name__.startswith("_Unsloth") else kind.__module__.partition(".")[0]


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

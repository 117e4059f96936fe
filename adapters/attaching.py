"""Attach a recipe to a trainer that is an object."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

from tensordict import NestedKey
from typing_extensions import Unpack

from headrace.pipeline import Pipeline, Run
from headrace.pipeline.halves import before_the_split
from headrace.pipeline.load import KEYWORDS, PipelineOptions, settings_of, shows_options
from headrace.pipeline.tools.decide import pipeline_of
from headrace.transforms import CompletenessGate, SampleFilter
from headrace.transforms.table import COLUMNS, listing

from .environment import scale_of, sets_option
from .over_generation import check_over_generation

DEFAULT = "as/trl"
TRAINERS = {  # by package and class of the trainer: the class of the adapter
    ("swift", "GRPOTrainer"): "RecipeAdvantages",
    ("trl", "GRPOTrainer"): "RecipeAdvantages",
    ("trl", "RLOOTrainer"): "RecipeAdvantagesOfRows",
    ("trl", "AsyncGRPOTrainer"): "RecipeAdvantagesOfQueue",
    ("trl", "_UnslothGRPOTrainer"): "RecipeAdvantagesOfUnsloth",  # Unsloth's rewritten copy of TRL's
}

GIVEN: frozenset[NestedKey | None] = frozenset(
    ["status", *(COLUMNS[role].default for role in ("group", "rollout", "expected", "reward", "loss_mask"))]
)
IF_THERE = frozenset(COLUMNS[role].default for role in ("done", "init", "expected_segments"))

Trainer = TypeVar("Trainer")


class FewerRowsWarning(UserWarning):
    """A trainer trains fewer rows than it generates, because a recipe takes some out."""


class Follows:
    """The base class of adapters. It names the trainer's settings that the default recipe follows."""

    gives: frozenset[NestedKey | None] | None = None
    """Columns that the recipe gets; None: not known, so a missing column is an error at the first step."""
    followed: Mapping[str, str]
    """Options of the recipe that follow the trainer's settings, by stage and option."""

    def __repr__(self: Any) -> str:
        taken = ", ".join(f"{key}={value}" for key, value in self.followed.items()) or "no option"
        return f"<{type(self).__name__}: {' → '.join(self.pipeline.order)}; from the trainer: {taken}>"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A new recipe is checked, because you may change it during training."""
        if name == "pipeline":
            check_recipe(self, value, self.gives)
        super().__setattr__(name, value)

    @staticmethod
    def check(trainer: Any) -> None:
        """Check the trainer's settings.

        Raises:
            ValueError: a setting would have no effect.
        """

    @staticmethod
    def of_trainer(trainer: Any) -> dict[str, str]:
        """Options of the default recipe that follow the trainer's settings."""
        return {"advantage.scale": scale_of(getattr(trainer, "scale_rewards", "group"))}


def log_run(trainer: Any, run: Run, training: bool | None = None) -> None:
    """Keep the recipe's run of a batch, and log the run's metrics among the trainer's own."""
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
    """Let a recipe compute the advantages of a trainer of TRL or ms-swift.

    The trainer gets a subclass of its own class, so everything else works as before, even if that class is
    your own. `trainer.pipeline` is the recipe. You may change it between steps. If the recipe has a
    state, save `trainer.pipeline.state_dict()`. `trainer.last_run` is the last batch's :class:`Run`, and its
    report has the trainer's global step. The metrics of the run are logged among the trainer's own, under
    ``headrace/``.
    With several reward functions, each is a column of rewards.

    Args:
        trainer: a ``GRPOTrainer`` of TRL, Unsloth or ms-swift, or TRL's ``RLOOTrainer`` or
            ``AsyncGRPOTrainer``. Attach the recipe before you call ``train()``.
        recipe: a name, or a pipeline. The default recipe computes the trainer's own advantages. Options that
            you do not set follow the trainer.
        overrides: Hydra overrides, see :func:`load_pipeline`.
        over_generation: k ≥ 1, for TRL. Of the completions that TRL generates, 1/k are trained: the first
            groups that pass the recipe's filter. Other groups have the reason ``over_generation/left_over``.
            `per_device_train_batch_size` counts what is generated, so it must be k times as large.
        options: keywords of :func:`load_pipeline`.

    Returns:
        The trainer. Its repr names the stages, and the options that follow the trainer.

    Raises:
        TypeError: the trainer is another object; see docs/coming-from/ for other trainers.
        ValueError: the trainer has a recipe already or weighs rewards itself, a pipeline comes with options,
            a setting of the trainer would have no effect, the recipe reads columns that the trainer does not
            give, the recipe's `group_size` is not `num_generations`, or the trainer cannot over-generate.
        ConfigError: see :func:`load_pipeline`.

    Example:
        >>> try:
        ...     attach(object(), "grpo")
        ... except TypeError as error:
        ...     print(str(error).partition("; ")[0])
        attach takes a GRPOTrainer of trl, unsloth or swift, or trl's RLOOTrainer or AsyncGRPOTrainer
    """
    it: Any = trainer
    bases = [(package_of(base), base.__name__) for base in type(trainer).__mro__]
    package, kind = next((key for key in bases if key in TRAINERS), ("", ""))
    asynchronous = kind == "AsyncGRPOTrainer"  # which adds rewards up in another process, without weights
    if not (asynchronous or (kind and hasattr(trainer, "reward_weights"))):
        raise TypeError(
            "attach takes a GRPOTrainer of trl, unsloth or swift, or trl's RLOOTrainer or AsyncGRPOTrainer; "
            f"got a {type(trainer).__module__}.{type(trainer).__qualname__}. Other trainers take an import "
            "path in their configuration: docs/coming-from/README.md"
        )
    if isinstance(getattr(trainer, "pipeline", None), Pipeline):
        raise ValueError("this trainer has a recipe already: set trainer.pipeline to change it")
    module = "trl_async" if asynchronous else package
    variant = getattr(import_module(f"headrace.adapters.{module}"), TRAINERS[package, kind])
    variant.check(trainer)
    of_trainer = dict[str, str]()
    weights = [] if asynchronous else it.reward_weights.tolist()
    rewards = len(weights)
    if not isinstance(recipe, Pipeline):
        keywords = {word: value for word, value in options.items() if word in KEYWORDS and value is not ...}
        settings = settings_of(overrides, keywords, options.get("stages") or {})
        set_here = [*overrides, *(f"pipeline.{key}" for key in settings)]
        follows = variant.of_trainer(trainer) if recipe in (None, DEFAULT) else {}
        of_trainer |= {key: value for key, value in follows.items() if not sets_option(key, set_here)}
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
    check_recipe(trainer, pipeline, variant.gives)
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
    it.pipeline, it.followed = pipeline, of_trainer
    return trainer


INSTEAD = {
    "trl": "attach(trainer, ..., over_generation=2) samples twice as many groups and trains those that pass",
    "swift": "set dynamic_sample=true, and ms-swift samples other groups",
}


def warn_of_fewer_rows(kind: str, package: str, pipeline: Pipeline) -> None:
    """Warn if a filter drops rows and the trainer samples no new prompts in their place."""
    drops = [
        name
        for name, stage in pipeline.stages.items()
        if isinstance(stage, SampleFilter) and stage.action == "drop"
    ]
    if drops:
        warnings.warn(
            f"the recipe drops rows ({', '.join(drops)}), and {kind} samples no new prompts in their place: "
            f"a step trains fewer rows, see headrace/rows/trained in its log. {INSTEAD[package]}",
            FewerRowsWarning,
            stacklevel=3,
        )


def warn_of_no_rows(trainer: Any) -> None:
    """Warn, once for each trainer, that no row of a batch trains."""
    if not getattr(trainer, "_warned_of_no_rows", False):
        trainer._warned_of_no_rows = True
        warnings.warn(
            f"no row of the batch of step {trainer.state.global_step} trains: the recipe took out all. "
            "trainer.last_run.report() has the reasons. This warning appears once; headrace/rows/trained in "
            "the log is the number of rows of each step that train",
            FewerRowsWarning,
            stacklevel=3,
        )


def check_recipe(trainer: Any, recipe: Any, gives: frozenset[NestedKey | None] | None) -> None:
    """Check that a trainer can run a recipe.

    Args:
        trainer: the trainer.
        recipe: the recipe that the user gives.
        gives: columns that the recipe gets; None: not known.

    Raises:
        TypeError: the recipe is not a pipeline.
        ValueError: its `group_size` is not the trainer's `num_generations`, or a stage reads a column that
            the recipe does not get.
    """
    if not isinstance(recipe, Pipeline):
        name = recipe if isinstance(recipe, str) else "grpo"
        raise TypeError(
            f"trainer.pipeline must be a pipeline; got {recipe!r:.200}. "
            f"Set trainer.pipeline = headrace.load_pipeline({name!r})"
        )
    size = getattr(
        trainer, "num_generations", getattr(getattr(trainer, "args", None), "num_generations", None)
    )
    for name, stage in recipe.stages.items():
        if isinstance(stage, CompletenessGate) and size and stage.group_size not in (None, size):
            raise ValueError(
                f"groups have one size: stage {name!r} has group_size={stage.group_size}, and the trainer "
                f"num_generations={size}. Leave group_size out: the adapter gives the stage the trainer's"
            )
    if gives is None:
        return
    stages = before_the_split(recipe).stages
    if "status" in gives:  # a stage may read the status under this key, too
        gives = gives | {("next", "status")}
    there = gives | IF_THERE | {key for stage in stages.values() for key in getattr(stage, "out_keys", ())}
    lacks = dict[str, list[str]]()
    for name, stage in stages.items():
        votes = ["votes_only"] * (getattr(stage, "baseline_of", "") == "votes_only")
        for key in dict.fromkeys([*getattr(stage, "in_keys", ()), *votes]):
            if key not in there and key[0] != "headrace":  # stages make the columns under headrace
                lacks.setdefault(name, []).append(repr(key))
    if lacks:
        found = "; ".join(f"stage {name!r} reads {', '.join(keys)}" for name, keys in lacks.items())
        raise ValueError(
            f"the trainer cannot run this recipe: {found}. The adapter gives only "
            f"{listing(sorted(map(repr, gives)))}. Attach a recipe without these stages, or take them out: "
            f"attach(trainer, ..., stages={{{next(iter(lacks))!r}: None}})"
        )


def package_of(kind: type) -> str:
    """The package of a class. Unsloth writes its class to a module without a package."""
    return "trl" if kind.__name__.startswith("_Unsloth") else kind.__module__.partition(".")[0]


def refuse_separate_rewards(trainer: Any) -> None:
    """Refuse a trainer that, unlike the default recipe, normalizes each reward before it adds them up.

    Raises:
        ValueError: the trainer normalizes each reward.
    """
    together = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize")
    if together != "sum_then_normalize":
        raise ValueError(
            f"the default recipe adds rewards up before it normalizes them, and the trainer has "
            f"multi_objective_aggregation={together!r}: name a recipe, attach(trainer, 'gdpo')"
        )

"""Load a pipeline from a recipe and Hydra overrides."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException
from tensordict import NestedKey
from typing_extensions import Unpack

from headrace.spelling import suggest
from headrace.transforms.stages import OnIncomplete, Reduction
from headrace.transforms.stages.advantage import Baseline, Scale
from headrace.transforms.stages.weight import Mean
from headrace.transforms.table import COLUMNS, Missing, SharedIds
from headrace.transforms.table.empty import Empty

from .composing.compose import (
    ConfigError,
    compose_config,
    explain_composition,
    for_hydra,
    no_stage,
    usual_stage,
)
from .composing.nodes import as_typed, build_node, complete_stages, resolved, stages_by_column
from .composing.recipe_names import Recipe
from .pipeline import MaskedLogProb, Pipeline
from .wording import said_in_python

__all__ = [
    "KEYWORDS",
    "ConfigError",
    "PipelineOptions",
    "build_pipeline",
    "configured",
    "is_override",
    "load_pipeline",
    "objects_in",
    "settings_of",
    "shows_options",
]

log = logging.getLogger(__name__)


class PipelineOptions(TypedDict, total=False):
    """Keywords of :func:`load_pipeline`, which explains them, and of functions that call it."""

    rows: Literal["llm"] | None
    stages: Mapping[str, Mapping[str, Any] | Callable[..., Any] | str | None] | None
    group_size: int | None
    on_incomplete: OnIncomplete
    min_rollouts: int | None
    missing: Missing
    reward: Reduction
    baseline: Baseline
    scale: Scale
    minibatches: int | None
    microbatches: int | None
    max_tokens: int | None
    ranks: int
    rank: int | None
    shuffle: bool
    seed: int
    loss_unit: Mean
    order: Sequence[str] | None
    after: Mapping[str, str | None] | None
    before: Mapping[str, str | None] | None
    columns: Mapping[str, NestedKey | None] | None
    group_key: NestedKey
    rollout_key: NestedKey | None
    loss_mask_key: NestedKey
    log_prob_key: NestedKey | None
    process_group: Literal["world"] | None
    shared_ids: SharedIds | None
    patience: float
    masked_log_prob: MaskedLogProb
    empty: Empty


F = TypeVar("F", bound=Callable[..., Any])


def shows_options(function: F) -> F:
    """Let `help` and `inspect.signature` show the keywords of ``**options: Unpack[PipelineOptions]``."""
    own = inspect.signature(function)
    parameters = {name: each for name, each in own.parameters.items() if each.kind is not each.VAR_KEYWORD}
    for name, hint in PipelineOptions.__annotations__.items():
        keyword = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=hint.__forward_arg__
        )
        parameters.setdefault(name, keyword)
    function.__signature__ = own.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
    return function


@shows_options
def load_pipeline(
    recipe: Recipe | str = "grpo", *overrides: str, **options: Unpack[PipelineOptions]
) -> Pipeline:
    """Load the pipeline of a recipe, and change it by keywords and Hydra overrides.

    Overrides are those of the ``headrace`` command. A keyword that you leave out, or give as ``...``, keeps
    the recipe's value. None is a value like others.

    Args:
        recipe: name of the recipe, such as ``"grpo"`` or ``"as/verl"``; or the first override.
        overrides: ``"pipeline=grpo"`` chooses the recipe. Other overrides change it:
            ``"pipeline.stages.advantage.scale=none"``, ``"~pipeline.stages.filter"``,
            ``"pipeline.stages.bonus=my.module.Bonus"`` with ``"pipeline.after.bonus=collapse"``,
            ``"pipeline.order=[...]"``, ``"hydra.searchpath=[pkg://my.conf]"``.
        rows: ``llm`` names the columns as TorchRL's LLMCollector does.
        stages: other options of stages, by stage: ``{"advantage": {"clip": [-5, 5]}, "filter": None}``. None
            removes the stage. An object, a name, or a mapping with a ``_target_``, adds or replaces a whole
            stage: ``{"second": {"_target_": "filter", "action": "drop"}}`` is a second filter. A name is one
            of ``headrace stages``, or the path of a class. A new stage needs a place, by `after`, `before` or
            `order`. You can give a criterion or a token term in the same ways: ``{"filter": {"also":
            "not_truncated"}}``.
        group_size: option of the gate: number of rollouts per group. None: read from `expected_rollouts`.
        on_incomplete: option of the gate for incomplete groups: an error (``raise``), ``drop``, or ``keep``.
        min_rollouts: option of the gate: number of rollouts that a group needs for ``keep``.
        missing: option of the collapse: what happens to a reward that is NaN. ``raise`` an error; ``mask``
            takes the rollout out of the loss; ``skip`` trains it with the advantage 0.
        reward: option of the collapse: how the rewards of a rollout's segments become one: ``shared``,
            ``first``, ``last``, ``sum``, ``mean``, ``max``.
        baseline: option of the advantage, such as ``mean`` or ``leave_one_out``.
        scale: option of the advantage: what it is divided by, such as ``group`` (the std of the group's
            rewards) or ``none``.
        minibatches: option of the split: number of optimiser steps per epoch.
        microbatches: option of the split: number of micro-batches per optimiser step.
        max_tokens: option of the split: tokens in a micro-batch.
        ranks: option of the split and of the weight: number of ranks that each hold the whole batch.
        rank: option of the split: take the rows of this rank alone. None with several `ranks`: the rows of
            all of them.
        shuffle: option of the split: whether the rows are in random order.
        seed: option of the split: seed of the random order.
        loss_unit: option `unit` of the weight: what the loss is a mean over, such as ``token`` or ``sample``.
        order: names of all stages, in the order of execution.
        after: new stages, each with the stage that it comes directly after: ``{"bonus": "collapse"}``.
        before: new stages, each with the stage that it comes directly before.
        columns: other names of columns by role, such as ``{"group": "uid"}``, for all stages.
        group_key: column of the group ids, for all stages.
        rollout_key: column of the rollout ids, for all stages.
        loss_mask_key: column of the loss mask, for all stages.
        log_prob_key: column of the sampler's log-probabilities, for all stages. None: none is read.
        process_group: ``world`` or a process group: ranks that each hold their own rows of one batch.
        shared_ids: meaning of an id that several ranks have: ``same`` group, ``different`` groups, or
            ``raise`` an error.
        patience: seconds that ranks wait for each other.
        masked_log_prob: ``keep`` leaves log-probabilities outside of the loss mask finite, ``nan`` does not.
        empty: rollouts without a token in the loss: ``exclude`` them from the baseline, ``count`` them, or
            ``raise`` an error.

    Raises:
        ConfigError: an unknown recipe, stage, keyword or option, or an option that is set twice.

    Example:
        >>> load_pipeline("grpo", scale="none", group_size=8).stages["advantage"].scale
        'none'
        >>> load_pipeline("pipeline=grpo", "pipeline.stages.advantage.scale=none").stages["advantage"].scale
        'none'
    """
    with said_in_python():
        return build_pipeline(configured("load", recipe, overrides, options).pipeline)


def configured(
    config_name: str, recipe: str, overrides: Sequence[str], options: PipelineOptions
) -> DictConfig:
    """Compose ``conf/<config_name>.yaml`` with the recipe, overrides and keywords of :func:`load_pipeline`.

    Raises:
        ConfigError: an unknown recipe, stage, keyword or option, or an option that is set twice.
    """
    words: dict[str, Any] = {word: value for word, value in options.items() if value is not ...}
    rows, stages = words.pop("rows", None), words.pop("stages", None)
    if words.get("columns", ...) is None:  # no recipe has a node for None
        del words["columns"]
    typed = _overrides(recipe, overrides, rows)
    given = {word: words.pop(word) for word in KEYWORDS if word in words}
    settings = settings_of(typed, given, stages or {})
    config = compose_config(config_name, *typed)
    composed = config.pipeline
    for word, value in words.items():
        role = word.removesuffix("_key")
        own = [name for name, node in composed.stages.items() if node is not None and word in node]
        places = " or ".join(f"stages={{{name!r}: {{{word!r}: {value!r}}}}}" for name in own)
        if role != word and role in COLUMNS:
            places = f"columns={{{role!r}: {value!r}}}"  # for all stages that read it
        places = f"stages={{{word!r}: {value!r:.200}}}" if word in composed.stages else places
        if places:
            raise ConfigError(f"there is no keyword {word!r}; set it as {places}")
        raise ConfigError(
            f"there is no keyword {word!r}{suggest(word, [*KEYWORDS, 'rows', 'stages'])}; "
            f"the keywords are rows, stages, {', '.join(KEYWORDS)}"
        )
    apply_settings(composed, settings)
    if "order" in settings or any(each.lstrip("+").startswith("pipeline.order=") for each in typed):
        removed = {each.removesuffix("=null") for each in typed} | {
            f"pipeline.{key}" for key, value in settings.items() if value is None
        }
        _refuse_null_stages(composed, removed)
    log.debug("composed of %s and %s", typed, settings)
    return config


def _refuse_null_stages(pipeline: DictConfig, removed: Collection[str]) -> None:
    """Refuse an order of the caller that names a stage which the recipe sets to null. It would not run.

    Args:
        pipeline: the composed ``pipeline`` node.
        removed: the stages that the caller sets to null. An order may still name these.

    Raises:
        ConfigError: the order names such stages; the message lists them.
    """
    null = [name for name in pipeline.order or () if pipeline.stages.get(name, ...) is None]
    if null := [name for name in null if f"pipeline.stages.{name}" not in removed]:
        adds = ", ".join(f"stages={{{name!r}: {{}}}}" for name in null)
        raise ConfigError(
            f"pipeline.order names {', '.join(map(repr, null))}, which the recipe has set to null. To add "
            f"the usual stage: {adds}"
        )


def _overrides(recipe: str, overrides: Sequence[str], rows: str | None) -> list[str]:
    """Return the recipe, `rows` and the overrides as one list of overrides."""
    if not isinstance(recipe, str):
        raise ConfigError(
            f"a recipe is a name, such as 'grpo'; got a {type(recipe).__name__}. Give options by "
            "keyword, and columns to headrace.decide"
        )
    if bare := [each for each in overrides if not (isinstance(each, str) and is_override(each))]:
        raise ConfigError(
            f"an override must be KEY=VALUE; got {bare[0]!r:.200}. Give options by keyword, such as "
            f"group_size=8, and one recipe, here {recipe!r}"
        )
    chosen = [] if is_override(recipe) else [f"pipeline={recipe}"]
    others = [recipe, *overrides] if not chosen else list(overrides)
    chosen += [f"rows={rows}"] if rows else []
    for override in chosen:
        group = override.partition("=")[0]
        if again := [other for other in others if other.startswith(f"{group}=")]:
            raise ConfigError(f"{group} is set twice, by {override} and by {again[0]}: set it once")
    return [*chosen, *for_hydra(others)]


def is_override(text: str) -> bool:
    """Whether a text is an override, and not the name of a recipe."""
    return "=" in text or text.startswith("~")


def build_pipeline(config: DictConfig) -> Pipeline:
    """Instantiate a composed ``pipeline`` node, which may be at another path (``pipeline@algo.rl``).

    Raises:
        ConfigError: a stage without a ``_target_``, or an option that its class does not have. The message
            names options by their path in the configuration.
    """
    try:
        return _built(config)
    except ConfigError as err:
        if not isinstance(config, DictConfig):
            raise
        place = config._get_full_key(None) or "pipeline"
        raise ConfigError(re.sub(r"(?<![\w.])pipeline(?=[.:])", place, str(err))) from err.__cause__


def _built(config: DictConfig) -> Pipeline:
    complete_stages(config)
    try:
        plain, of_values = resolved(config), stages_by_column(config)
    except OmegaConfBaseException as err:
        raise ConfigError(f"the pipeline is not complete: {explain_composition(err)}") from err
    plain = plain if isinstance(plain, dict) else {}
    if (masked := plain.get("masked_log_prob")) != masked:  # Hydra parses the word nan as a number
        plain["masked_log_prob"] = "nan"
    stages = plain.get("stages") or {}
    if not isinstance(stages, dict):
        raise ConfigError(f"pipeline.stages must map names to nodes with a _target_; got {stages!r}")
    stages |= of_values
    for name, node in stages.items():
        if not (node is None or callable(node) or (isinstance(node, dict) and "_target_" in node)):
            if isinstance(node, dict):
                others = [other for other in stages if other != name]
                raise ConfigError(f"pipeline.stages.{name}: {no_stage(name, node, others)}")
            raise ConfigError(
                f"pipeline.stages.{name} must be a name, a node with a _target_, or null; got "
                f"{as_typed(node)}"
            )
    return build_node(config, "pipeline", plain)


OF_STAGES = {
    "gate": ("group_size", "on_incomplete", "min_rollouts"),
    "collapse": ("missing", "reward"),
    "advantage": ("baseline", "scale"),
    "split": ("minibatches", "microbatches", "max_tokens", "ranks", "rank", "shuffle", "seed"),
}
# The key below `pipeline` for each keyword. Keywords that are no option of a stage belong to the pipeline.
KEYWORDS = {word: word for word in PipelineOptions.__annotations__ if word not in ("rows", "stages")}
KEYWORDS |= {word: f"stages.{stage}.{word}" for stage, words in OF_STAGES.items() for word in words}
KEYWORDS |= {"loss_unit": "stages.weight.unit"}


def settings_of(
    overrides: Sequence[str],
    given: Mapping[str, Any],
    stages: Mapping[str, Mapping[str, Any] | Callable[..., Any] | str | None],
) -> dict[str, Any]:
    """Return the values that keywords of :func:`load_pipeline` set, by dotted key below ``pipeline``.

    Args:
        overrides: the overrides of the same call, which must not set the same keys.
        given: values by keyword.
        stages: options by stage. If the recipe lacks a stage, ``{}`` adds the usual one. None removes the
            stage. An object, a name, or a mapping with a ``_target_``, is a whole stage.

    Raises:
        ConfigError: a key, or a part of it, is set twice.

    Example:
        >>> settings_of(["pipeline=grpo"], {"scale": "none"}, {"gate": {"group_size": 8}, "filter": None})
        {'stages.advantage.scale': 'none', 'stages.gate.group_size': 8, 'stages.filter': None}
    """
    if not isinstance(stages, Mapping):
        raise ConfigError(f"stages must be a mapping such as {{'filter': None}}; got {stages!r:.200}")
    found = [(KEYWORDS[word], value, f"{word}={value!r}") for word, value in given.items()]
    for name, options in stages.items():
        if not (options is None or isinstance(options, Mapping | str) or callable(options)):
            raise ConfigError(
                f"stages[{name!r}] must be a mapping of options, a whole stage (an object, a name, or a "
                f"mapping with '_target_'), or None; got {options!r:.200}"
            )
        by_option: Any = {"": options}
        if isinstance(options, Mapping) and options and "_target_" not in options:
            by_option = options
        for key, value in by_option.items():
            source = f"stages[{name!r}]" + (f"[{key!r}]" if key else "")
            found.append((f"stages.{name}.{key}".rstrip("."), value, source))
    known: dict[str, str] = {}
    for override in overrides:  # by key below `pipeline`; other keys get a slash, so that they never match
        key = override.partition("=")[0].lstrip("~+").rpartition("@")[2]
        key = key.removeprefix("pipeline.") if key.startswith("pipeline.") else f"/{key}"
        known.setdefault(key, override.lstrip("+"))  # the first form is what the user typed
    for key, _, source in found:
        for other, override in known.items():
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise ConfigError(f"pipeline.{key} is set twice, by {source} and by {override}: set it once")
        known[key] = source
    return {key: value for key, value, _ in found}


def apply_settings(pipeline: DictConfig, settings: Mapping[str, Any]) -> None:
    """Set options in a composed ``pipeline`` node.

    Raises:
        ConfigError: the recipe has no such stage, or YAML has no such value.
    """
    for key, value in settings.items():
        _, _, rest = key.partition("stages.")
        name, _, option = rest.partition(".")
        present = [stage for stage, node in pipeline.stages.items() if node is not None]
        found = list(objects_in(value))
        for each in found:
            if isinstance(each, type):
                raise ConfigError(f"pipeline.{key}: {each.__name__} is a class; give {each.__name__}(...)")
        whole = callable(value) or (isinstance(value, Mapping) and "_target_" in value)
        own = not option and (whole or isinstance(value, str))  # the node itself, not options of it
        known = name in pipeline.stages if value is None and not option else name in present
        placed = name in {*(pipeline.get("after") or ()), *(pipeline.get("before") or ())}
        usual = (placed or (not option and value == {})) and usual_stage(name) is not None
        if rest and not (known or own or usual):
            options = [each.rpartition(".")[2] for each in settings if each.startswith(f"stages.{name}.")]
            raise ConfigError(f"pipeline.{key}: {no_stage(name, options, present)}")
        if option in ("criterion", "also") and isinstance(value, list | tuple):
            raise ConfigError(
                f"pipeline.{key} must be one criterion; got {value!r:.200}. A filter takes two, criterion "
                "and also. For more, add a second filter: "
                "stages={'second': {'_target_': 'filter', 'criterion': ...}}, "
                f"after={{'second': {name!r}}}"
            )
        try:
            with (
                open_dict(pipeline),
                flag_override(pipeline, "allow_objects", bool(found)),
            ):  # an unknown option is refused later, when the stage is constructed
                # Only options are merged. A whole part replaces the recipe's part, so options that it lacks
                # are defaults.
                OmegaConf.update(pipeline, key, None if whole else value, merge=True)
                if whole:
                    OmegaConf.update(pipeline, key, value)
        except OmegaConfBaseException as err:
            node = OmegaConf.select(pipeline, key)
            by_name = OmegaConf.is_dict(node) and "_target_" not in node  # a mapping, not a criterion
            needed = "a mapping, as {'name': value}" if by_name else "a value that YAML has, or a callable"
            raise ConfigError(f"pipeline.{key} must be {needed}; got {value!r:.200}") from err


def objects_in(value: Any) -> Iterator[Any]:
    """The callables in nested mappings and lists."""
    if callable(value):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from objects_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from objects_in(inner)

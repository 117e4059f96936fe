"""Pipelines composed of recipes and Hydra overrides."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, NoReturn

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from tensordict import NestedKey

from headrace.transforms.advantage.baselines import Baseline, Scale
from headrace.transforms.collapse import Reduction
from headrace.transforms.distributed import DecideOn, SharedIds
from headrace.transforms.gate import Empty, OnIncomplete
from headrace.transforms.weight import Mean

from .composing import ConfigError, compose_config, explain_composition, without_stage
from .composing.nodes import build_node, check_stage
from .composing.recipe_names import Recipe
from .pipeline import MaskedLogProb, Pipeline
from .wording import suggest

log = logging.getLogger(__name__)


def load_pipeline(
    recipe: Recipe | str = "grpo",
    /,
    *overrides: str,
    rows: Literal["llm"] | None = None,
    stages: Mapping[str, Mapping[str, Any] | None] | None = None,
    group_size: int | EllipsisType | None = ...,
    on_incomplete: OnIncomplete | EllipsisType = ...,
    reward: Reduction | EllipsisType = ...,
    baseline: Baseline | EllipsisType = ...,
    scale: Scale | EllipsisType = ...,
    minibatches: int | EllipsisType | None = ...,
    microbatches: int | EllipsisType | None = ...,
    max_tokens: int | EllipsisType | None = ...,
    ranks: int | EllipsisType = ...,
    shuffle: bool | EllipsisType = ...,
    seed: int | EllipsisType = ...,
    loss_unit: Mean | EllipsisType = ...,
    order: Sequence[str] | EllipsisType | None = ...,
    columns: Mapping[str, NestedKey | None] | EllipsisType | None = ...,
    group_key: NestedKey | EllipsisType = ...,
    rollout_key: NestedKey | EllipsisType | None = ...,
    loss_mask_key: NestedKey | EllipsisType = ...,
    log_prob_key: NestedKey | EllipsisType | None = ...,
    process_group: Literal["world"] | EllipsisType | None = ...,
    shared_ids: SharedIds | EllipsisType | None = ...,
    patience: float | EllipsisType = ...,
    decide_on: DecideOn | EllipsisType = ...,
    masked_log_prob: MaskedLogProb | EllipsisType = ...,
    empty: Empty | EllipsisType = ...,
    **unknown: NoReturn,
) -> Pipeline:
    """Compose a pipeline from a recipe, changed by keywords and Hydra overrides, as the command would.

    A keyword that is not given, or is ``...``, leaves what the recipe has; None is a value.

    Args:
        recipe: its name, such as ``"grpo"`` or ``"as/verl"``; or the first override.
        overrides: ``"pipeline=grpo"`` names the recipe, the others change it:
            ``"pipeline.stages.advantage.scale=none"``, ``"~pipeline.stages.filter"``,
            ``"+pipeline.stages.bonus={_target_: my.module.Bonus}"``, ``"pipeline.order=[...]"``,
            ``"hydra.searchpath=[pkg://my.conf]"``.
        rows: ``llm``: rows are those of TorchRL's LLMCollector.
        stages: any other options, by stage: ``{"advantage": {"clip": [-5, 5]}, "filter": None}``. None leaves
            the stage out; one with a ``_target_`` is a stage of one's own, the whole of it.
        group_size: of the gate.
        on_incomplete: of the gate.
        reward: of the collapse, how the rewards of a rollout's segments become one.
        baseline: of the advantage.
        scale: of the advantage.
        minibatches: of the split.
        microbatches: of the split.
        max_tokens: of the split, in a micro-batch.
        ranks: of the split, and of the weight.
        shuffle: of the split.
        seed: of the split.
        loss_unit: `unit` of the weight, over which the loss is a mean.
        order: of the pipeline, names of all stages.
        columns: other names of columns by role, such as ``{"group": "uid"}``, for all stages.
        group_key: of the pipeline, for all stages.
        rollout_key: of the pipeline, for all stages.
        loss_mask_key: of the pipeline, for all stages.
        log_prob_key: of the pipeline, for all stages.
        process_group: of the pipeline.
        shared_ids: of the pipeline.
        patience: of the pipeline.
        decide_on: of the pipeline.
        masked_log_prob: of the pipeline.
        empty: of the pipeline, and of its gate.
        unknown: refused, with the words that are near.

    Raises:
        ConfigError: an unknown recipe, stage, keyword or option, or something that is said twice.

    Example:
        >>> load_pipeline("grpo", scale="none", group_size=8).stages["advantage"].scale
        'none'
        >>> load_pipeline("pipeline=grpo", "pipeline.stages.advantage.scale=none").stages["advantage"].scale
        'none'
    """
    values = locals()  # first, while there is nothing else; editors complete a signature, and no table
    values["columns"] = ... if columns is None else columns  # which is no node without names
    given = {word: values[word] for word in KEYWORDS if values[word] is not ...}
    words = _overrides(recipe, overrides, rows)
    settings = settings_of(words, given, stages or {})
    composed = compose_config("load", *words).pipeline
    for word in unknown:
        own = {name: node for name, node in composed.stages.items() if node is not None and word in node}
        places = " or ".join(f"stages={{{name!r}: {{{word!r}: …}}}}" for name in own)
        if places:
            raise ConfigError(f"load_pipeline has no keyword {word!r}; an option of a stage is {places}")
        raise ConfigError(
            f"load_pipeline has no keyword {word!r}{suggest(word, [*KEYWORDS, 'rows', 'stages'])}; "
            f"there are rows, stages, {', '.join(KEYWORDS)}"
        )
    apply_settings(composed, settings)
    log.debug("composed of %s and %s", words, settings)
    return build_pipeline(composed)


def _overrides(recipe: str, overrides: Sequence[str], rows: str | None) -> list[str]:
    """A recipe, rows and overrides as overrides alone."""
    if bare := [word for word in overrides if not _is_override(word)]:
        raise ConfigError(
            f"an override is KEY=VALUE; got {bare[0]!r}. A recipe comes first: load_pipeline({bare[0]!r}, …)"
        )
    chosen = [] if _is_override(recipe) else [f"pipeline={recipe}"]
    others = [recipe, *overrides] if not chosen else list(overrides)
    chosen += [f"rows={rows}"] if rows else []
    for word in chosen:
        group = word.partition("=")[0]
        if again := [other for other in others if other.startswith(f"{group}=")]:
            raise ConfigError(f"{group} is said twice, by {word} and by {again[0]}: say it once")
    return [*chosen, *map(without_stage, others)]


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith("~")


def build_pipeline(config: DictConfig) -> Pipeline:
    """Instantiate a composed ``pipeline`` node.

    Raises:
        ConfigError: a stage without a ``_target_``, or an option that its class does not have.
    """
    try:
        said = config.get("masked_log_prob")
        if said != said:  # an override reads the word nan as a number
            config.masked_log_prob = "nan"
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as err:
        raise ConfigError(
            f"the pipeline's configuration does not resolve: {explain_composition(err)}"
        ) from err
    stages = plain.get("stages") or {} if isinstance(plain, dict) else {}
    if not isinstance(stages, dict):
        raise ConfigError(f"pipeline.stages must be names and nodes; got {stages!r}")
    for name, node in stages.items():
        if node is not None:
            check_stage(f"stage {name!r}", name, node, [other for other in stages if other != name])
    return build_node(config, "pipeline", plain)


OF_STAGES = {
    "gate": ("group_size", "on_incomplete"),
    "collapse": ("reward",),
    "advantage": ("baseline", "scale"),
    "split": ("minibatches", "microbatches", "max_tokens", "ranks", "shuffle", "seed"),
}
# What an override calls a keyword below `pipeline`: the others are options of the pipeline itself.
KEYWORDS = {word: word for word in load_pipeline.__kwdefaults__ or () if word not in ("rows", "stages")}
KEYWORDS |= {word: f"stages.{stage}.{word}" for stage, words in OF_STAGES.items() for word in words}
KEYWORDS |= {"loss_unit": "stages.weight.unit"}


def settings_of(
    overrides: Sequence[str], given: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Any]:
    """What keywords set, by the dotted key below ``pipeline``.

    Args:
        overrides: words that are said besides.
        given: values by keyword.
        stages: options by stage; None leaves it out, and one with a ``_target_`` is a stage of one's own.

    Raises:
        ConfigError: something is said twice, or a part of something that is said.

    Example:
        >>> settings_of(["pipeline=grpo"], {"scale": "none"}, {"gate": {"group_size": 8}, "filter": None})
        {'stages.advantage.scale': 'none', 'stages.gate.group_size': 8, 'stages.filter': None}
    """
    said = [(KEYWORDS[word], value, f"{word}={value!r}") for word, value in given.items()]
    for name, options in stages.items():
        whole = options is None or "_target_" in options
        for key, value in {"": options}.items() if whole else (options or {}).items():
            source = f"stages[{name!r}]" + (f"[{key!r}]" if key else "")
            said.append((f"stages.{name}.{key}".rstrip("."), value, source))
    known: dict[str, str] = {}
    for word in overrides:  # by what it is about below `pipeline`; with a slash, what no keyword is about
        key = word.partition("=")[0].lstrip("~+").rpartition("@")[2]
        known[key.removeprefix("pipeline.") if key.startswith("pipeline.") else f"/{key}"] = word
    for key, _, source in said:
        for other, word in known.items():
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise ConfigError(f"pipeline.{key} is said twice, by {source} and by {word}: say it once")
        known[key] = source
    return {key: value for key, value, _ in said}


def apply_settings(pipeline: DictConfig, settings: Mapping[str, Any]) -> None:
    """Set options in a composed ``pipeline`` node.

    Raises:
        ConfigError: the recipe has not the stage, or a value is none that YAML has.
    """
    for key, value in settings.items():
        _, _, rest = key.partition("stages.")
        name, _, option = rest.partition(".")
        present = [stage for stage, node in pipeline.stages.items() if node is not None]
        own = isinstance(value, Mapping) and "_target_" in value and not option
        known = name in pipeline.stages if value is None and not option else name in present
        if rest and not (known or own):
            raise ConfigError(
                f"pipeline.{key}: the recipe has no stage {name!r}{suggest(name, present)}; "
                f"there are {', '.join(present)}"
            )
        try:
            with open_dict(pipeline):  # an option that the class has not is refused where the stage is made
                if own:
                    pipeline.stages[name] = None  # or its options would be merged into those that are there
                OmegaConf.update(pipeline, key, value, merge=True)
        except OmegaConfBaseException as err:
            raise ConfigError(f"pipeline.{key} takes what YAML has; got {value!r}: {err}") from err

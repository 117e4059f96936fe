"""What `load_pipeline` takes by keyword: each word is an option of the pipeline or of one of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from .compose import ConfigError
from .hints import suggest

OF_THE_PIPELINE = (
    "order",
    "group_key",
    "rollout_key",
    "loss_mask_key",
    "log_prob_key",
    "process_group",
    "shared_ids",
    "patience",
    "validate",
)
# The one table: a keyword, and what an override calls it below `pipeline`.
KEYWORDS = {
    "group_size": "stages.gate.group_size",
    "on_incomplete": "stages.gate.on_incomplete",
    "reward": "stages.collapse.reward",
    "baseline": "stages.advantage.baseline",
    "scale": "stages.advantage.scale",
    "minibatches": "stages.split.minibatches",
    "microbatches": "stages.split.microbatches",
    "max_tokens": "stages.split.max_tokens",
    "ranks": "stages.split.ranks",
    "shuffle": "stages.split.shuffle",
    "seed": "stages.split.seed",
    "loss_unit": "stages.weight.unit",
} | {name: name for name in OF_THE_PIPELINE}


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
    known = {_key_of(word): word for word in overrides}
    for key, _, source in said:
        for other, word in known.items():
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise ConfigError(f"pipeline.{key} is said twice, by {source} and by {word}: say it once")
        known[key] = source
    return {key: value for key, value, _ in said}


def _key_of(override: str) -> str:
    """What an override is about, below ``pipeline``; with a slash, what no keyword is about."""
    key = override.partition("=")[0].lstrip("~+").rpartition("@")[2]
    return key.removeprefix("pipeline.") if key.startswith("pipeline.") else f"/{key}"


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


def refuse_unknown(word: str, pipeline: DictConfig) -> None:
    """Say what was meant by a keyword that there is not.

    Raises:
        ConfigError: always.
    """
    stages = {name: node for name, node in pipeline.stages.items() if node is not None and word in node}
    places = " or ".join(f"stages={{{name!r}: {{{word!r}: …}}}}" for name in stages)
    if places:
        raise ConfigError(f"load_pipeline has no keyword {word!r}; an option of a stage is {places}")
    raise ConfigError(
        f"load_pipeline has no keyword {word!r}{suggest(word, [*KEYWORDS, 'rows', 'stages'])}; "
        f"there are rows, stages, {', '.join(KEYWORDS)}"
    )

"""Pipelines composed of recipes and Hydra overrides."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .composing import ConfigError, compose_config, leave_out, suggest
from .pipeline import Pipeline


def load_pipeline(*overrides: str) -> Pipeline:
    """Compose a pipeline from a recipe and Hydra overrides, as the command would.

    Args:
        overrides: ``"pipeline=grpo"`` names the recipe (the default), the others change it:
            ``"pipeline.stages.advantage.scale=none"``, ``"~pipeline.stages.filter"``,
            ``"+pipeline.stages.bonus={_target_: my.module.Bonus}"``, ``"pipeline.order=[...]"``,
            ``"hydra.searchpath=[pkg://my.conf]"``.

    Raises:
        ConfigError: an unknown recipe, stage or option.

    Example:
        >>> load_pipeline("pipeline=grpo", "pipeline.stages.advantage.scale=none").stages["advantage"].scale
        'none'
    """
    if bare := [word for word in overrides if "=" not in word and not word.startswith("~")]:
        raise ConfigError(f"an override is KEY=VALUE; got {bare[0]!r}. A recipe is pipeline={bare[0]}")
    return build_pipeline(compose_config("load", *map(leave_out, overrides)).pipeline)


def build_pipeline(config: DictConfig) -> Pipeline:
    """Instantiate a composed ``pipeline`` node.

    Raises:
        ConfigError: a stage without a ``_target_``, or an option that its class does not have.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as err:
        raise ConfigError(f"the pipeline's configuration does not resolve: {err}") from err
    stages = plain.get("stages") or {} if isinstance(plain, dict) else {}
    for name, node in stages.items():
        if node is not None:
            _check_node(f"stage {name!r}", name, node, [other for other in stages if other != name])
    try:
        return instantiate(config, _convert_="all")
    except InstantiationException as err:
        where = re.search(r"full_key: ([\w.]+)", str(err))
        raise ConfigError(f"{where[1] if where else 'pipeline'}: {err.__cause__ or err}") from err


def _check_node(where: str, name: str, node: Any, siblings: Sequence[str]) -> None:
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{where} has no _target_{suggest(name, siblings)}; found {node!r}")
    if node.get("_partial_") or "_args_" in node:
        return
    target = node["_target_"]
    try:
        thing: Callable[..., Any] = get_object(target)
    except Exception as err:
        raise ConfigError(f"{where}: _target_ {target!r} cannot be imported: {err}") from err
    parameters = inspect.signature(thing).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for option, value in node.items():
        if not option.startswith("_") and option not in parameters:
            raise ConfigError(
                f"{where} ({target}) has no option {option!r}{suggest(option, parameters)}; "
                f"there are {', '.join(parameters)}"
            )
        if isinstance(value, dict) and "_target_" in value:
            _check_node(f"{where}, {option}", option, value, [])

"""Pipelines composed of recipes and Hydra overrides."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .order import suggest
from .pipeline import Pipeline

TASKS = ("train", "replay", "compare", "plan")


class ConfigError(ValueError):
    """A configuration that is invalid, or names something unknown; the message has a hint."""


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


def leave_out(word: str) -> str:
    """``~pipeline.stages.NAME`` as ``pipeline.stages.NAME=null``, which a recipe's `order` may still name.

    Example:
        >>> leave_out("~pipeline.stages.filter"), leave_out("pipeline=grpo")
        ('pipeline.stages.filter=null', 'pipeline=grpo')
    """
    found = re.fullmatch(r"~(pipeline\.stages\.\w+)", word)
    return f"{found[1]}=null" if found else word


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


def explain_composition(error: Exception, overrides: Sequence[str], config_name: str) -> str:
    """Hydra's message; where it is about an unknown name, one with the nearest names that exist.

    Args:
        error: as Hydra or OmegaConf raised it.
        overrides: the words of the command line.
        config_name: of the configuration that was composed.
    """
    message = str(error) if error.__cause__ is None else f"{error}\n{error.__cause__}"
    if absent := re.search(r"Could not find 'pipeline/([\w/]+)'", message):
        known = recipes()
        return f"there is no recipe {absent[1]!r}{suggest(absent[1], known)}; there are {', '.join(known)}"
    if absent := re.search(r"Could not find 'task/([\w/]+)'", message):
        return f"there is no task {absent[1]!r}{suggest(absent[1], TASKS)}; there are {', '.join(TASKS)}"
    path = re.search(r"is not in struct\n\s*full_key: ([\w.]+)", message)
    path = path or re.search(r"delete from config. '([\w.]+)' does not exist", message)
    if not path:
        return str(error)
    groups = [
        word for word in overrides if re.fullmatch(r"(pipeline|experiment|task|[\w/]+@[\w.]+)=[\w/]+", word)
    ]
    try:
        parent: Any = compose_config(config_name, *groups)
    except ConfigError:
        return str(error)
    for key in path[1].split(".")[:-1]:
        parent = parent.get(key) if isinstance(parent, DictConfig) else None
    if not isinstance(parent, DictConfig):
        return str(error)
    names = [str(name) for name in parent]
    return f"there is no {path[1]!r}{suggest(path[1].split('.')[-1], names)}; there are {', '.join(names)}"


def recipes() -> list[str]:
    """The names of the recipes that come with headrace."""
    folder = Path(str(files("headrace.conf"))) / "pipeline"
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def compose_config(config_name: str, *overrides: str) -> DictConfig:
    """Compose ``conf/<config_name>.yaml``, also inside a running Hydra application.

    Raises:
        ConfigError: an unknown name or a wrong value, with a hint.
    """
    # Inside a Hydra application the global state belongs to the application: it is restored afterwards.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("headrace.conf", version_base="1.3"):
            return compose(config_name, list(overrides))
    except (HydraException, OmegaConfBaseException) as err:
        raise ConfigError(explain_composition(err, overrides, config_name)) from err
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


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

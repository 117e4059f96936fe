"""Configurations, composed of YAML and overrides: nothing here imports torch, which takes seconds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

TASKS = ("train", "replay", "compare", "plan", "certify")


class ConfigError(ValueError):
    """A configuration that is invalid, or names something unknown; the message has a hint."""


def leave_out(word: str) -> str:
    """``~pipeline.stages.NAME`` as ``pipeline.stages.NAME=null``, which a recipe's `order` may still name.

    Example:
        >>> leave_out("~pipeline.stages.filter"), leave_out("pipeline=grpo")
        ('pipeline.stages.filter=null', 'pipeline=grpo')
    """
    found = re.fullmatch(r"~(pipeline\.stages\.\w+)", word)
    return f"{found[1]}=null" if found else word


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


def suggest(word: str, words: Iterable[str]) -> str:
    """Close matches, as the end of a sentence; nothing if there are none."""
    close = difflib.get_close_matches(word, list(words), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""

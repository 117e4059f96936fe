"""Nodes of a configuration, each with a ``_target_``: checked against what it takes, then made."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from .compose import ConfigError
from .hints import suggest
from .option_types import annotations_of, as_typed, misfit


def build_node(config: Any, path: str, plain: Any = None, **given: Any) -> Any:
    """Instantiate a composed node with a ``_target_``.

    Args:
        config: the node.
        path: where it stands, such as ``pipeline`` or ``train.transform``.
        plain: the same as dictionaries and lists, with interpolations resolved; None: made here.
        given: what else its ``_target_`` takes.

    Raises:
        ConfigError: a value that is not what the ``_target_`` takes; the message begins with its name.
    """
    if not isinstance(config, DictConfig) or "_target_" not in config:
        raise ConfigError(f"{path} must be a node with a _target_; got {as_typed(config)}")
    plain = OmegaConf.to_container(config, resolve=True) if plain is None else plain
    _check_values(path, plain)
    try:
        return instantiate(config, _convert_="all", **given)
    except InstantiationException as err:
        found = re.search(r"full_key: ([\w.]+)", str(err))
        where = found[1] if found else path
        inner = _inner(plain, where.removeprefix(path).strip("."))
        raise ConfigError(_refusal(where, inner, err.__cause__ or err, given)) from err


def _check_values(path: str, plain: Any) -> None:
    """Check the values of a node, and of those inside, against the annotations of what takes them.

    Raises:
        ConfigError: the first that does not fit.
    """
    if not isinstance(plain, dict):
        return
    known = {}
    if isinstance(plain.get("_target_"), str):
        known = annotations_of(_imported(path, plain["_target_"]))
    for option, value in plain.items():
        if wanted := misfit(value, known.get(option, Any)):
            raise ConfigError(f"{path}.{option} must be {wanted}; got {as_typed(value)}")
    for option, value in plain.items():  # which follow those above, by interpolations
        _check_values(f"{path}.{option}", value)


def _imported(where: str, target: str) -> Callable[..., Any]:
    """What a ``_target_`` names.

    Raises:
        ConfigError: there is no such thing.
    """
    log = logging.getLogger("hydra.utils")  # which prints what is raised anyway
    before, log.disabled = log.disabled, True
    try:
        return get_object(target)
    except Exception as err:
        reason: BaseException = err
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise ConfigError(f"{where}: _target_ {target!r} cannot be imported: {reason}") from err
    finally:
        log.disabled = before


def _inner(plain: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        plain = plain.get(name) if isinstance(plain, dict) else None
    return plain


def _refusal(where: str, node: Any, error: BaseException, given: Mapping[str, Any]) -> str:
    """What a constructor says, in YAML's words, beginning with the option that it is about."""
    said = re.sub(r"\bNone\b", "null", str(error))
    first = re.match(r"\w+", said)
    if not isinstance(node, dict) or (first and first[0] in node):
        return f"{where}.{said}" if isinstance(node, dict) else f"{where}: {said}"
    culprits = [f"{where}.{name}={as_typed(node[name])}" for name in _culprits(node, given)]
    return f"{' or '.join(culprits) or where}: {said}"


def _culprits(node: dict[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """The options of a node, of which any one makes the error go away when it is left out."""
    for name in node:
        if not name.startswith("_"):
            with suppress(Exception):
                instantiate({key: node[key] for key in node if key != name}, _convert_="all", **given)
                yield name


def check_stage(where: str, name: str, node: Any, siblings: Sequence[str]) -> None:
    """Check that a node is a stage, and has no option that the stage's class does not have.

    Args:
        where: the node, for the message.
        name: of the node.
        node: as dictionaries and lists.
        siblings: names of the other stages, one of which may be meant.

    Raises:
        ConfigError: a node without a ``_target_``, one that cannot be imported, or an unknown option.
    """
    if not isinstance(node, dict):
        raise ConfigError(
            f"pipeline.stages.{name} must be a node with a _target_, or null; got {as_typed(node)}"
        )
    if "_target_" not in node:
        raise ConfigError(f"{where} has no _target_{suggest(name, siblings)}; found {node!r}")
    if node.get("_partial_") or "_args_" in node:
        return
    target = node["_target_"]
    parameters = inspect.signature(_imported(where, target)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for option, value in node.items():
        if not option.startswith("_") and option not in parameters:
            raise ConfigError(
                f"{where} ({target}) has no option {option!r}{suggest(option, parameters)}; "
                f"there are {', '.join(parameters)}"
            )
        if isinstance(value, dict) and "_target_" in value:
            check_stage(f"{where}, {option}", option, value, [])

"""Build objects from nodes with a ``_target_``, and check their values against type annotations."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial, reduce
from importlib import resources
from operator import getitem
from typing import Any, Literal, Union, get_args, get_origin

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict

from headrace.pipeline.wording import for_python
from headrace.spelling import suggest
from headrace.transforms.table.options import PYTHON, annotations_of, described, fits, is_default

from .compose import ConfigError

__all__ = [
    "IN_THIS_FOLDER",
    "YAML",
    "as_typed",
    "build_node",
    "misfit",
    "name_parts",
    "resolved",
    "stages_by_column",
    "words",
]

IN_THIS_FOLDER = "A module in this folder is found with PYTHONPATH=. in front of the command"
OF_SIBLINGS = re.compile(r"\$\{(\.+)([\w.]+)\}")  # such as ${...columns.reward}


def resolved(config: DictConfig) -> Any:
    """A node as dictionaries and lists, with interpolations resolved.

    It is :func:`OmegaConf.to_container` in a fourth of its time: that parses each interpolation.

    Raises:
        OmegaConfBaseException: an interpolation is invalid, or a value is missing.
    """
    plain: Any = OmegaConf.to_container(config, throw_on_missing=True)

    def value(node: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(node, dict | list):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            made = {name: value(inner, (*path, name)) for name, inner in items}
            return made if isinstance(node, dict) else [*made.values()]
        if not isinstance(node, str) or "${" not in node:
            return node
        simple = OF_SIBLINGS.fullmatch(node)
        if simple and len(simple[1]) <= len(path):  # not of what is above the node
            names = (*path[: len(path) - len(simple[1])], *simple[2].split("."))
            return value(reduce(getitem, names, plain), names)
        found = OmegaConf.select(config, ".".join(map(str, path)))
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found

    try:
        return value(plain, ())
    except (LookupError, TypeError, RecursionError):  # what only OmegaConf finds, or refuses
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def build_node(config: Any, path: str, plain: Any = None, **given: Any) -> Any:
    """Instantiate a composed node with a ``_target_``.

    Args:
        config: the node.
        path: its path in the configuration, such as ``pipeline`` or ``train.transform``.
        plain: the node as dictionaries and lists, with interpolations resolved; None: computed here.
        given: further arguments of its ``_target_``.

    Raises:
        ConfigError: the ``_target_`` does not take a value; the message begins with the option's path.
    """
    if not isinstance(config, DictConfig) or "_target_" not in config:
        raise ConfigError(f"{path} must be a node with a _target_; got {as_typed(config)}")
    plain = OmegaConf.to_container(config, resolve=True) if plain is None else plain
    _check_options(path, plain)
    return _made(plain, path, given)


def _made(node: Any, path: str, given: Mapping[str, Any] | None = None) -> Any:
    """What :func:`hydra.utils.instantiate` makes of plain values, in a fifth of its time, and with the path.

    Raises:
        ConfigError: as :func:`build_node`.
    """
    if isinstance(node, list):
        return [_made(each, f"{path}.{place}") for place, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    inner = node.get("_recursive_", True)
    values = {name: _made(value, f"{path}.{name}") if inner else value for name, value in node.items()}
    if "_target_" not in node:
        return values
    function, more = _imported(path, node["_target_"]), values.get("_args_", ())
    options = {name: value for name, value in values.items() if name not in OF_HYDRA} | dict(given or {})
    if node.get("_partial_"):
        return partial(function, *more, **options)
    try:
        return function(*more, **options)
    except Exception as err:
        message = str(err) if for_python() else re.sub(r"\bNone\b", "null", str(err))
        first = re.match(r"\w+", message)
        if first and first[0] in node:
            raise ConfigError(f"{path}.{message}") from err
        culprits = []  # options without which the error does not occur
        for name in (each for each in options if each not in (given or {})):
            with suppress(Exception):
                function(*more, **{key: options[key] for key in options if key != name})
                large = isinstance(node[name], list | dict) and len(node[name]) > 1
                culprits.append(f"{path}.{name}" + ("" if large else f"={as_typed(node[name])}"))
        raise ConfigError(f"{' or '.join(culprits) or path}: {message}") from err


OF_HYDRA = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")

# The options of a stage that are parts of their own, and the folder of conf/ that has nodes for them.
PARTS = {"criterion": "criterion", "also": "criterion", "term": "term"}


def name_parts(pipeline: Any) -> Any:
    """A ``pipeline`` node where names such as ``criterion: not_truncated`` are the nodes they name.

    It is a copy, if there are any.

    Raises:
        ConfigError: there is no criterion, or no term, of this name.
    """
    if not isinstance(pipeline, DictConfig) or not isinstance(pipeline.get("stages"), DictConfig):
        return pipeline
    named = [
        (name, option, part)
        for name, stage in pipeline.stages.items()
        for option in PARTS.keys() & set(stage if isinstance(stage, DictConfig) else ())
        if isinstance(part := stage._get_node(option)._value(), str) and part.isidentifier()
    ]
    if named:
        parent, pipeline = pipeline._get_parent(), deepcopy(pipeline)
        pipeline._set_parent(parent)
    for name, option, part in named:
        with open_dict(pipeline):
            pipeline.stages[name][option] = _node_named(
                part, PARTS[option], f"pipeline.stages.{name}.{option}"
            )
    return pipeline


def stages_by_column(pipeline: DictConfig) -> dict[str, Any]:
    """The nodes of :class:`ByColumn`, by name, for the stages with `by_column` and `values`.

    Each value's stage is composed as if the pipeline had this one in place of the stage.

    Raises:
        ConfigError: one of the two options is missing, or `values` does not map values to options.
    """
    found: dict[str, Any] = {}
    for name, node in (pipeline.get("stages") or {}).items():
        if not isinstance(node, DictConfig) or not {"by_column", "values"} & set(node):
            continue
        column, values, path = node.get("by_column"), node.get("values"), f"pipeline.stages.{name}"
        if column is None or not isinstance(values, DictConfig) or not values:
            raise ConfigError(
                f"{path} needs by_column, a column, and values, which maps each value of the column to "
                f"options, as in {{math: {{scale: none}}, code: {{}}}}; got by_column={as_typed(column)} and "
                f"values={as_typed(values)}"
            )
        stages = {}
        for value, options in values.items():
            if not isinstance(options, DictConfig):
                raise ConfigError(f"{path}.values.{value!s} must map options; got {as_typed(options)}")
            one = deepcopy(pipeline)
            one._set_parent(pipeline._get_parent())
            with open_dict(one), flag_override(one, "allow_objects", True):
                del one.stages[name]["by_column"], one.stages[name]["values"]
                for option in options:
                    one.stages[name][option] = deepcopy(options._get_node(option))
            stages[value] = resolved(name_parts(one))["stages"][name]
        column = OmegaConf.to_container(column) if OmegaConf.is_config(column) else column
        found[str(name)] = {"_target_": "headrace.transforms.ByColumn", "column": column, "stages": stages}
    return found


def _node_named(name: str, folder: str, where: str) -> DictConfig:
    """The node of ``conf/<folder>/<name>.yaml``."""
    files = resources.files("headrace.conf").joinpath(folder)
    known = sorted(file.name.removesuffix(".yaml") for file in files.iterdir())
    if name not in known:
        raise ConfigError(
            f"{where}: unknown {folder} {name!r}{suggest(name, known)}; choose from {', '.join(known)}, or "
            "give an object, or a node with a _target_"
        )
    node = OmegaConf.create(files.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    if required := [str(option) for option in node if OmegaConf.is_missing(node, option)]:
        chosen = f"{'+' * where.endswith('.also')}{folder}@{where}={name}"
        raise ConfigError(
            f"{where}: {name} needs {' and '.join(required)}. Set, for example, "
            f"{' '.join([chosen, *(f'{where}.{option}=1' for option in required)])}"
        )
    return DictConfig(node)


def _check_options(path: str, plain: Any) -> None:
    """Check the options of a node and of nested nodes: their names, and the types of their values.

    Raises:
        ConfigError: the ``_target_`` does not have an option, or a value does not fit its annotation. The
            message names the first one.
    """
    if not isinstance(plain, dict):
        return
    known = {}
    if isinstance(target := plain.get("_target_"), str):
        made_by = _imported(path, target)
        known, parameters = annotations_of(made_by), inspect.signature(made_by).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values()) or "_args_" in plain
        for option in plain:
            if not takes_any and not option.startswith("_") and option not in parameters:
                raise ConfigError(
                    f"{path} ({target}) has no option {option!r}{suggest(option, parameters)}; "
                    f"its options are {', '.join(parameters)}"
                )
    for option, value in plain.items():
        if option not in known or is_default(parameters[option], value):
            continue
        if wanted := misfit(value, known[option]):
            raise ConfigError(f"{path}.{option} must be {wanted}; got {as_typed(value)}")
    for option, value in plain.items():  # after those above, to which nested values may refer
        _check_options(f"{path}.{option}", value)


def _imported(where: str, target: str) -> Callable[..., Any]:
    """Import the object of a ``_target_``.

    Raises:
        ConfigError: it cannot be imported.
    """
    log = logging.getLogger("hydra.utils")  # it would print the error that is raised below
    before, log.disabled = log.disabled, True
    try:
        return get_object(target)
    except Exception as err:
        reason: BaseException = err
        while reason.__cause__ is not None:
            reason = reason.__cause__
        module, _, name = target.rpartition(".")
        if getattr(reason, "name", None) == target and module in sys.modules:  # its module was imported
            reason = AttributeError(f"{module} has no {name}{suggest(name, dir(sys.modules[module]), 1)}")
        if getattr(reason, "name", None) == target.partition(".")[0]:
            reason = ImportError(f"{reason}. {IN_THIS_FOLDER}")
        raise ConfigError(f"{where}: _target_ {target!r} cannot be imported: {reason}") from err
    finally:
        log.disabled = before


def words() -> Mapping[Any, str]:
    """How bool, str and None are called."""
    return PYTHON if for_python() else YAML


YAML = {bool: "true or false", str: "a word", type(None): "null"}


def misfit(value: Any, hint: Any) -> str | None:
    """Say what a value from YAML must be to fit a type; None if it fits.

    Args:
        value: a value from YAML. A node with a ``_target_`` fits any type.
        hint: the type annotation.

    Example:
        >>> misfit("abc", int | None), misfit(3, float), misfit("sum", Literal["sum", "mean"])
        ('an integer or null', None, None)
    """
    if fits(value, hint):
        return None
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    allowed = [str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]
    meant = suggest(value, allowed) if isinstance(value, str) else ""
    return described(hint, words()) + (" (did you mean null?)" if value == "None" else meant)


def as_typed(value: Any) -> str:
    """Return the beginning of a value as YAML writes it, such as null for None, or as Python does."""
    if for_python() or not (value is None or isinstance(value, bool)):
        return f"{value!r:.200}"
    return {None: "null", True: "true", False: "false"}[value]

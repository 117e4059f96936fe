"""Build objects from nodes with a ``_target_``, and check their values against type annotations."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial, reduce
from importlib import resources
from operator import getitem
from pathlib import Path
from typing import Any, cast

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write

from headrace.pipeline.wording import for_python
from headrace.spelling import suggest
from headrace.transforms.table.annotations import PYTHON, annotations_of, closest_value, described, fits
from headrace.transforms.table.options import is_default

from .compose import PARTS, ConfigError, example_of, known_parts, usual_stage

__all__ = [
    "IN_THIS_FOLDER",
    "YAML",
    "as_typed",
    "build_node",
    "complete_stages",
    "misfit",
    "resolved",
    "stages_by_column",
    "words",
]

IN_THIS_FOLDER = "A module in this folder is found with PYTHONPATH=. in front of the command"
OF_SIBLINGS = re.compile(r"\$\{(\.+)([\w.]+)\}")  # such as ${...columns.reward}


def resolved(config: DictConfig) -> Any:
    """Convert a node to dictionaries and lists, with interpolations resolved.

    It takes a quarter of the time of :func:`OmegaConf.to_container`, which parses each interpolation.

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
        if simple and len(simple[1]) <= len(path):  # an interpolation within the node
            names = (*path[: len(path) - len(simple[1])], *simple[2].split("."))
            return value(reduce(getitem, names, plain), names)
        found = OmegaConf.select(config, ".".join(map(str, path)))
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found

    try:
        return value(plain, ())
    except (LookupError, TypeError, RecursionError):  # only OmegaConf can resolve this, or refuse it
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def build_node(config: Any, path: str, plain: Any = None, **given: Any) -> Any:
    """Instantiate a composed node with a ``_target_``.

    Args:
        config: the node.
        path: path of the node in the configuration, such as ``pipeline`` or ``train.transform``.
        plain: the node as dictionaries and lists, with interpolations resolved; None: computed here.
        given: further arguments of the node's ``_target_``.

    Raises:
        ConfigError: the ``_target_`` does not take a value; the message begins with the option's path.
    """
    if not isinstance(config, DictConfig) or "_target_" not in config:
        raise ConfigError(f"{path} must be a node with a _target_; got {as_typed(config)}")
    plain = OmegaConf.to_container(config, resolve=True) if plain is None else plain
    _check_options(path, plain)
    return _made(plain, path, given)


def _made(node: Any, path: str, given: Mapping[str, Any] | None = None) -> Any:
    """Instantiate plain values as Hydra does, in a fifth of the time. Errors name the path.

    Raises:
        ConfigError: the ``_target_`` does not take a value; the message begins with the option's path.
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
        culprits = []  # without one of these options, the error does not occur
        for name in (each for each in options if each not in (given or {})):
            with suppress(Exception):
                function(*more, **{key: options[key] for key in options if key != name})
                value = f"={as_typed(node[name])}"
                culprits.append(f"{path}.{name}{value * (len(value) < 60)}")  # not a whole map of columns
        raise ConfigError(f"{' or '.join(culprits) or path}: {message}") from err


OF_HYDRA = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")

# For each option that takes a node: the folder of conf/ with such nodes, and a stage that has the option.
HOLDERS = {"criterion": ("criterion", "filter"), "term": ("term", "token_advantage")}


def complete_stages(pipeline: Any) -> None:
    """Complete the stages of a ``pipeline`` node, and their criteria and terms, if they are names.

    ``second: {_target_: filter, action: drop}`` becomes the usual filter with another action, and
    ``second: filter`` the usual filter. A stage with options alone is the usual stage of that name.

    Raises:
        ConfigError: there is no stage, criterion or term of this name.
    """
    stages: Any = pipeline.get("stages") if isinstance(pipeline, DictConfig) else None
    for name in map(str, stages if isinstance(stages, DictConfig) else ()):
        where = f"pipeline.stages.{name}"
        _complete(stages, name, "stage", where)
        stage = stages._get_node(name)
        for option in PARTS.keys() & set(stage if isinstance(stage, DictConfig) else ()):
            _complete(stage, option, PARTS[option], f"{where}.{option}")


def _complete(around: DictConfig, key: str, folder: str, where: str) -> None:
    """Replace a name by the node of ``conf/<folder>``; complete a node whose ``_target_`` is a name."""
    given: Any = around._get_node(key)
    value = given._value()
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*", value):
        given = OmegaConf.create({"_target_": value})
    elif not isinstance(value, dict):
        return
    name = given.get("_target_")
    if "_target_" not in given and folder == "stage" and usual_stage(str(key)) is not None:
        name = str(key)
    if given is around._get_node(key) and not (isinstance(name, str) and name.isidentifier()):
        return  # the node is complete
    if isinstance(name, str) and name.isidentifier():
        known = _node_named(name, folder, where)
        with open_dict(known):
            for part in PARTS.keys() & set(given):
                each = given._get_node(part)._value()
                if isinstance(each, str) or (isinstance(each, dict) and "_target_" in each):
                    known[part] = None  # a whole part takes no option from the usual part
            given = OmegaConf.merge(known, given, {"_target_": known._target_})
        if required := [str(option) for option in given if OmegaConf.is_missing(given, option)]:
            typed = [
                f"{where}={name}",
                *(f"{where}.{option}={example_of(option, '1')}" for option in required),
            ]
            listed = [
                f". A {PARTS[each]} is {', '.join(known_parts(PARTS[each]))}"
                for each in required
                if each in PARTS
            ]
            raise ConfigError(
                f"{where}: {name} needs {' and '.join(required)}. Set, for example, "
                f"{' '.join(typed)}{''.join(listed)}"
            )
    with open_dict(around), read_write(around):
        around[key] = given


def stages_by_column(pipeline: DictConfig) -> dict[str, Any]:
    """The nodes of :class:`ByColumn`, by name, for the stages with `by_column` and `values`.

    Each value's stage is composed as if it were in the pipeline in place of the stage.

    Raises:
        ConfigError: one of the two options is missing, or `values` does not map values to options.
    """
    found: dict[str, Any] = {}
    known: Any = pipeline.get("stages")
    nodes: Any = known if isinstance(known, DictConfig) else {}
    for name, node in nodes.items():
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
            complete_stages(one)
            stages[value] = resolved(one)["stages"][name]
        column = OmegaConf.to_container(column) if OmegaConf.is_config(column) else column
        found[str(name)] = {"_target_": "headrace.transforms.ByColumn", "column": column, "stages": stages}
    return found


def _node_named(name: str, folder: str, where: str) -> DictConfig:
    """The usual stage with this name, or the node of ``conf/<folder>/<name>.yaml``."""
    conf = Path(str(resources.files("headrace.conf")))
    file = conf / folder / f"{name}.yaml"
    if not file.is_file():
        texts = {each: (conf / folder / f"{each}.yaml").read_text("utf-8") for each in known_parts(folder)}
        of_class = [each for each, text in texts.items() if f"_target_: headrace.transforms.{name}\n" in text]
        hint = suggest(name, of_class or texts)
        for option, (other, stage) in HOLDERS.items():
            if folder == "stage" and (conf / other / f"{name}.yaml").is_file():
                hint = f" (it is a {other}: did you mean {where}={stage} {where}.{option}={name}?)"
        raise ConfigError(
            f"{where}: unknown {folder} {name!r}{hint}; headrace stages lists all. Or give an object, or the "
            "path of a class"
        )
    usual = usual_stage(name) if folder == "stage" else OmegaConf.create(file.read_text("utf-8"))
    return deepcopy(cast(DictConfig, usual))


def _check_options(path: str, plain: Any) -> None:
    """Check the options of a node and of nested nodes: their names, and the types of their values.

    Raises:
        ConfigError: the ``_target_`` does not have an option, or a value does not fit its annotation. The
            message names the first such option.
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
    for option, value in plain.items():  # after the options above, because nested values may refer to them
        _check_options(f"{path}.{option}", value)


def _imported(where: str, target: str) -> Callable[..., Any]:
    """Import the object of a ``_target_``.

    Raises:
        ConfigError: the object cannot be imported.
    """
    log = logging.getLogger("hydra.utils")  # Hydra would log the error that is raised below
    before, log.disabled = log.disabled, True
    try:
        return get_object(target)
    except Exception as err:
        reason: BaseException = err
        while reason.__cause__ is not None:
            reason = reason.__cause__
        module, _, name = target.rpartition(".")
        if getattr(reason, "name", None) == target and module in sys.modules:  # only the name is missing
            reason = AttributeError(f"{module} has no {name}{suggest(name, dir(sys.modules[module]), 1)}")
        if getattr(reason, "name", None) == target.partition(".")[0]:
            reason = ImportError(f"{reason}. {IN_THIS_FOLDER}")
        raise ConfigError(f"{where}: _target_ {target!r} cannot be imported: {reason}") from err
    finally:
        log.disabled = before


def words() -> Mapping[Any, str]:
    """The words for bool, str and None in messages."""
    return PYTHON if for_python() else YAML


YAML = {bool: "true or false", str: "a word", type(None): "null"}


def misfit(value: Any, hint: Any) -> str | None:
    """Say what a value from YAML must be to fit a type; None if it fits.

    Args:
        value: a value from YAML. A node with a ``_target_`` fits any type.
        hint: the type annotation.

    Example:
        >>> from typing import Literal
        >>> misfit("abc", int | None), misfit(3, float), misfit("sum", Literal["sum", "mean"])
        ('an integer or null', None, None)
    """
    if fits(value, hint):
        return None
    return described(hint, words()) + (
        " (did you mean null?)" if value == "None" else closest_value(value, hint)
    )


def as_typed(value: Any) -> str:
    """Return the beginning of a value as YAML writes it, such as null for None, or as Python does."""
    if for_python() or not (value is None or isinstance(value, bool)):
        return f"{value!r:.200}"
    return {None: "null", True: "true", False: "false"}[value]

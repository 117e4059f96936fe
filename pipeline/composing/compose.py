"""Compose configurations from YAML and overrides. Nothing here imports torch, which takes seconds."""

from __future__ import annotations

import difflib
import pickle
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from headrace.pipeline.wording import for_python
from headrace.spelling import OPTIONS, closest, suggest

__all__ = [
    "PARTS",
    "TASKS",
    "ConfigError",
    "compose_config",
    "example_of",
    "explain_composition",
    "for_hydra",
    "known_parts",
    "leaves",
    "no_stage",
    "options_meant",
    "recipes",
    "refuse_parts_of_no_stage",
    "usual_stage",
]

TASKS = ("train", "replay", "compare", "plan", "audit", "certify", "xray")
GROUPS = ("pipeline", "experiment", "task", "report", "rows", "xray")  # Hydra groups, which choose a file
ABSENT: Any = object()
DOTTED = re.compile(r"[+~]*\w+(\.\w+)+(=|$)")  # an override of a value, such as train.steps=2
# The options of a stage that take nodes, and the folder of conf/ with these nodes.
PARTS = {"criterion": "criterion", "also": "criterion", "term": "term"}
NODE = re.compile(rf"\+*(pipeline\.stages\.\w+(?:\.(?:{'|'.join(PARTS)}))?)=(.*)", re.DOTALL)
OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.searchpath", "hydra.verbose")  # the useful ones
# Names that other libraries use for options of headrace.
ALIASES = {
    "recipe": "pipeline",
    "algorithm": "pipeline",
    "input": "source.path",
    "file": "source.path",
    "data": "source.path",
    "output": "hydra.run.dir",
    "output_dir": "hydra.run.dir",
    "out": "hydra.run.dir",
    "loss_unit": "pipeline.stages.weight.unit",
}


class ConfigError(ValueError):
    """Raised for a configuration with an invalid value or an unknown name; the message has a hint."""


def for_hydra(given: Sequence[str]) -> list[str]:
    """Translate overrides of headrace into overrides of Hydra.

    ``~pipeline.stages.NAME`` sets the stage to null, because a recipe's `order` may still name it. A name, as
    in ``pipeline.stages.second=filter``, or a node with a ``_target_`` replaces a stage, a criterion or a
    term, and takes no options from it. Other overrides set options of the new part, even if they come first.
    A new stage and its position need no ``+``: a stage that the order lacks is refused later.

    Example:
        >>> for_hydra(["~pipeline.stages.filter", "pipeline=grpo", "pipeline.after.bonus=collapse"])
        ['pipeline.stages.filter=null', 'pipeline=grpo', '++pipeline.after.bonus=collapse']
        >>> for ready in for_hydra(["pipeline.stages.second.action=drop", "pipeline.stages.second=filter"]):
        ...     print(ready)
        ++pipeline.stages.second=filter
        ++pipeline.stages.second={_target_: filter}
        ++pipeline.stages.second.action=drop
    """
    read = []  # each override, and the key and value of a node
    for override in given:
        override = re.sub(r"^~(pipeline\.stages\.\w+)$", r"\1=null", override)
        key, value = "", ABSENT
        if found := NODE.fullmatch(override):
            with suppress(HydraException):  # Hydra raises it again later, with the place
                key, value = found[1], OverridesParser.create().parse_override(override).value()
        if isinstance(value, str) and re.fullmatch(r"[\w.]+", value):
            value, override = {"_target_": value}, f"{key}={{_target_: {value}}}"
        read.append((override, key, value))
    named = {key for _, key, value in read if isinstance(value, dict)}
    first, others = list[tuple[str, str]](), list[str]()
    for override, key, value in read:
        new = "++" if key.count(".") == 2 else ""  # a whole stage, not a part of one
        if isinstance(value, dict):
            if "_target_" in value and not any(f"@{key}." in each for each in given):
                first.append((key, f"{new}{key}={value['_target_']}"))  # in place of what the recipe has
            first.append((key, f"{new}{override.lstrip('+')}"))
        elif value is None and key in named:
            first.append((key, override))
        else:
            others.append(re.sub(r"^(?=pipeline\.(after|before)\.)", "++", override))
    ready = [*(each for _, each in sorted(first, key=itemgetter(0))), *others]
    return [f"++{each}" if each.startswith(tuple(f"{key}." for key in named)) else each for each in ready]


def compose_config(config_name: str, *overrides: str) -> DictConfig:
    """Compose ``conf/<config_name>.yaml``, also inside a running Hydra application.

    Raises:
        ConfigError: an unknown name or a wrong value; the message has a hint.
    """
    try:
        composed = _from_known(config_name, overrides) or _composed(config_name, overrides)
    except (HydraException, OmegaConfBaseException) as err:
        raise ConfigError(explain_composition(err, overrides, config_name)) from None  # Hydra's has 80 lines
    refuse_parts_of_no_stage(composed, overrides)
    return composed


def _composed(config_name: str, overrides: Sequence[str]) -> DictConfig:
    # Inside a Hydra application the global state belongs to the application, so restore it afterwards.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("headrace.conf", version_base="1.3"):
            return compose(config_name, list(overrides))
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


@cache
def _known(config_name: str, files: tuple[str, ...]) -> bytes:
    """A configuration composed of files, pickled, because ``deepcopy`` takes seven times as long.

    Reading and merging the files takes a tenth of a second.
    """
    return pickle.dumps(_composed(config_name, files))


def _from_known(config_name: str, overrides: Sequence[str]) -> DictConfig | None:
    """Set values in a copy of a configuration composed of the same files; None if Hydra must compose.

    An override with a dotted key chooses no file. If such an override cannot be applied, Hydra composes again
    and raises its own error.
    """
    values = [each for each in overrides if DOTTED.match(each)]
    files = tuple(each for each in overrides if each not in values)
    if any(each.lstrip("+~").startswith("hydra.") for each in overrides):  # such as a search path
        return None
    try:
        known: DictConfig = pickle.loads(_known(config_name, files))
        parsed = OverridesParser.create().parse_overrides(values)
        if any(each.is_sweep_override() for each in parsed):
            return None
        ConfigLoaderImpl._apply_overrides_to_config(parsed, known)
    except (HydraException, OmegaConfBaseException):
        return None
    return known


@cache
def usual_stage(name: str) -> DictConfig | None:
    """The node of a stage in grpo, or else in ``conf/stage``; None if neither has it."""
    known = compose_config("load", "pipeline=grpo").pipeline.stages
    if known.get(name) is None:
        if not name.isidentifier() or not (files("headrace.conf") / "stage" / f"{name}.yaml").is_file():
            return None
        known = compose_config(
            "load", "pipeline=grpo", f"+stage@pipeline.stages.{name}={name}"
        ).pipeline.stages
    return known[name]


def no_stage(name: str, options: Collection[str], stages: Collection[str]) -> str:
    """Say that a recipe has no such stage, and how to add it with these options."""
    return (
        f"the recipe has no stage {name!r}{suggest(name, stages)}; its stages are {', '.join(stages)}"
        f"{_to_add(name, options)}"
    )


def _to_add(name: str, options: Collection[str]) -> str:
    """Say how to add a stage with this name and these options; empty if a usual stage has this name."""
    if usual_stage(name) is not None:
        return ""
    having = (each for each in known_parts("stage") if {*options} <= {*(usual_stage(each) or ())})
    kind = next(having, "NAME")
    return (
        f". To add one, name one of `headrace stages`, or the path of a class: pipeline.stages.{name}="
        f"{kind} (in Python stages={{{name!r}: {{'_target_': {kind!r}, ...}}}})"
    )


def refuse_parts_of_no_stage(config: DictConfig, overrides: Iterable[str]) -> None:
    """Refuse ``criterion@pipeline.stages.NAME.criterion=...`` for a stage that the recipe does not have.

    Hydra composes such an override, but it has no effect.

    Raises:
        ConfigError: the recipe has no such stage.
    """
    stages = OmegaConf.select(config, "pipeline.stages") or {}
    for override in overrides:
        if (part := re.match(r"[\w/]+@pipeline\.stages\.(\w+)\.", override)) and stages.get(part[1]) is None:
            present = ", ".join(name for name, node in stages.items() if node is not None)
            raise ConfigError(f"{override}: the recipe has no stage {part[1]!r}; its stages are {present}")


def explain_composition(error: Exception, overrides: Sequence[str] = (), config_name: str = "load") -> str:
    """Return a clear message for an error of Hydra. For an unknown name it lists the nearest known names.

    Args:
        error: the error of Hydra or OmegaConf.
        overrides: the overrides of the command line.
        config_name: name of the configuration that was composed.
    """
    message = str(error) if error.__cause__ is None else f"{error}\n{error.__cause__}"
    if absent := re.search(r"Could not find '([\w./]+?)/([^'\n]*)'", message):
        place, _, inner = absent[1].partition("/")  # a Hydra group without such a file
        kind = {"pipeline": "recipe"}.get(place, place)
        listed = re.findall(r"^\s+([\w/]+)$", message, re.MULTILINE)
        known = {"recipe": recipes(), "task": list(TASKS)}.get(kind) or listed
        wanted = f"{inner}/{absent[2]}" if inner else absent[2]
        most, least = (1, 0.6) if kind == "task" else (2, 0.5)
        hint = suggest(wanted, known, most, least) or suggest(wanted.lower(), known, most, least)
        if kind == "task" and wanted in recipes():
            hint = f" (did you mean pipeline={wanted}?)"
        if kind == "recipe" and wanted in TASKS:
            hint = f" (did you mean task={wanted}?)"
        if kind == "source":
            hint = f" (did you mean source.path={wanted}?)"
        all_recipes = "headrace.recipes()" if for_python() else "headrace recipes"
        others = f"{all_recipes} lists all" if kind == "recipe" else f"choose from {', '.join(known)}"
        return f"unknown {kind} {wanted!r}{hint}; {others}"
    if isinstance(error, OverrideParseException):
        meant = f" (did you mean {error.override.replace('==', '=')}?)" if "==" in error.override else ""
        return f"{error.override!r} is not NAME=VALUE{meant}; put values with brackets or spaces in quotes"
    if recipe_list := next((each for each in overrides if each.startswith("pipeline=[")), ""):
        meant = recipe_list.replace("=", "s=", 1)
        return f"{recipe_list} has several recipes (did you mean task=compare '{meant}'?)"
    if ambiguous := re.search(r"Ambiguous value for argument '(.*)'", message):
        name, _, values = ambiguous[1].partition("=")
        if name == "pipeline" and "task=compare" in overrides:
            return f"{ambiguous[1]} has several recipes (did you mean 'pipelines=[{values}]'?)"
        sweep = "" if for_python() else f"For a sweep: headrace -m {ambiguous[1]}. "
        return f"{ambiguous[1]} has several values. {sweep}For a list: '{name}=[{values}]', in quotes"
    if there := re.search(r"An item is already at '([\w.]+)'", message):
        value = next((each.partition("=")[2] for each in overrides if each.startswith(f"+{there[1]}=")), "")
        return f"{there[1]} is there already, and needs no + (did you mean {there[1]}={value}?)"
    if part := re.search(r"Could not override '([\w/]+@[\w.]+)'", message):
        typed = next((each for each in overrides if each.startswith(f"{part[1]}=")), part[1])
        parts = re.findall(r"[\w/]+@[\w.]+", message.replace(part[1], ""))
        near = difflib.get_close_matches(part[1], parts, n=1, cutoff=0.9)
        meant = typed.replace(part[1], near[0]) if near else f"+{typed}, which adds it"
        return f"{typed}: the recipe names no file there (did you mean {meant}?)"
    path = re.search(r"is not in struct\n\s*full_key: ([\w.-]+)", message)
    path = path or re.search(r"delete from config. '([\w.]+)' does not exist", message)
    path = path or re.search(r"Could not override '([\w.]+)'", message)
    if path:
        found = _unknown_option(path[1], overrides, config_name)
        return found or f"unknown option {path[1]!r}{suggest(path[1], OF_HYDRA)}"
    place = getattr(error, "full_key", None)  # the path of an interpolation, or of a required value
    if isinstance(error, MissingMandatoryValue):
        return f"{place} has no value: set {place}=…"
    message = re.sub(r"Interpolation key '(.*)' not found", r"it refers to ${\1}, which is unknown", message)
    return f"{place}: {message.splitlines()[0]}" if place else message


def _unknown_option(path: str, overrides: Sequence[str], config_name: str) -> str | None:
    """Return a message with the options that may be meant; None if the other overrides do not compose.

    Args:
        path: the dotted path that Hydra did not find.
        overrides: all overrides. One of them begins with the path.
        config_name: name of the configuration that was composed.
    """
    split = [each.lstrip("+~").partition("=") for each in overrides]
    typed, equals, value = next(
        (each for each in split if f"{each[0]}.".startswith(f"{path}.")), (path, "", "")
    )
    chooses_file = re.compile(rf"({'|'.join(GROUPS)}|[\w/]+@[\w.]+)=[\w/]+")
    # Compose without the option itself, because the configuration does not have it.
    groups = [each for each in overrides if chooses_file.fullmatch(each) and each.partition("=")[0] != typed]
    try:
        base = compose_config(config_name, *groups)
    except ConfigError:
        return None
    removes = value == "null" and re.fullmatch(r"pipeline\.stages\.\w+", typed)  # written by `for_hydra`
    sign, equals, value = ("~", "", "") if removes or f"~{typed}" in overrides else ("", equals, value)
    found = options_meant(typed, base)
    if "-" in typed and _has(base, typed.replace("-", "_")):
        found = [typed.replace("-", "_")]
    stages = [name for name, node in (OmegaConf.select(base, "pipeline.stages") or {}).items() if node]
    of_stage = re.match(r"(?:pipeline\.)?(?:stages\.)?(\w+)(\.[\w.]+)?", typed)
    if of_stage and of_stage[1] not in base and of_stage[2]:  # `sorce` is nearer to `score` than to `source`
        for name in closest(of_stage[1], dict.fromkeys(["source", *map(str, base)]), 1, 0.75):
            near = f"{name}{of_stage[2]}"
            if _has(base, near):
                return f"unknown option {typed!r} (did you mean {sign}{near}{equals}{value}?)"
            if name == "source" and _has_option(near, [*groups, "task=replay"]):
                return f"unknown option {typed!r} (did you mean task=replay {near}{equals}{value}?)"
    if of_stage and of_stage[1] not in base:  # the name of a stage, perhaps misspelled
        for stage in closest(of_stage[1], dict.fromkeys([*stages, *known_parts("stage")]), 1, 0.75):
            if stage not in stages:
                recipe = next((each for each in groups if each.startswith("pipeline=")), "pipeline=grpo")
                return (
                    f"unknown option {typed!r}: {recipe} has no stage {stage!r}; it has {', '.join(stages)}"
                )
            path = f"pipeline.stages.{stage}{of_stage[2] or ''}"
            found = [path] if _has(base, path) else found
    if config_name == "config":
        others = [each for each in groups if not each.startswith("task=")]
        having = [task for task in TASKS if _has_option(typed, [*others, f"task={task}"])]
        if having:
            here = f"; task={base.task} has {' and '.join(found)}, of other meaning" if found else ""
            if f"source.{typed}" in found:
                here = f"; for a dump set source.{typed}{equals}{value}"
            tasks = " and ".join(f"task={task}" for task in having)
            return f"unknown option {typed!r} here: it is an option of {tasks}{here}"
    parent: Any = base
    for key in path.split(".")[:-1]:
        parent = parent.get(key) if isinstance(parent, DictConfig) else None
    names = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
    name, last = path.split(".")[-1], typed.split(".")[-1]
    known = leaves(OmegaConf.to_container(base))
    if not found and not suggest(name, names):
        last_names = {other.split(".")[-1] for other in known}
        nearest = difflib.get_close_matches(last, last_names, n=1, cutoff=0.75) or [last]
        found = deeper(last, known) or deeper(nearest[0], known)
    new = re.match(r"pipeline\.stages\.(\w+)\.(\w+)", typed)
    new = new if new is not None and new[1] not in stages else None  # of a stage that is missing
    if found:
        meant = " or ".join(f"{sign}{other}{equals}{value}" for other in found)
        return f"unknown option {typed!r} (did you mean {meant}?){_to_add(new[1], [new[2]]) if new else ''}"
    if new:
        return f"{typed}{equals}{value}: {no_stage(new[1], [new[2]], stages)}"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    full = f"{sign}{path.removesuffix(name)}{close[0]}{typed[len(path) :]}{equals}{value}" if close else ""
    hint = f" (did you mean {full}?)" if full else ""
    return f"unknown option {path!r}{hint}; choose from {', '.join(names)}" if names else None


def _has_option(path: str, overrides: Sequence[str]) -> bool:
    """Whether a configuration of these overrides has an option; False if it does not compose."""
    try:
        return _has(compose_config("config", *overrides), path)
    except ConfigError:
        return False


def _has(config: DictConfig, path: str) -> bool:
    """Whether a configuration has an option, even one that is null."""
    return OmegaConf.select(config, path, default=ABSENT) is not ABSENT


def options_meant(name: str, config: DictConfig) -> list[str]:
    """Find the options that are meant by a name without its path, or by a name from other libraries.

    Example:
        >>> options_meant("filter", compose_config("load")), options_meant("recipe", compose_config("load"))
        (['pipeline.stages.filter'], ['pipeline'])
    """
    if name in ALIASES:
        return [ALIASES[name]]
    stages = OmegaConf.select(config, "pipeline.stages") or {}
    known: dict[str, Any] = dict.fromkeys(f"pipeline.stages.{stage}" for stage in stages)
    known |= leaves(OmegaConf.to_container(config))
    if found := deeper(name, known):
        return found
    name = OPTIONS.get(name, "")
    return [name] if name in known else deeper(name, known)


def known_parts(folder: str, *, complete: bool = False) -> list[str]:
    """The names of the stages, criteria or terms of headrace, which are nodes of ``conf/<folder>``.

    Args:
        folder: ``stage``, ``criterion`` or ``term``.
        complete: only those without a required option.
    """
    paths = sorted((Path(str(files("headrace.conf"))) / folder).glob("*.yaml"))
    return [each.stem for each in paths if not complete or "???" not in each.read_text(encoding="utf-8")]


def example_of(option: str, other: str) -> str:
    """A value of a required option: the name of a part, or `other` if the option takes no part."""
    return known_parts(PARTS[option], complete=True)[0] if option in PARTS else other


def recipes() -> list[str]:
    """The names of the recipes that come with headrace.

    Example:
        >>> recipes()[:2]
        ['a_star_po', 'as/areal']
    """
    folder = Path(str(files("headrace.conf"))) / "pipeline"
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return each value of nested mappings by its dotted path, the shortest paths first.

    Example:
        >>> leaves({"a": {"b": {"c": 1}, "d": 2}, "e": 3})
        {'e': 3, 'a.d': 2, 'a.b.c': 1}
    """
    found: dict[str, Any] = {}
    for name, value in node.items():
        inner = leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        found |= inner or {f"{prefix}{name}": value}
    return dict(sorted(found.items(), key=lambda leaf: leaf[0].count(".")))


def deeper(path: str, known: Mapping[str, Any]) -> list[str]:
    """Return up to three full paths that an incomplete path may mean.

    They end in the last name of the path, and contain its other names in order. Paths whose values are
    interpolations come last.

    Args:
        path: the dotted path as it was typed.
        known: values by dotted path, from :func:`leaves`.

    Example:
        >>> deeper("gate.group_size", {"source.group_size": 1, "pipeline.stages.gate.group_size": 2})
        ['pipeline.stages.gate.group_size']
    """
    *places, name = path.split(".")

    def holds(other: str) -> bool:
        *around, last = other.split(".")
        ahead = iter(around)
        return last == name and all(place in ahead for place in places)

    found = [other for other in known if other != path and holds(other)]
    return sorted(found, key=lambda other: "${" in str(known[other]))[:3]

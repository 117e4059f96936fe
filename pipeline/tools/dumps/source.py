"""Functions that tasks share: open a dump, say which options it needs, and compose recipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from headrace.pipeline.composing.compose import compose_config
from headrace.pipeline.composing.nodes import IN_THIS_FOLDER
from headrace.pipeline.load import ConfigError
from headrace.pipeline.wording import for_python, printable
from headrace.transforms.carry import write_whole

from .readers import Source, SourceError
from .readers.open import open_in_words

STARTS = ("pipeline.", "hydra.searchpath=")
OF_STAGE = re.compile(r"(?P<plus>\+*)~?(?:[\w/]+@)?pipeline\.stages\.(?P<stage>\w+)(?P<whole>=)?")


def open_configured(config: DictConfig) -> Source:
    """Open the dump that ``source:`` of a composed configuration describes.

    Raises:
        ConfigError: there is no path; an option has a wrong name or value; the dump needs an option that is
            not set; or a grader cannot be imported.
        SourceError: there is no file, or the format cannot be recognised.
    """
    options = OmegaConf.to_container(config.source, resolve=True)
    if not isinstance(options, dict) or not options.get("path"):
        raise ConfigError(
            "a dump to read is required: source.path=FILE, FOLDER or a glob in quotes; got none"
        )
    if options.get("regrade") is not None:
        named = options["regrade"]
        needed = "a callable, or a node with a _target_"
        options["regrade"] = import_callable(named, f"source.regrade: {named!r}", needed)
        for name, stage in (config.pipeline.stages or {}).items():
            if OmegaConf.is_dict(stage) and stage.get("reward") == "sum":
                raise ConfigError(
                    "source.regrade gives each row of a rollout the reward of the rollout, so "
                    f"pipeline.stages.{name}.reward must be shared; got sum, which counts it for each row"
                )
    try:
        source = open_in_words(**{str(name): value for name, value in options.items()})
    except SourceError:
        raise
    except (TypeError, ValueError) as err:
        raise ConfigError(f"source: {err}") from err
    require_options(source, config)
    if options := options_of_run(source, config):
        source.advice = f". The run that wrote it set {' '.join(options)}"
    return source


def options_of_run(source: Source, config: DictConfig) -> list[str]:
    """Options of gate and collapse in which the run of a headrace dump differs from a configuration.

    With other values, the stages may refuse rows that the run accepted, such as rows of incomplete groups.
    """
    own = source.files[0] if source.files and source.files[0].suffix == ".parquet" else None
    text = (pq.read_schema(own).metadata or {}).get(b"headrace.config") if own else None
    if source.format != "headrace" or text is None:
        return []
    run, found = OmegaConf.create(text.decode()), []
    for stage in ("gate", "collapse"):
        here = OmegaConf.select(config, f"pipeline.stages.{stage}") or {}
        there = OmegaConf.select(run, f"pipeline.stages.{stage}") or {}
        for name in sorted(here.keys() & there.keys()):
            if isinstance(there[name], str) and not name.startswith("_") and there[name] != here[name]:
                found.append(f"pipeline.stages.{stage}.{name}={there[name]}")
    return found


def require_options(source: Source, config: DictConfig) -> None:
    """Check that all options that the first step needs are set.

    Raises:
        ConfigError: options are missing; the message has all of them, as overrides or keywords.
    """
    lacking = source.lacking()
    gate = OmegaConf.select(config, "pipeline.stages.gate")
    sized = gate is None or gate.get("group_size") is not None or config.task not in ("replay", "plan")
    rewards = lacking.pop("reward_key", [])
    collapse = OmegaConf.select(config, "pipeline.stages.collapse")
    summed = config.task == "compare" or collapse is None or len(rewards) in (0, collapse.get("columns"))
    if "group_by" not in lacking and (sized or "group_size" not in lacking) and summed:
        return
    named = {f"source.{name}": value for name, value in lacking.items()}
    named |= {} if summed else {"pipeline.stages.collapse.columns": len(rewards)}
    typed = [f"task={config.task}", f"source.path={config.source.path}"]
    if HydraConfig.initialized():
        asked = HydraConfig.get().overrides
        typed = [each for each in asked.task if each.partition("=")[0] not in named]
        typed += [each for each in asked.hydra if not each.startswith("hydra.mode=")]
    todo = "type:\n" + shlex.join(["headrace", *typed, *(f"{name}={value}" for name, value in named.items())])
    if for_python():
        keywords = [f"source={lacking}"] if lacking else []
        keywords += [] if summed else [f"stages={{'collapse': {{'columns': {len(rewards)}}}}}"]
        todo = f"add {' and '.join(keywords)}"
    why, when = list[str](), list[str]()
    if "group_by" in lacking:
        why.append("it has no ids of groups")
        when.append("no two prompts of a step have the same text (else source.group_by=order)")
    if "group_size" in lacking:
        why.append("it does not say how many rollouts each group should have")
        when.append(f"each group should have {lacking['group_size']}, as most groups of the first step have")
    if not summed:
        why.append(f"it has the rewards {', '.join(rewards)}")
        when.append(f"their sum is the reward (else source.reward_key={rewards[0]})")
    raise ConfigError(
        f"{config.source.path}, a dump of {source.format}: {', and '.join(why)}. If {', and '.join(when)}, "
        + todo
    )


def import_callable(node: Any, said: str, needed: str) -> Callable[..., Any]:
    """Import the callable that an option names.

    Args:
        node: the name of the callable, ``my.module.grade`` or ``my.module:grade``, or a node with a
            ``_target_``.
        said: the option and its value, for messages.
        needed: what the option must name, for messages.

    Raises:
        ConfigError: the object cannot be imported, or is not callable.
    """
    try:
        if isinstance(node, str):
            module, _, name = node.replace(":", ".").rpartition(".")
            found = getattr(import_module(module), name)
        else:
            found = instantiate(node, _convert_="all")
    except Exception as err:  # an import may raise anything
        cause = err.__cause__ or err
        raise ConfigError(f"{said} cannot be imported: {cause}. {IN_THIS_FOLDER}") from err
    if not callable(found):
        raise ConfigError(f"{said} must name {needed}; got {found!r}")
    return found


def write_files(config: DictConfig, output: Path, files: Mapping[str, str]) -> None:
    """Make the folder of a task, and write the resolved ``config.yaml`` and other texts into it.

    Args:
        config: the configuration of the task.
        output: the folder.
        files: texts by name.
    """
    output.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, output / "config.yaml", resolve=True)
    for name, text in files.items():
        write_whole(output / name, partial(Path.write_text, data=text, encoding="utf-8"))


def print_files(console: Console, folder: Path, *more: str) -> None:
    """Print where a task wrote its files, and the address of its page if it has one.

    Args:
        console: where to print.
        folder: the folder of the task.
        more: further lines.
    """
    page = folder / "report.html"
    at = [f"the page: {page.resolve().as_uri()}"] if page.exists() else []
    console.print(Text("\n".join(map(printable, [f"written to {folder}", *at, *more]))), soft_wrap=True)


def sizes_of_groups(config: DictConfig, path: str) -> list[int]:
    """Read ``certify.group_sizes`` or ``plan.group_sizes``.

    Raises:
        ConfigError: there is no size, or a size is not an integer ≥ 1.
    """
    given = OmegaConf.select(config, path)
    sizes = list(given) if OmegaConf.is_list(given) else [given]
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(f"{path} must be integers ≥ 1; got {sizes}")
    return sizes


def recipe_nodes(by_recipe: Mapping[str, Sequence[str]]) -> dict[str, DictConfig]:
    """The composed ``pipeline`` node of each recipe, by name.

    Args:
        by_recipe: the overrides of each recipe, by its name (:func:`overrides_by_recipe`).

    Raises:
        ConfigError: a recipe or option is unknown, or no recipe has a stage that an override names.
    """
    return {
        name: compose_config("load", f"pipeline={name}", *own).pipeline for name, own in by_recipe.items()
    }


def overrides_by_recipe(names: Iterable[str], overrides: Sequence[str]) -> dict[str, list[str]]:
    """The overrides that apply to each recipe.

    Args:
        names: names of recipes.
        overrides: command-line overrides. Overrides of ``pipeline`` and ``hydra.searchpath`` apply to every
            recipe. An override of a stage applies to each recipe that has the stage.

    Raises:
        ConfigError: a recipe is unknown.

    Example:
        >>> found = overrides_by_recipe(["grpo", "dapo"], ["seed=1", "pipeline.stages.overlong.cache=512"])
        >>> found
        {'grpo': [], 'dapo': ['pipeline.stages.overlong.cache=512']}
        >>> recipe_nodes(found)["dapo"].stages.overlong.cache
        512
    """
    shared = [each for each in overrides if each.lstrip("+~").startswith(STARTS) or "@pipeline." in each]
    of_stage = {each: found for each in shared if (found := OF_STAGE.match(each))}
    others = [each for each in shared if each.startswith("hydra.")]
    by_recipe = dict[str, list[str]]()
    for name in map(str, names):
        stages = compose_config("load", f"pipeline={name}", *others).pipeline.stages if of_stage else {}
        added = {found["stage"] for found in of_stage.values() if found["plus"] and found["whole"]}
        present = added | {stage for stage, node in stages.items() if node is not None}
        by_recipe[name] = [
            each
            for each in shared
            if each not in of_stage
            or of_stage[each]["stage"] in ({*stages} | added if of_stage[each]["whole"] else present)
        ]
    for each in of_stage:
        if not any(each in own for own in by_recipe.values()):  # composing then raises, and lists stages
            next(iter(by_recipe.values())).append(each)
    return by_recipe


def said_of_overrides(by_recipe: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence for each stage that has overrides and that some recipes lack.

    Example:
        >>> said_of_overrides({"grpo": [], "dapo": ["pipeline.stages.overlong.cache=512"]})
        ["The overrides of the stage 'overlong' do not apply to grpo, which does not have it."]
    """
    lack = dict[str, list[str]]()
    for each in dict.fromkeys(each for own in by_recipe.values() for each in own):
        if found := OF_STAGE.match(each):
            without = [name for name, own in by_recipe.items() if each not in own]
            lack[found["stage"]] = list(dict.fromkeys([*lack.get(found["stage"], []), *without]))
    return [
        f"The overrides of the stage {stage!r} do not apply to {' and '.join(without)}, which "
        f"{'does' if len(without) == 1 else 'do'} not have it."
        for stage, without in lack.items()
        if without
    ]

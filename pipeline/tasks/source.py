"""What tasks share: open a dump, say what a dump needs, and compose recipes."""

from __future__ import annotations

import copy
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.composing import compose_config
from headrace.pipeline.error_overrides import override_to_set, text_with_overrides
from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.report.dump import write_whole
from headrace.pipeline.sources import READERS, Source, SourceError, open_source
from headrace.pipeline.wording import printable
from headrace.transforms import BatchError

STARTS = ("pipeline.", "hydra.searchpath=")
OF_STAGE = re.compile(r"(?P<plus>\+*)~?(?:[\w/]+@)?pipeline\.stages\.(?P<stage>\w+)(?P<whole>=|$)?")
TRIED = 20  # steps that are run to learn which options the dump needs
MOST_ASKED = 4  # options that stages ask for


def open_configured(config: DictConfig) -> Source:
    """Open the dump that ``source:`` of a composed configuration describes.

    Raises:
        ConfigError: there is no path; an option has a wrong name or value; or a grader cannot be imported.
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
                    "source.regrade gives each row of a rollout the reward of the whole; "
                    f"pipeline.stages.{name}.reward must be shared, got sum, which would count it once a row"
                )
    try:
        return open_source(**{str(name): value for name, value in options.items()})
    except SourceError:
        raise
    except (TypeError, ValueError) as err:
        raise ConfigError(f"source: {err}") from err


def import_callable(node: Any, said: str, needed: str) -> Callable[..., Any]:
    """Import the callable that an option names.

    Args:
        node: its name, ``my.module.grade`` or ``my.module:grade``, or a node with a ``_target_``.
        said: the option and its value, for messages.
        needed: what it must name.

    Raises:
        ConfigError: it cannot be imported, or is not callable.
    """
    try:
        if isinstance(node, str):
            module, _, name = node.replace(":", ".").rpartition(".")
            found = getattr(import_module(module), name)
        else:
            found = instantiate(node, _convert_="all")
    except Exception as err:  # what a module raises when it is imported may be anything
        cause = err.__cause__ or err
        raise ConfigError(
            f"{said} cannot be imported: {cause}. A module in this folder is found with PYTHONPATH=. in "
            "front of the command"
        ) from err
    if not callable(found):
        raise ConfigError(f"{said} must name {needed}; got {found!r}")
    return found


def write_files(config: DictConfig, output: Path, files: Mapping[str, str]) -> None:
    """Write the resolved ``config.yaml`` and other texts into the folder of a task, which is made.

    Args:
        config: of the task.
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
        folder: of the task.
        more: further lines.
    """
    page = folder / "report.html"
    at = [f"the page: {page.resolve().as_uri()}"] if page.exists() else []
    console.print(Text("\n".join(map(printable, [f"written to {folder}", *at, *more]))), soft_wrap=True)


def refuse_wrong_size(size: int | None, sizes: Counter[int], option: str) -> None:
    """Refuse a size that most groups do not have, where these have one other: the size is wrong, not they.

    Args:
        size: as it was set; None: it was not.
        sizes: of groups, and how many have each.
        option: the path before ``group_size``.

    Raises:
        ConfigError: more than half of the groups have one other size.
    """
    if size is None or not sizes:
        return
    other, count = sizes.most_common(1)[0]
    if other != size and 1 < count > sizes.total() / 2:
        raise ConfigError(
            f"{option}.group_size={size} is probably wrong: {count:,} of {sizes.total():,} groups have "
            f"{other} rollouts. Set {option}.group_size={other}"
        )


def with_needed_options(err: Exception, config: DictConfig, overrides: Sequence[str]) -> Exception:
    """Return a better error if the dump needs options that the command lacks.

    If the gate refuses a group, it says whether ``group_size`` is wrong. Else it has the whole command: how
    groups are made, the size that most groups of the first step have, and what the stages ask for at the
    first steps. Any other error is returned unchanged, and so is one that names the only option that is
    needed.

    Args:
        err: the error of a task that reads a dump.
        config: the composed configuration.
        overrides: of the command line.
    """
    gate, source_size = "pipeline.stages.gate.group_size", OmegaConf.select(config, "source.group_size")
    lacks, stage = getattr(err, "lacks", ""), getattr(err, "stage", "")
    no_group, of_size = lacks == "group_by", lacks == "group_size" or stage == "gate"
    no_size = isinstance(err, BatchError) and ("gate", "group_size", "") in err.options
    if config.get("source") is None or not (no_group or of_size or override_to_set(err)):
        return err
    how = {"group_by": "prompt"} if no_group else {}
    typed, said, lines = [f"source.{name}={value}" for name, value in how.items()], [], []
    try:
        format, steps = _first_steps(config, **how, group_size=None)
        if of_size:
            sizes = Counter[int]()
            for _, batch in steps:
                sizes.update(rollouts_per_group(batch["group_id"], batch["rollout_id"]).tolist())
            set_size = source_size or OmegaConf.select(config, gate)
            refuse_wrong_size(set_size, sizes, "source" if source_size else gate.removesuffix(".group_size"))
        if no_group:
            said.append(
                "The dump has no id of a group. If each prompt was drawn once a step, equal prompts are a "
                "group."
            )
        if (no_group or no_size) and source_size is None:
            reads, size = "group_size" in READERS[format].options, usual_size(steps[0][1])
            if not (reads or no_size):
                return err
            said.append(
                "The dump does not say how many rollouts each group was dispatched with. "
                f"Most groups of this step have {size}. If your trainer samples {size} for each prompt,"
            )
            typed.append(f"source.group_size={size}" if reads else f"{gate}={size}")
            source_size = size if reads else None
        if said:
            to_set = f"{'set' if said[-1][-1] == ',' else 'Set'} {' '.join(typed)}"
            lines.append(f"step {steps[0][0]}: {' '.join(said)} {to_set}")
        if source_size:  # it says how the draws of a prompt are told apart
            _, steps = _first_steps(config, **how, group_size=source_size)
    except ConfigError as better:
        return better
    except (SourceError, ValueError, IndexError):
        return err
    if config.task != "audit":  # which runs no gate, and keeps what other tasks refuse
        for line, override in _asked_by_stages(steps, config, [*overrides, *typed]):
            lines.append(line)
            typed.append(override)
    if not said and len(typed) < 2:
        return err
    placed = {each.partition("=")[0]: each for each in (*overrides, *typed)}
    command = shlex.join(["headrace", *placed.values()])
    return ConfigError("\n".join([*lines[:-1], f"{lines[-1]}:", command]))


def overrides_for_groups(path: Path) -> list[str]:
    """The overrides with which a replay can read the groups of a dump; empty where it needs none, or is none.

    Args:
        path: of the dump.
    """
    overrides: list[str] = []
    try:
        for by in (None, "prompt"):
            source = open_source(path, group_by=by)
            _, found = next(source.outcomes())
            if not isinstance(found, SourceError):
                break
            if found.lacks != "group_by":
                return []
            overrides = ["source.group_by=prompt"]
        if isinstance(found, SourceError) or "expected_rollouts" in found.keys():
            return overrides
        reads = "group_size" in READERS[source.format].options
        return [*overrides, f"{'source' if reads else 'pipeline.stages.gate'}.group_size={usual_size(found)}"]
    except (SourceError, ValueError, StopIteration):
        return []


def rollouts_per_group(group: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    """The number of rollouts of each group; `group` and `rollout` are (N,), the ids of rows."""
    pairs = torch.unique(torch.stack([group, rollout]), dim=1)
    return pairs[0].unique(return_counts=True)[1]


def usual_size(batch: TensorDictBase) -> int:
    """The number of rollouts that most groups of a batch have."""
    return int(rollouts_per_group(batch["group_id"], batch["rollout_id"]).mode().values)


def _asked_by_stages(
    steps: Sequence[tuple[int, TensorDictBase]], config: DictConfig, overrides: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """What the stages ask for at the first steps, one after the other: the sentence, and the override."""
    if config.task == "compare":
        nodes = list(recipe_nodes(overrides_by_recipe(config.pipelines, overrides)).values())
    else:
        nodes = [copy.deepcopy(config.pipeline)]
        for path, _, value in (each.lstrip("+").partition("=") for each in overrides):
            if path.startswith("pipeline.") and not path.endswith("_key"):
                parsed = OmegaConf.from_dotlist([f"value={value}"]).value  # a number is no text
                OmegaConf.update(nodes[0], path.removeprefix("pipeline."), parsed)
    try:
        for _ in range(MOST_ASKED):
            step, err = next(_refused(steps, [build_pipeline(node) for node in nodes]))
            override = override_to_set(err)
            if override is None:
                return
            yield f"step {step}: {text_with_overrides(err)}", override
            path, _, value = override.partition("=")
            for node in nodes:
                if OmegaConf.select(node, path.removeprefix("pipeline.").rpartition(".")[0]) is not None:
                    OmegaConf.update(node, path.removeprefix("pipeline."), value)
    except (ConfigError, StopIteration):
        return


def _first_steps(config: DictConfig, **options: Any) -> tuple[str, list[tuple[int, TensorDictBase]]]:
    """The format of a dump, and the first of its steps that can be read.

    A step without one of its records would lack rollouts.
    """
    names = ("format", "reward_key", "group_by", "group_size", "skip_bad")
    source = open_source(config.source.path, **{name: config.source[name] for name in names} | options)
    outcomes = islice(source.outcomes(), TRIED)
    return source.format, [
        (step, found) for step, found in outcomes if step is not None and not isinstance(found, SourceError)
    ]


def _refused(
    steps: Sequence[tuple[int, TensorDictBase]], pipelines: Sequence[Pipeline]
) -> Iterator[tuple[int, BatchError]]:
    """The steps whose batch a pipeline refuses, each with the first error."""
    for step, batch in steps:
        try:
            for pipeline in pipelines:
                pipeline.run(batch)
        except BatchError as err:
            yield step, err


def sizes_of_groups(config: DictConfig, path: str) -> list[int]:
    """Read ``certify.group_sizes`` or ``plan.group_sizes``.

    Raises:
        ConfigError: there is no size, or one is no integer ≥ 1.
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
        ConfigError: an unknown recipe or option, or no recipe has a stage.
    """
    return {
        name: compose_config("load", f"pipeline={name}", *own).pipeline for name, own in by_recipe.items()
    }


def overrides_by_recipe(names: Iterable[str], overrides: Sequence[str]) -> dict[str, list[str]]:
    """The overrides that apply to each recipe.

    Args:
        names: names of recipes.
        overrides: of the command line. Those of ``pipeline`` and ``hydra.searchpath`` apply to every
            recipe; those of a stage to each recipe that has the stage.

    Raises:
        ConfigError: an unknown recipe.

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
        if not any(each in own for own in by_recipe.values()):  # composing says which stages there are
            next(iter(by_recipe.values())).append(each)
    return by_recipe


def said_of_overrides(by_recipe: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence for each stage that has overrides, and that some of the recipes lack.

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

"""Run the command's tasks over dumps in Python. Each function returns numbers, and prints nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf, flag_override
from rich.console import Console
from typing_extensions import Unpack

from headrace.pipeline.composing.compose import for_hydra
from headrace.pipeline.composing.recipe_names import Recipe
from headrace.pipeline.load import ConfigError, PipelineOptions, configured, is_override, shows_options
from headrace.pipeline.tools.command.perform import perform
from headrace.pipeline.tools.dumps import TaskResult
from headrace.pipeline.wording import said_in_python
from headrace.spelling import suggest
from headrace.transforms.table.options import takes_options

Options = Mapping[str, Any] | None


@said_in_python()
@shows_options
def replay(
    path: str | Path,
    recipe: Recipe | str = "grpo",
    *overrides: str,
    source: Options = None,
    output: str | Path | None = None,
    **options: Unpack[PipelineOptions],
) -> TaskResult:
    """Send the rollouts of a dump through a recipe, as ``headrace task=replay`` does.

    Args:
        path: a file, a folder or a glob of a dump (:func:`open_dump`).
        recipe: the recipe, as for :func:`load_pipeline`.
        overrides: overrides of the recipe and of the task, such as ``"report.html=false"``.
        source: options of the dump, by name: ``{"group_by": "prompt", "group_size": 8}``.
        output: folder for the files of the task, such as ``report.html``; None: they are not kept.
        options: keywords of :func:`load_pipeline`.

    Returns:
        The number of trained rows, and the numbers of each step (``result["steps"]``).

    Raises:
        ConfigError: an option is unknown or missing.
        SourceError: a file cannot be read.
        BatchError: a stage refused the first steps.
        StepsFailed: some steps failed. ``source={"skip_bad": True}`` allows it.
    """
    return _result("replay", path, recipe, overrides, source, output, options)


@said_in_python()
@shows_options
def audit(
    path: str | Path,
    recipe: Recipe | str = "grpo",
    *overrides: str,
    source: Options = None,
    output: str | Path | None = None,
    **options: Unpack[PipelineOptions],
) -> TaskResult:
    """Search the dump of a finished run for errors, as ``headrace task=audit`` does.

    Arguments and errors are those of :func:`replay`. Give the recipe that trained the run.

    Returns:
        The number of findings, and the contents of ``audit.json``: ``result["verdict"]``,
        ``result["checks"]``.
    """
    return _result("audit", path, recipe, overrides, source, output, options)


@said_in_python()
@shows_options
def plan(
    path: str | Path,
    recipe: Recipe | str = "grpo",
    *overrides: str,
    group_sizes: Sequence[int] | None = None,
    source: Options = None,
    output: str | Path | None = None,
    **options: Unpack[PipelineOptions],
) -> TaskResult:
    """Estimate how many groups would have equal rewards at other group sizes, as ``headrace task=plan`` does.

    Arguments and errors are those of :func:`replay`.

    Args:
        group_sizes: the group sizes to compare; None: those that the command compares.

    Returns:
        The share of uninformative groups in the dump, and the contents of ``plan.json``:
        ``result["ranges"]``.
    """
    sizes = [] if group_sizes is None else [f"plan.group_sizes={[*group_sizes]}"]
    return _result("plan", path, recipe, [*sizes, *overrides], source, output, options)


@said_in_python()
@takes_options
def compare(
    path: str | Path,
    first: Recipe | str,
    second: Recipe | str,
    *overrides: str,
    source: Options = None,
    output: str | Path | None = None,
) -> TaskResult:
    """Send the rollouts of a dump through two recipes, as ``headrace task=compare`` does.

    Arguments and errors are those of :func:`replay`.

    Args:
        first: name of a recipe.
        second: name of another recipe.
        overrides: Hydra overrides. An override of a stage applies to each recipe that has the stage.

    Returns:
        The correlation of the advantages, and the contents of ``compare.json``: ``result["numbers"]``.
    """
    both = [f"pipelines=[{first},{second}]", *overrides]
    return _result("compare", path, "grpo", both, source, output, {})


def _result(
    task: str,
    path: str | Path,
    recipe: str,
    overrides: Sequence[str],
    source: Options,
    output: str | Path | None,
    options: PipelineOptions,
) -> TaskResult:
    """Run a task, and return its numbers."""
    if not isinstance(path, str | Path):
        raise ConfigError(
            f"{task} takes the path of a dump, and the options of open_dump in source={{…}}; "
            f"got {path!r:.200}"
        )
    if of_file := {"prompt", "response", "rollouts"} & set(options.get("columns") or ()):
        raise ConfigError(
            f"columns names columns of the batch, and {min(of_file)!r} is none of them. To name a column of "
            f"the file, give source={{'columns': {{{min(of_file)!r}: …}}}}"
        )
    ready = for_hydra(overrides)
    # The task `compare` composes its two recipes itself, each with the overrides that apply to it.
    of_all = [each for each in ready if task != "compare" or "pipeline." not in each.partition("=")[0]]
    config = configured("config", recipe, [f"task={task}", *of_all], options)
    if unknown := [name for name in source or () if name not in config.source]:
        raise ConfigError(
            f"source has no option {unknown[0]!r}{suggest(str(unknown[0]), config.source)}; its options are "
            f"{', '.join(config.source)}"
        )
    with flag_override(config.source, "allow_objects", True):
        OmegaConf.update(config, "source", {**(source or {}), "path": str(path)}, merge=True)
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere if output is None else output)
        typed = for_hydra([recipe, *overrides]) if is_override(recipe) else [f"pipeline={recipe}", *ready]
        found = cast(TaskResult, perform(config, folder, typed, Console(quiet=True)))
    return changed(found, folder=None if output is None else folder)

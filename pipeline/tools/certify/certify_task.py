"""The task ``certify``: compute the exact expectation of a recipe's gradient, on small tasks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import track
from rich.text import Text

from headrace.pipeline.composing.nodes import build_node
from headrace.pipeline.load import ConfigError
from headrace.pipeline.tools.dumps import (
    overrides_by_recipe,
    print_files,
    recipe_nodes,
    said_of_overrides,
    sizes_of_groups,
    write_files,
)
from headrace.pipeline.tools.report import FittedColumn, FittedTable, json_text, page_data, render_page
from headrace.pipeline.wording import printable
from headrace.spelling import suggest

from .certificate import Certificate, Refused, certify_recipe, count_outcomes
from .small_task import GroupSizeError, SmallTask

Found = Certificate | Refused
RATIO = FittedColumn("ratio to the true gradient", gives="wrap")
NUMBERS = [
    FittedColumn("bias", right=True),
    FittedColumn("cosine", right=True),
    FittedColumn("variance", right=True, leaves=3),
    FittedColumn("loss: scale", gives="wrap", right=True, leaves=2),
    FittedColumn("loss: cosine", gives="wrap", right=True, leaves=1),
]
NOTHING: dict[str, Any] = {"ratio": (), **dict.fromkeys(("relative_bias", "cosine", "variance", "scale"))}


def certify(
    config: DictConfig, output: Path, overrides: Sequence[str] = (), console: Console | None = None
) -> float:
    """Run every recipe on all outcomes of every task; print and write the certificates.

    Args:
        config: the configuration, composed with ``task=certify``.
        output: folder for ``config.yaml``, ``certificate.json`` and ``report.html``.
        overrides: command-line overrides. An override of a stage applies to each recipe that has the stage.
        console: where to print; None: standard output.

    Returns:
        The greatest relative bias of an advantage.

    Raises:
        ConfigError: a task is too large, or is not a SmallTask; or a recipe does not have an option; or each
            recipe refuses the rows of each task.
    """
    console = console or Console()
    most = config.certify.most
    if type(most) is not int or most < 1:
        raise ConfigError(f"certify.most must be an integer ≥ 1; got {most}")
    tasks, sizes = small_tasks(config), sizes_of_groups(config, "certify.group_sizes")
    named = [each.partition("=")[2] for each in overrides if each.startswith("pipeline=")]
    nodes = {named[-1] if named else "grpo": config.pipeline}
    lacking: list[str] = []
    if config.pipelines:
        by_recipe = overrides_by_recipe(config.pipelines, overrides)
        nodes, lacking = recipe_nodes(by_recipe), said_of_overrides(by_recipe)
    for size, task in product(sizes, tasks):
        with suppress(GroupSizeError):  # the table reports it
            count_outcomes(tasks[task], task, size, config.certify.most)  # refuse large tasks first
    found: list[Found] = []
    cases = list(product(sizes, tasks, nodes))
    for size, task, recipe in track(cases, "certifying", console=console, transient=True):
        options: dict[str, Any] = {"group_size": size, "overrides": overrides, "most": config.certify.most}
        found.append(certify_recipe(nodes[recipe], recipe, tasks[task], task, **options))
    certificates = [each for each in found if isinstance(each, Certificate)]
    if not certificates:
        reasons = {each.reason for each in found if isinstance(each, Refused)}
        raise ConfigError("each recipe refuses the rows of each task: " + "; ".join(sorted(reasons)))
    text = json_text({"certificates": [each.plain() for each in certificates]}, indent=1)
    files = {"certificate.json": text}
    if config.report.html:
        page = page_data([], title=f"certificates of {', '.join(nodes)}")
        files["report.html"] = render_page(page | {"certificates": [on_page(each) for each in found]})
    write_files(config, output, files)
    show_certificates(found, console)
    for sentence in lacking:
        console.print(Text(sentence))
    print_files(console, output)
    return max(each.advantage.relative_bias or 0.0 for each in certificates)


def small_tasks(config: DictConfig) -> dict[str, SmallTask]:
    """Build the tasks of a configuration, by name.

    Raises:
        ConfigError: a name is unknown, or its node cannot be built, or is not a SmallTask.
    """
    nodes = config.certify.tasks
    only = config.certify.only
    names = list(nodes) if only is None else list(only) if OmegaConf.is_list(only) else [only]
    if not names:
        raise ConfigError("certify.only must name a task; got []")
    for name in names:
        if nodes.get(name) is None:
            raise ConfigError(
                f"certify.only: unknown task {name!r}{suggest(str(name), nodes)}; the tasks are "
                f"{', '.join(map(str, nodes))}"
            )
    made: dict[str, SmallTask] = {}
    for name in names:
        made[str(name)] = build_node(nodes[name], f"certify.tasks.{name}")
        if not isinstance(made[str(name)], SmallTask):
            raise ConfigError(f"certify.tasks.{name} must be a SmallTask, with a _target_; got {nodes[name]}")
    return made


def on_page(found: Found) -> dict[str, Any]:
    """Return a certificate, or the reason why there is none, as data for the page."""
    head = {"recipe": found.recipe, "task": found.task, "group_size": found.group_size}
    if isinstance(found, Refused):
        head |= {"outcomes": 0, "refused": printable(found.reason)}
        return head | {"advantage": dict(NOTHING), "loss": dict(NOTHING)}
    loss = dict(NOTHING) if found.loss is None else asdict(found.loss)
    head |= {"outcomes": found.outcomes, "refused": ""}
    return head | {"advantage": asdict(found.advantage), "loss": loss}


def show_certificates(found: Sequence[Found], console: Console) -> None:
    """Print a table for each task and group size, then the recipes that refuse a task, with the reasons."""
    certificates = [each for each in found if isinstance(each, Certificate)]
    for task, size in dict.fromkeys((each.task, each.group_size) for each in certificates):
        here = [each for each in certificates if (each.task, each.group_size) == (task, size)]
        title = f"\n{printable(task)}, groups of {size}, {here[0].outcomes:,} outcomes"
        table = FittedTable([FittedColumn("recipe"), RATIO, *NUMBERS], title)
        for each in here:
            advantage, loss = each.advantage, each.loss
            table.add(
                each.recipe,
                " ".join(number(ratio) for ratio in advantage.ratio),
                "–" if advantage.relative_bias is None else f"{advantage.relative_bias:.1%}",
                number(advantage.cosine),
                f"{advantage.variance:.4g}",
                "–" if loss is None or loss.scale is None else f"{loss.scale:.3g}",
                number(None if loss is None else loss.cosine),
            )
        console.print(table)
    refusals: dict[tuple[str, str], list[str]] = {}
    for refusal in found:
        if isinstance(refusal, Refused):
            reason = refusal.reason.split("; the batch has")[0].split("; found")[0]
            refusals.setdefault((refusal.recipe, reason), []).append(refusal.task)
    for (recipe, reason), tasks in refusals.items():
        places = printable(", ".join(dict.fromkeys(tasks)))
        line = Text(f"{printable(recipe)} refuses the rows of {places}: ", "yellow")
        console.print(line.append(printable(reason)), soft_wrap=True)


def number(value: float | None) -> str:
    """Format a number with four decimals, and −0 as 0. None becomes a dash."""
    return "–" if value is None else f"{round(value, 4) + 0.0:.4f}"

"""The task ``compare``: run the rollouts of a dump through two recipes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.tools.dumps import (
    DumpSteps,
    TaskResult,
    open_configured,
    overrides_by_recipe,
    print_files,
    recipe_nodes,
    said_of_overrides,
    write_files,
)
from headrace.pipeline.tools.report import (
    Comparison,
    FittedColumn,
    FittedTable,
    ReportFolder,
    StepReport,
    asked_line,
    gradient_share,
    json_text,
    make_report,
)
from headrace.pipeline.wording import beginning, printable
from headrace.transforms import BatchError

LINES = 8  # a table of shares has at most this many lines: those that differ most
PROMPT = 40  # at most this many characters of a prompt are shown
ID = 16  # at most this many characters of an id are shown
FORMATS = {"gradient_moved": ".1%", "correlation": ".4f", "gradient_cosine": ".4f"}
LABELS = {"segments": "segments of the rollout", "tokens": "tokens of the row, at most"}
SHARE = (
    "A row's share of a step's gradient is |advantage| × loss weight × tokens in the loss, over the sum of "
    "all rows. Tables have means over the steps at which the recipe has a gradient."
)
SAME_STEPS = "A step counts only if both recipes accept it, so both are compared on the same steps."
NO_SHARES = (
    "Shares of the gradient are not known: the dump has no tokens. "
    "Set source.tokenizer=PATH to make tokens from its texts."
)


def compare_recipes(
    config: DictConfig, output: Path, overrides: Sequence[str] = (), console: Console | None = None
) -> TaskResult:
    """Run every step of a dump through two recipes; print and write the differences.

    Args:
        config: the configuration, composed with ``task=compare``.
        output: folder for ``config.yaml``, ``compare.json`` and ``report.html``.
        overrides: command-line overrides. An override of a stage applies to each recipe that has the stage.
        console: where to print; None: standard output.

    Returns:
        The correlation of the advantages, and the numbers of ``compare.json``.

    Raises:
        ConfigError: ``pipelines`` are not two recipes, ``source.path`` is missing, or one of the recipes does
            not have an option.
        SourceError: a file cannot be read.
        BatchError: a stage refused the first steps.
        StepsFailed: some steps failed, and `source.skip_bad` does not allow it. All files are written by
            then.
    """
    console = console or Console()
    names = list(config.pipelines)
    if len(names) != 2 or names[0] == names[1]:
        raise ConfigError(
            f"pipelines must name two different recipes, such as 'pipelines=[as/verl,grpo]'; got {names}"
        )
    by_recipe = overrides_by_recipe(names, overrides)
    nodes, lacking = list(recipe_nodes(by_recipe).values()), said_of_overrides(by_recipe)
    pipelines = [build_pipeline(node) for node in nodes]
    source = open_configured(config)
    comparison = Comparison((names[0], names[1]))
    folder = ReportFolder(
        output,
        title=f"{names[0]} and {names[1]}",
        steps=config.report.steps,
        dump=None,  # a row of a dump has one advantage, not two
        page=config.report.html,
        every=config.report.every,
        versus=names,
    )
    steps = DumpSteps(source, console, folder)
    with folder:

        def reported(step: int, batch: TensorDictBase) -> tuple[StepReport, StepReport, dict[str, float]]:
            tried = copy.deepcopy(pipelines)  # so that a step that is left out changes no state
            reports = list[StepReport]()
            for name, pipeline in zip(names, tried, strict=True):
                try:
                    reports.append(make_report(pipeline.run(batch), step=step, solved=config.report.solved))
                except BatchError as err:
                    err.recipe = name
                    raise
            apart = comparison.add(*reports)
            pipelines[:] = tried
            return reports[0], reports[1], apart

        for first, second, apart in steps.results(reported):
            differ = {f"versus/{name}": value for name, value in apart.items()}
            differ |= {f"second/{name}": value for name, value in second.numbers.items()}
            # The report of the first recipe also gets the numbers of the second.
            other = second.columns.get("advantage", np.full(len(second), np.nan))
            beside = {"advantage_by_row": other, "other_share": gradient_share(second.columns)}
            columns, metrics = {**first.columns, **beside}, {**first.metrics, **differ}
            folder.difference = comparison.said
            folder.add(dataclasses.replace(first, columns=columns, metrics=metrics))
        folder.notices += [*lacking, *[SAME_STEPS] * bool(steps.failed)]
    shares = comparison.mean_shares()
    movers = [mover._asdict() for mover in comparison.movers]
    numbers = {"numbers": comparison.numbers, "steps_averaged": comparison.averaged}
    failed = [each._asdict() for each in steps.failed]
    result = {"pipelines": names, **numbers, "shares": shares, "movers": movers, "failed_steps": failed}
    write_files(config, output, {"compare.json": json_text(result, indent=1)})
    show_comparison(comparison, console)
    steps.show()
    for sentence in [*lacking, *[SAME_STEPS] * bool(steps.failed)]:
        console.print(Text(sentence))
    print_files(console, output)
    steps.end()
    return TaskResult(comparison.numbers["correlation"], result, steps.counted)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print whether the recipes differ, and where."""
    unknown = math.isnan(comparison.moved)
    console.print(Text(comparison.said, style="bold"))
    if unknown:
        console.print(Text(NO_SHARES))
    if not comparison.changed:
        return
    first, second = map(printable, comparison.names)
    recipes = [FittedColumn(name, gives="wrap", right=True) for name in (first, second)]
    if comparison.movers:
        named = "prompt" if any(mover.prompt for mover in comparison.movers) else "group"
        columns = [FittedColumn("step", right=True), FittedColumn(named, gives="cut", right=named == "group")]
        movers = FittedTable(
            [*columns, *recipes], "\ngroups whose share of their step's gradient differs most"
        )
        for mover in comparison.movers:
            called = asked_line(mover.prompt, PROMPT) if mover.prompt else short_id(mover.group)
            movers.add(f"{mover.step:,}", called, f"{mover.first:.1%}", f"{mover.second:.1%}")
        console.print(movers)
    labels = {
        "rows": "rows",
        "trained_by_both": "trained by both",
        "trained_only_by_first": f"trained only by {first}",
        "trained_only_by_second": f"trained only by {second}",
        "correlation": "correlation of advantages",
        "differ": "advantages that differ",
        "sign_flips": "advantages with opposite signs",
        "gradient_moved": "share of the gradient that moves to other groups",
        "gradient_cosine": "cosine of the rows' gradient shares",
    }
    if comparison.steps > 1:
        steps, both = f"{comparison.steps:,} steps", f"{comparison.averaged['gradient_cosine']:,}"
        labels["gradient_moved"] += f", mean over all {steps}"
        labels["gradient_cosine"] += f", mean over the {both} of {steps} at which both have a gradient"
    table = FittedTable([FittedColumn("", gives="wrap"), FittedColumn("", right=True)])
    for key, value in comparison.numbers.items():
        if not math.isnan(value):
            table.add(labels[key], format(value, FORMATS.get(key, ",.0f")))
    console.print(Text(), table)
    if unknown:
        return
    means = {
        name: [line for line in lines.items() if f"{line[1][0]:.1%}" != f"{line[1][1]:.1%}"]
        for name, lines in comparison.mean_shares().items()
    }
    for name, lines in means.items():
        if not lines:
            continue
        label = FittedColumn(LABELS[name], gives="cut")
        table = FittedTable([label, *recipes, FittedColumn("rows", right=True)], f"\nshares by {name}")
        most = sorted(lines, key=lambda line: -abs(line[1][0] - line[1][1]))[:LINES]
        for text, (one, other, count) in sorted(most, key=lambda line: int(line[0])):
            table.add(text, f"{one:.1%}", f"{other:.1%}", f"{count:,.0f}")
        console.print(table)
    console.print(Text(f"\n{SHARE}"))


def short_id(label: int | str) -> str:
    """Shorten an id for a table. Only the beginning of a long text, such as a hash, is shown.

    Example:
        >>> short_id(2**62), short_id("prompt/bcfa1ad62952453f3229f6ebe9b0cba5")
        ('4611686018427387904', 'prompt/bcfa1ad6…')
    """
    return str(label) if isinstance(label, int) else beginning(label, ID)

"""The task ``compare``: run the rollouts of a dump through two recipes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.report import (
    Comparison,
    ReportFolder,
    gradient_share,
    last_user_turn,
)
from headrace.pipeline.report.dump import write_whole
from headrace.pipeline.tables import FittedColumn, FittedTable
from headrace.pipeline.valid_json import json_text
from headrace.pipeline.wording import printable

from .source import each_step, open_configured, recipe_nodes, report_of

LINES = 8  # lines of a table of shares: those that differ most
PROMPT = 40  # characters of a prompt at most
FORMATS = {"gradient_moved": ".1%", "correlation": ".4f", "gradient_cosine": ".4f"}
LABELS = {"segments": "segments of the rollout", "tokens": "tokens of the row, at most"}
SHARE = (
    "A row's share of a step's gradient is |advantage| × loss weight × tokens in the loss, over the sum of "
    "all rows."
)
NO_SHARES = (
    "Shares of the gradient are not known: the dump has no tokens. "
    "source.tokenizer=PATH makes them of its texts."
)


def compare(
    config: DictConfig, output: Path, words: Sequence[str] = (), console: Console | None = None
) -> float:
    """Run every step of a dump through two recipes; print and write the differences.

    Args:
        config: composed with ``task=compare``.
        output: folder for ``config.yaml``, ``compare.json`` and ``report.html``.
        words: overrides of the command line; those of ``pipeline`` apply to both recipes.
        console: where to print; None: standard output.

    Returns:
        The correlation of the advantages.

    Raises:
        ConfigError: ``pipelines`` are not two recipes, ``source.path`` is missing, or one of the recipes does
            not have an option.
        SourceError: a file cannot be read.
        BatchError: a stage refused a step's batch.
    """
    console = console or Console()
    names = list(config.pipelines)
    if len(names) != 2:
        raise ConfigError(f"pipelines must name two recipes, such as pipelines=[as/verl,grpo]; got {names}")
    nodes = list(recipe_nodes(names, words).values())
    pipelines = [build_pipeline(node) for node in nodes]
    source = open_configured(config)
    output.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, output / "config.yaml", resolve=True)
    comparison = Comparison((names[0], names[1]))
    folder = ReportFolder(
        output,
        title=f"{names[0]} and {names[1]}",
        steps=config.report.steps,
        dump=None,  # rows have one advantage in a dump: a replay of each recipe writes them
        page=config.report.html,
        every=config.report.every,
        versus=names,
    )
    folder.configs = [OmegaConf.create({**config, "pipeline": node}) for node in nodes]
    with folder:
        for step, batch in each_step(source, console):
            first, second = (report_of(pipeline, step, batch, config) for pipeline in pipelines)
            differ = {f"versus/{name}": value for name, value in comparison.add(first, second).items()}
            # The report of the first recipe, with the second one's advantages and shares as further columns.
            other = second.columns.get("advantage", np.full(len(second), np.nan))
            beside = {"advantage_by_row": other, "other_share": gradient_share(second.columns)}
            columns, metrics = {**first.columns, **beside}, {**first.metrics, **differ}
            folder.add(dataclasses.replace(first, columns=columns, metrics=metrics))
    shares = comparison.mean_shares()
    movers = [mover._asdict() for mover in comparison.movers]
    numbers = {"numbers": comparison.numbers, "steps_averaged": comparison.averaged}
    result = {"pipelines": names, **numbers, "shares": shares, "movers": movers}
    write_whole(output / "compare.json", lambda file: file.write_text(json_text(result, indent=1)))
    show_comparison(comparison, console)
    console.print(Text(printable(f"written to {output}")), soft_wrap=True)
    return comparison.numbers["correlation"]


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print the numbers of a comparison, and its tables of gradient shares."""

    def by_label(line: tuple[str, np.ndarray]) -> tuple[int, str]:
        return (int(line[0]), "") if line[0].isdecimal() and len(line[0]) < 19 else (0, line[0])

    first, second = map(printable, comparison.names)
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
    title = f"\nthe same rollouts under {first} and {second}"
    title += f", all {comparison.steps:,} steps" if comparison.steps > 1 else ""
    table = FittedTable([FittedColumn("", gives="wrap"), FittedColumn("", right=True)], title)
    for key, value in comparison.numbers.items():
        table.add(labels[key], "–" if math.isnan(value) else format(value, FORMATS.get(key, ",.0f")))
    console.print(table)
    recipes = [FittedColumn(name, gives="wrap", right=True) for name in (first, second)]
    if math.isnan(comparison.moved):
        console.print(Text(f"\n{NO_SHARES}"), soft_wrap=True)
        return
    console.print(Text("\n" + SHARE), soft_wrap=False)
    movers = FittedTable(
        [FittedColumn("step", right=True), FittedColumn("group", right=True), *recipes],
        "\ngroups whose share of their step's gradient differs most",
    )
    for mover in comparison.movers:
        movers.add(f"{mover.step:,}", str(mover.group), f"{mover.first:.1%}", f"{mover.second:.1%}")
    if comparison.movers:
        console.print(movers)
    if comparison.steps > 1:
        of = (f"{steps:,} of {name}" for name, steps in zip((first, second), comparison.trains, strict=True))
        console.print(Text(f"\nBelow are means over the steps that have a gradient: {', '.join(of)}."))
    for name, lines in comparison.mean_shares().items():
        label = FittedColumn(LABELS.get(name, name), gives="cut")
        table = FittedTable([label, *recipes, FittedColumn("rows", right=True)], f"\nshares by {name}")
        rows = sorted(lines.items(), key=lambda line: -abs(line[1][0] - line[1][1]))[:LINES]
        for text, (one, other, count) in sorted(rows, key=by_label):
            shares = (f"{one:.1%}", f"{other:.1%}")
            text = last_user_turn(text) if name == "prompt" else text
            table.add(printable(text)[:PROMPT], *shares, f"{count:,.0f}")
        console.print(table)

"""A report in a terminal: a funnel and a table of groups."""

from __future__ import annotations

import numpy as np
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.printable import printable

from .funnel import UNITS
from .responses import Decode
from .shared_tokens import tree_words
from .step import HasAccount, StepReport, make_report

GROUPS = 12  # lines of the table; the number of other groups is below it
ROLLOUTS = 8  # rewards in a line


def show_report(report: StepReport, *, groups: int = GROUPS) -> Group:
    """A report as Rich prints it, readable at 80 columns. Texts of the batch are not read as markup.

    Args:
        report: of a batch.
        groups: lines of the group table at most. Groups that lost rollouts come first.

    Example:
        >>> import torch
        >>> from rich.console import Console
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import Pipeline, make_report
        >>> pipeline = Pipeline({"collapse": None})
        >>> _ = pipeline(TensorDict({"rollout_id": [0, 1]}, batch_size=[2]))
        >>> Console(width=40).print(show_report(make_report(pipeline)))
        step 0      rows   rollouts
        ───────────────────────────
        collected      2          2
        trained        2          2
    """
    blocks: list[Table | Text] = [_funnel(report)]
    if report.groups:
        blocks += [Text(), _groups(report, groups)]
        if (more := len(report.groups["id"]) - groups) > 0:
            blocks.append(Text(f"and {more:,} groups more", style="dim"))
    blocks += [Text(), Text(words)] if (words := tree_words(report.numbers)) else []
    blocks += [Text(f"warning: {printable(line)}", style="yellow") for line in report.warnings]
    return Group(*blocks)


def print_report(
    processed: HasAccount,
    *,
    step: int = 0,
    console: Console | None = None,
    solved: float = 1.0,
    batch: TensorDictBase | None = None,
    decode: Decode | None = None,
) -> StepReport:
    """Make the report of a run or a pipeline (:func:`make_report`), print it, and return it.

    Args:
        processed: a run, or a pipeline after a batch.
        step: its number.
        console: where to print; None: standard output, as wide as it is, plain where it is no terminal.
        solved: least reward of a solved rollout.
        batch: what came in, to say what its rows would cost as trees; None: not looked at.
        decode: from token ids to as many strings, for texts out of tokens; None: not known.

    Raises:
        RuntimeError: there was no batch, or a stage refused it.
    """
    report = make_report(processed, step=step, solved=solved, batch=batch, decode=decode)
    (console or Console()).print(show_report(report))
    return report


def _funnel(report: StepReport) -> Table:
    units = [unit for unit in UNITS if getattr(report.funnel[0], unit) is not None]
    table = Table(box=SIMPLE, pad_edge=False, header_style="bold", padding=(0, 1), show_edge=False)
    table.add_column(f"step {report.step}")
    for unit in units:
        table.add_column(unit, justify="right")
    levels = report.funnel
    table.add_row("collected", *(_count(getattr(levels[0], unit)) for unit in units))
    for level in levels[1:]:
        for left in level.out:
            words = Text(f"  {printable(level.name)}: {left.reason.replace('_', ' ')}, {left.action}")
            table.add_row(words, *(_minus(getattr(left, unit)) for unit in units), style="dim")
    table.add_row("trained", *(_count(getattr(levels[-1], unit)) for unit in units), style="bold")
    return table


def _groups(report: StepReport, most: int) -> Table:
    groups, each = report.groups, report.rollouts
    asked = "prompt" in report.texts
    table = Table(box=SIMPLE, pad_edge=False, header_style="bold", padding=(0, 1), show_edge=False)
    table.add_column("group", justify="right", no_wrap=True)
    if asked:
        table.add_column("prompt", max_width=18, no_wrap=True, overflow="ellipsis")
    table.add_column("rollouts", justify="right", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("rewards", max_width=24, overflow="fold")
    table.add_column("advantages", no_wrap=True)
    table.add_column("left", overflow="fold")
    worst = np.argsort((groups["trained"] >= groups["rollouts"]) & groups["complete"], kind="stable")
    for g in worst[:most]:
        rollouts = np.flatnonzero(each["group"] == groups["id"][g])
        expected = groups["expected"][g]
        size = f"{groups['rollouts'][g]}" + (f" of {expected}" if expected >= 0 else "")
        cells = [str(groups["id"][g]), size, str(groups["segments"][g]), _values(each["reward"][rollouts])]
        if asked:
            cells.insert(1, printable(" ".join((report.asked(groups["row"][g]) or "").split())))
        credit = each["advantage"][rollouts]
        credit = credit[np.isfinite(credit)]
        cells.append(f"{credit.min():+.2f} … {credit.max():+.2f}" if len(credit) else "–")
        cells.append(_reasons(report, each["reason"][rollouts]))
        trains = bool(groups["trained"][g])
        table.add_row(*(Text(cell) for cell in cells), style="" if trains else "dim")
    return table


def _values(values: np.ndarray) -> str:
    """Rewards, each value once with its count, the most frequent first."""
    known = values[np.isfinite(values)]
    distinct, counts = np.unique(known, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    words = [f"{distinct[i]:.3g}" + (f"×{counts[i]}" if counts[i] > 1 else "") for i in order[:ROLLOUTS]]
    if len(distinct) > ROLLOUTS:
        words.append("…")
    if missing := len(values) - len(known):
        words.append(f"none×{missing}")
    return " ".join(words)


def _reasons(report: StepReport, codes: np.ndarray) -> str:
    distinct, counts = np.unique(codes[codes > 0], return_counts=True)
    return ", ".join(
        printable(report.names[code].replace("_", " ")) + (f" ×{count}" if count > 1 else "")
        for code, count in zip(distinct, counts, strict=True)
    )


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _minus(value: int | None) -> str:
    return "" if not value else f"−{value:,}"

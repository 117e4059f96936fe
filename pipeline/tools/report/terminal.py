"""Show a report in a terminal: a funnel and a table of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.wording import printable, shown_reason
from headrace.transforms.table import count_of

from .advice import Advisory, Setup, symptoms
from .funnel import funnel_table
from .shared_tokens import said_of_trees
from .step import StepReport, make_report
from .survivors import survivors_tables
from .tables import FittedColumn, FittedTable
from .texts import Decode
from .user_turn import asked_line

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.run import Run

GROUPS = 12  # the table shows at most this many groups; below it is the number of other groups
ROLLOUTS = 8  # a line shows at most this many rewards
PROMPT = 40  # a line shows at most this many letters of a prompt
ADVISED = 3  # at most this many advisories are shown; the page has all


def show_report(report: StepReport, *, groups: int = GROUPS, setup: Setup | None = None) -> Group:
    """Return a report for Rich to print, readable at 80 columns. Markup in its texts is shown as text.

    Args:
        report: the report of a batch.
        groups: the table of groups has at most this many lines. Groups that lost rollouts come first.
        setup: as for :func:`show_advisories`.

    Example:
        >>> import torch
        >>> from rich.console import Console
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import Pipeline, make_report
        >>> pipeline = Pipeline({"collapse": None})
        >>> _ = pipeline(TensorDict({"rollout_id": [0, 1]}, batch_size=[2]))
        >>> Console(width=40).print(show_report(make_report(pipeline)))
        step 0     rows  rollouts
        ─────────────────────────
        collected     2         2
        trained       2         2
    """
    blocks: list[FittedTable | Text] = [funnel_table(f"step {report.step}", report.funnel)]
    if report.groups:
        blocks += [Text(), _groups(report, groups)]
        if (more := len(report.groups["id"]) - groups) > 0:
            blocks.append(Text(f"and {count_of(more, 'group')} more", style="dim"))
    for table in survivors_tables(report.survivors).values():
        blocks += [Text(), table]
    blocks += [Text(), Text(words)] if (words := said_of_trees(report.numbers)) else []
    return Group(*blocks, *show_advisories(report.advisories, setup=setup))


def show_advisories(
    advisories: Sequence[Advisory],
    verdict: str | None = None,
    unchecked: Sequence[str] = (),
    setup: Setup | None = None,
) -> list[Text]:
    """Show a verdict, the first advisories, each with a remedy, and a line about unchecked symptoms.

    Args:
        advisories: the advisories, most urgent first.
        verdict: the sentence about the reward. No advisory repeats it.
        unchecked: names of symptoms that were not checked.
        setup: how the command was set up, so that remedies are options of the run (:meth:`Remedy.under`).
    """
    said = verdict or ""
    lines = list[Text]()
    for each in advisories[:ADVISED]:
        trend = said.startswith(each.text.removesuffix("."))
        said = said if trend else said.replace(f" {each.text}", "")
        known = symptoms()[each.name].remedies if each.name in symptoms() else ()
        remedy = next((found for one in known if (found := one.under(setup)) is not None), None)
        words = "" if remedy is None else remedy.text.removesuffix(".").replace("`", "")
        words += f": {remedy.overrides}" if remedy is not None and remedy.overrides else ""
        parts = [part for part in ("" if trend else each.text, words and f"→ {words}") if part]
        name = f"first, {each.name}" if len(advisories) > 1 and not lines else each.name
        lines += [Text(f"{name}: {printable(' '.join(parts))}", style="yellow")] if parts else []
    if len(advisories) > ADVISED:
        lines.append(Text(f"and {len(advisories) - ADVISED} more, on the page", style="yellow"))
    if unchecked:
        lines.append(Text(said_of_unchecked(unchecked), style="dim"))
    return [Text(printable(said), style="bold"), *lines] if verdict is not None else lines


def said_of_unchecked(names: Sequence[str]) -> str:
    """Say which symptoms were not checked, or how many.

    Example:
        >>> said_of_unchecked(["stale", "stalled", "off-policy", "groups-incomplete"])
        'not checked, for lack of data: stale, stalled and 2 more'
    """
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return f"not checked, for lack of data: {', '.join(names[: 2 if more else 3])}{more}" if names else ""


def print_report(
    processed: Run | Pipeline,
    *,
    step: int | None = None,
    console: Console | None = None,
    solved: float = 1.0,
    batch: TensorDictBase | None = None,
    decode: Decode | None = None,
) -> StepReport:
    """Make the report of a run or a pipeline (:func:`make_report`), print it, and return it.

    Args:
        processed: a run, or a pipeline after a batch.
        step: number of the step; None: the run's number.
        console: where to print; None: standard output, as plain text unless it is a terminal.
        solved: least reward of a solved rollout.
        batch: the input of the pipeline, for the cost of its rows as trees. None: the cost is left out.
        decode: function from a list of token ids to one string for each id. None: no texts of tokens.

    Raises:
        RuntimeError: there was no batch, or a stage refused it.
    """
    report = make_report(processed, step=step, solved=solved, batch=batch, decode=decode)
    (console or Console()).print(show_report(report))
    return report


def _groups(report: StepReport, most: int) -> FittedTable:
    groups, each = report.groups, report.rollouts
    asked = "prompt" in report.texts
    prompt = [FittedColumn("prompt", gives="cut", leaves=3)] if asked else []
    some_left = ((groups["compared"] >= 0) & (groups["compared"] < groups["rollouts"])).any()
    compared = [FittedColumn("compared", right=True, leaves=4)] if some_left else []
    table = FittedTable(
        [
            FittedColumn("group", gives="cut" if "group_label" in report.texts else "nothing", right=True),
            *prompt,
            FittedColumn("rollouts", right=True),
            *compared,
            FittedColumn("rows", right=True, leaves=2),
            FittedColumn("rewards", gives="wrap"),
            FittedColumn("advantages", leaves=1),
            FittedColumn("left", gives="wrap"),
        ]
    )
    worst = np.argsort((groups["trained"] >= groups["rollouts"]) & groups["complete"], kind="stable")
    ids = report.ids("group", groups["row"])
    for g in worst[:most]:
        rollouts = np.flatnonzero(each["group"] == groups["id"][g])
        expected = groups["expected"][g]
        credit = each["advantage"][rollouts]
        credit = credit[np.isfinite(credit)]
        cells = [
            f"{groups['rollouts'][g]}" + (f" of {expected}" if expected >= 0 else ""),
            *([str(groups["compared"][g])] if some_left else []),
            str(groups["segments"][g]),
            _values(each["reward"][rollouts]),
            f"{credit.min():+.2f} … {credit.max():+.2f}" if len(credit) else "–",
            _reasons(report, each["reason"][rollouts]),
        ]
        if asked:
            cells.insert(0, asked_line(report.texts["prompt"][groups["row"][g]], PROMPT))
        table.add(str(ids[g]), *cells, style="" if groups["trained"][g] else "dim")
    return table


def _values(values: np.ndarray) -> str:
    """Format rewards: each value once with its count, the most frequent first."""
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
    named = (report.names[code].rpartition("/") for code in distinct)
    words = [shown_reason(stage, reason) for stage, _, reason in named]
    return ", ".join(
        word + (f" ×{count}" if count > 1 else "") for word, count in zip(words, counts, strict=True)
    )

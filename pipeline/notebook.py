"""Pipelines, ledgers and reports as a notebook shows them: tables in its own colours, without a script.

And a pipeline as text and in a terminal, its stages one below another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from .wording import count_words, minus_words, printable, reason_words

if TYPE_CHECKING:
    from .report.measuring.funnel import Level

GROUPS = 12  # lines of a table of groups; the number of other groups is below it
CELL = "padding:.1em .7em;border:0;border-bottom:1px solid rgba(128,128,128,.35);vertical-align:top"
DIM = "opacity:.7"


class StageListing:
    """Stages in order, each with its options that are not at their defaults."""

    stages: nn.ModuleDict
    order: list[str]

    def __repr__(self) -> str:
        lines = [f"  {i}. {name}: {self.stages[name]!r}" for i, name in enumerate(self.order, start=1)]
        return "\n".join(["Pipeline", *lines])

    def _repr_html_(self) -> str:
        return stages_html((name, repr(self.stages[name])) for name in self.order)


def show_pipeline(pipeline: StageListing) -> Group:
    """A pipeline as Rich prints it: options that do not fit go on below the stage that has them.

    Args:
        pipeline: of any stages; their text is not read as markup.

    Example:
        >>> from rich.console import Console
        >>> from headrace.pipeline import Pipeline
        >>> from headrace.transforms import ShuffleSplit
        >>> pipeline = Pipeline({"split": ShuffleSplit(minibatches=2, remainder="pad")})
        >>> Console(width=40).print(show_pipeline(pipeline))  # doctest: +NORMALIZE_WHITESPACE
        Pipeline
          1. split: ShuffleSplit(minibatches=2,
                    remainder='pad')
    """
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, name in enumerate(pipeline.order, start=1):
        table.add_row(Text(f"  {number}. {printable(name)}:"), Text(printable(repr(pipeline.stages[name]))))
    return Group(Text("Pipeline"), table)


class ColumnTable(dict[str, np.ndarray]):
    """Columns of equal length by name, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return columns_html(self)


def stages_html(stages: Iterable[tuple[str, str]]) -> str:
    """A pipeline's stages, in order, with the options that are not at their defaults.

    Args:
        stages: (name, text) of each.

    Example:
        >>> "<td" in stages_html([("gate", "CompletenessGate(group_size=8)")])
        True
    """
    rows = []
    for number, (name, text) in enumerate(stages, start=1):
        kind, _, options = text.partition("(")
        rows.append([str(number), name, kind, options.removesuffix(")")])
    return html_table("Pipeline", ["", "stage", "class", "options"], rows, numeric={0})


def ledger_html(
    reason: np.ndarray, names: Sequence[str], actions: Sequence[str], ids: Mapping[str, np.ndarray]
) -> str:
    """What came in, what is trained, and what left for which reason.

    Args:
        reason: (N,) code of each row.
        names: ``stage/reason`` by code.
        actions: by code.
        ids: (N,) by unit.
    """
    from .report.measuring.funnel import funnel  # here: reports import this module

    columns = {"reason": reason} | {f"{unit.removesuffix('s')}_id": column for unit, column in ids.items()}
    return funnel_html("Ledger", funnel(columns, [], names, actions))


def funnel_html(caption: str, levels: Sequence[Level]) -> str:
    """What was collected, what left each stage for which reason, and what is trained."""
    units = [
        unit for unit in ("rows", "rollouts", "groups", "tokens") if getattr(levels[0], unit) is not None
    ]
    rows = [["collected", *(count_words(getattr(levels[0], unit)) for unit in units)]]
    for level in levels[1:]:
        for left in level.out:
            text = f"{reason_words(level.name, left.reason)}, {left.action}"
            rows.append([text, *(minus_words(getattr(left, unit)) for unit in units)])
    rows.append(["trained", *(count_words(getattr(levels[-1], unit)) for unit in units)])
    numeric, dim = range(1, len(units) + 1), range(1, len(rows) - 1)
    return html_table(caption, ["", *units], rows, numeric=numeric, dim=dim)


def report_html(
    caption: str,
    levels: Sequence[Level],
    advice: Sequence[str],
    groups: Mapping[str, np.ndarray],
    numbers: Mapping[str, float],
) -> str:
    """A report: the funnel, what is worth a look, groups, and behind a click its numbers."""
    parts = [funnel_html(caption, levels)]
    parts += [f"<p>{shown_text(line)}</p>" for line in advice]
    parts += [columns_html(groups, "Groups")] if groups else []
    values = [[name, shown_value(value)] for name, value in numbers.items()]
    listed = html_table("", ["number", "value"], values, numeric={1})
    return "".join([*parts, f"<details><summary>{len(numbers)} numbers</summary>{listed}</details>"])


def columns_html(columns: Mapping[str, np.ndarray], caption: str = "") -> str:
    """Columns of equal length side by side, the first rows of them."""
    length = max((len(column) for column in columns.values()), default=0)
    rows = [[shown_value(column[i]) for column in columns.values()] for i in range(min(length, GROUPS))]
    head = [name.replace("_", " ") for name in columns]
    more = f"<p>and {length - GROUPS:,} more</p>" if length > GROUPS else ""
    return html_table(caption, head, rows, numeric=range(len(head))) + more


def html_table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Iterable[int] = (),
    dim: Iterable[int] = (),
) -> str:
    """A table of texts, none of which is read as HTML.

    Args:
        caption: above it.
        head: names of the columns.
        rows: cells.
        numeric: columns that are numbers, and stand to the right.
        dim: rows that are said in passing.
    """
    right, pale = set(numeric), set(dim)

    def cell(tag: str, column: int, text: str) -> str:
        align = "right" if column in right else "left"
        return f'<{tag} style="{CELL};text-align:{align}">{shown_text(text)}</{tag}>'

    lines = ["".join(cell("th", i, text) for i, text in enumerate(head))]
    lines += ["".join(cell("td", i, text) for i, text in enumerate(row)) for row in rows]
    styles = [f' style="{DIM}"' if i - 1 in pale else "" for i in range(len(lines))]
    body = "".join(f"<tr{style}>{line}</tr>" for style, line in zip(styles, lines, strict=True))
    above = f'<caption style="text-align:left">{shown_text(caption)}</caption>' if caption else ""
    wide = '<div style="overflow-x:auto"><table style="border-collapse:collapse">'
    return f"{wide}{above}{body}</table></div>"


def shown_text(text: str) -> str:
    """Text as HTML shows it, whatever is in it."""
    return escape(printable(text))


def shown_value(value: Any) -> str:
    """A number in a few digits; an id with all of its; what is not known as a dash."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return str(value)
    if not isinstance(value, float | np.floating):
        return str(value)
    if not np.isfinite(value):
        return "–" if np.isnan(value) else str(value)
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"

"""Show pipelines, ledgers and columns in a notebook, and pipelines in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from headrace.pipeline.wording import printable

from .funnel import funnel, funnel_table
from .tables import FittedColumn, FittedTable

LINES = 12  # rows that a table of columns shows; the caption counts the others


def pipeline_html(pipeline: Any) -> str:
    """Return a pipeline as an HTML table for a notebook."""
    head = [FittedColumn("", right=True), *map(FittedColumn, ("stage", "class", "options"))]
    table = FittedTable(head, "Pipeline")
    for number, name in enumerate(pipeline.order, start=1):
        kind, _, options = repr(pipeline.stages[name]).partition("(")
        table.add(str(number), name, kind, options.removesuffix(")"))
    return table._repr_html_()


def show_pipeline(pipeline: Any) -> Group:
    """Return a pipeline for Rich to print. Long options wrap below the stage's name.

    Args:
        pipeline: any pipeline. Rich markup in its text is not interpreted.

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


def ledger_html(
    reason: np.ndarray, names: Sequence[str], actions: Sequence[str], ids: Mapping[str, np.ndarray]
) -> str:
    """Return a ledger as an HTML table: rows in, rows trained, and rows out by reason.

    Args:
        reason: (N,) code of each row.
        names: ``stage/reason`` by code.
        actions: ``masked``, ``excluded``, ``dropped`` or ``carried``, by code.
        ids: (N,) ids for each unit.
    """
    columns = {"reason": reason} | {f"{unit.removesuffix('s')}_id": column for unit, column in ids.items()}
    return funnel_table("", funnel(columns, [], names, actions), title="Ledger")._repr_html_()


class ColumnTable(dict[str, np.ndarray]):
    """Columns of equal length by name. A notebook shows the first rows as a table."""

    def _repr_html_(self, title: str = "") -> str:
        length = max(map(len, self.values()), default=0)
        caption = f"and {length - LINES:,} more" if length > LINES else ""
        table = FittedTable(
            [FittedColumn(name.replace("_", " "), right=True) for name in self], title, caption
        )
        for row in range(min(length, LINES)):
            table.add(*(shown_value(column[row]) for column in self.values()))
        return table._repr_html_()


def shown_value(value: Any) -> str:
    """Format a value: a float with four digits, a whole number in full, NaN as a dash."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if not isinstance(value, float | np.floating):
        return str(value)
    if not np.isfinite(value):
        return "–" if np.isnan(value) else str(value)
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"

"""Make tables of numbers, some with a target, for the terminal, JSON and Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group
from rich.table import Table as ConsoleTable
from rich.text import Text


@dataclass(frozen=True)
class Cell:
    """A number, or None if the number could not be measured on this machine.

    Args:
        value: the number, from one run.
        form: its format specification, as in an f-string.
        target: the greatest value that meets the target.
        at_least: whether the target is the least value instead.
    """

    value: float | None
    form: str = ".2f"
    target: float | None = None
    at_least: bool = False

    @property
    def missed(self) -> bool:
        """Whether the cell has a target and misses it."""
        if self.value is None or self.target is None:
            return False
        return self.value < self.target if self.at_least else self.value > self.target

    @property
    def goal(self) -> str:
        """The target as text."""
        return f"{'≥' if self.at_least else '≤'} {self.target:,g}"

    def __str__(self) -> str:
        number = "not measured" if self.value is None else format(self.value, self.form)
        if self.target is None:
            return number
        return f"{number} ({self.goal}{': missed' if self.missed else ''})"


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    name: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Table:
    """A table of the numbers of one run.

    Args:
        title: the name of what was measured.
        note: text that says what the rows and columns mean.
        head: titles of all columns; the first column has the names of rows.
        rows: the rows. Each has a cell for every column except the first.
    """

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.head) - 1:
                raise ValueError(f"{self.title}, {row.name}: {len(row.cells)} cells under {self.head}")

    @classmethod
    def of(cls, plain: dict) -> Table:
        """Make a table from its JSON data."""
        rows = [Row(row["name"], [Cell(**cell) for cell in row["cells"]]) for row in plain["rows"]]
        return cls(**plain | {"rows": rows})

    def console(self) -> Group:
        """The table for the terminal."""
        table = ConsoleTable(title=self.title)
        for number, name in enumerate(self.head):
            table.add_column(Text(name), justify="right" if number else "left")
        for row in self.rows:
            table.add_row(Text(row.name), *map(str, row.cells))
        return Group(table, Text(" ".join(self.note.split())), "")

    def markdown(self) -> str:
        """The table for the page, with missed targets in bold."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)]]
        for row in self.rows:
            lines.append([row.name, *(f"**{cell}**" if cell.missed else str(cell) for cell in row.cells)])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{_filled(self.note)}\n\n{table}\n"


def _filled(note: str) -> str:
    """Wrap the paragraphs of a note and the items of its lists to lines of equal length."""
    blocks = re.split(r"\n\n|\n(?=- )", note)
    lines = [
        textwrap.fill(
            " ".join(block.split()),
            118,
            subsequent_indent="  " * block.startswith("- "),
            break_on_hyphens=False,
            break_long_words=False,
        )
        for block in blocks
    ]
    out = lines[0]
    for before, line in pairwise(lines):
        in_list = before.startswith("- ") and line.startswith("- ")
        out += f"{chr(10) if in_list else chr(10) * 2}{line}"
    return out

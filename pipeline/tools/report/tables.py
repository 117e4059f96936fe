"""Lay out tables of texts for terminals, without broken words in narrow windows, and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.segment import Segment
from rich.text import Text

from headrace.pipeline.wording import printable

GAP = 2  # blanks between columns
LONGEST_WORD = 28  # longer words may be broken; only data, not reasons, have such words
SHORTEST_CUT = 10  # least width of a cell that is cut, with its ellipsis
CELL = "padding:.1em .7em;border:0;border-bottom:1px solid rgba(128,128,128,.35);vertical-align:top"

Give = Literal["nothing", "wrap", "cut"]


@dataclass
class FittedColumn:
    """A column, with the way in which it shrinks in a narrow window.

    Attributes:
        name: title of the column.
        gives: how it shrinks: ``nothing`` (it does not), ``wrap`` between words, or ``cut`` with an ellipsis.
        right: whether it is aligned to the right, as numbers are.
        leaves: the order of removal if columns still do not fit; the greatest number is removed first. 0:
            never.
    """

    name: str
    gives: Give = "nothing"
    right: bool = False
    leaves: int = 0

    def __post_init__(self) -> None:
        self.name = printable(self.name)

    def widths(self, cell: Text) -> tuple[int, int]:
        """The least width at which no word of a cell is broken, and the width at which nothing wraps."""
        widest = max(map(cell_len, cell.plain.splitlines()), default=0)
        if self.gives == "nothing":
            return widest, widest
        longest = max(map(cell_len, cell.plain.split()), default=0)
        return min(widest, SHORTEST_CUT if self.gives == "cut" else min(longest, LONGEST_WORD)), widest

    def lines(self, cell: Text, width: int, indent: int, console: Console) -> list[str]:
        """Return a cell as lines of `width` letters, including the indentation."""
        free, lines = max(width - indent, 0), [cell.plain.rstrip() if self.right else cell.plain]
        if "\n" in cell.plain or cell_len(cell.plain) > free:
            overflow: OverflowMethod = "fold" if self.gives == "wrap" else "ellipsis"
            wrapped = cell.wrap(console, max(free, 1), overflow=overflow)
            lines = [line.plain.rstrip() if self.right else line.plain for line in wrapped] or [""]
        blanks = [" " * (free - cell_len(line)) for line in lines]
        filled = (
            blank + line if self.right else line + blank for line, blank in zip(lines, blanks, strict=True)
        )
        return [" " * indent + line for line in filled]


@dataclass
class FittedTable:
    """A table of texts for Rich and for notebooks. Rich lays it out for the width of the terminal.

    Attributes:
        columns: columns in order.
        title: text above the table; empty: none.
        caption: text below the table; empty: none.
        rows: cells, style and indentation of each row.

    Example:
        >>> from rich.console import Console
        >>> table = FittedTable([FittedColumn("left", gives="wrap"), FittedColumn("rows", right=True)])
        >>> table.add("gate: incomplete", "-12")
        >>> Console(width=17).print(table)  # doctest: +NORMALIZE_WHITESPACE
        left         rows
        ─────────────────
        gate:         -12
        incomplete
    """

    columns: Sequence[FittedColumn]
    title: str = ""
    caption: str = ""
    rows: list[tuple[list[Text], str, int]] = field(default_factory=list)

    def add(self, *cells: str, style: str = "", indent: int = 0) -> None:
        """Add a row, with the first cell indented by `indent` letters. Markup in cells is shown as text."""
        one_line = (column.gives == "cut" for column in self.columns)
        texts = [Text(printable(cell), no_wrap=cut) for cell, cut in zip(cells, one_line, strict=True)]
        self.rows.append((texts, style, indent))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bounds = [self.bounds(k) for k in range(len(self.columns))]
        shown = columns_that_fit(self.columns, [least for least, _ in bounds], options.max_width)
        widths = widths_within([bounds[k] for k in shown], options.max_width - GAP * (len(shown) - 1))
        if self.title:
            yield Text(self.title, "italic")
        head = [([Text(column.name) for column in self.columns], "bold", 0)] * self.has_titles
        for number, (texts, style, indent) in enumerate([*head, *self.rows], start=1 - self.has_titles):
            lines = [
                self.columns[k].lines(texts[k], width, indent * (place == 0), console)
                for place, (k, width) in enumerate(zip(shown, widths, strict=True))
            ]
            height = max(map(len, lines))
            for own, width in zip(lines, widths, strict=True):
                blank = [" " * width] * (height - len(own))
                own[:] = blank + own if number == 0 else own + blank  # titles are aligned to the bottom
            for line in zip(*lines, strict=True):
                yield Segment((" " * GAP).join(line), console.get_style(style))
                yield Segment.line()
            if number == 0:
                yield Segment("─" * (sum(widths) + GAP * (len(widths) - 1)))
                yield Segment.line()
        if self.caption:
            yield Text(self.caption, "dim italic")

    def _repr_html_(self) -> str:
        lines = []  # all texts are escaped
        head = [("th", ([Text(column.name) for column in self.columns], "", 0))] * self.has_titles
        for tag, (texts, style, _) in [*head, *(("td", row) for row in self.rows)]:
            cells = ""
            for column, text in zip(self.columns, texts, strict=True):
                align = "right" if column.right else "left"
                cells += f'<{tag} style="{CELL};text-align:{align}">{escape(text.plain)}</{tag}>'
            lines.append(f"<tr{' style=opacity:.7' if style == 'dim' else ''}>{cells}</tr>")
        title = f'<caption style="text-align:left">{escape(printable(self.title.strip()))}</caption>'
        table = f'<table style="border-collapse:collapse">{title * bool(self.title)}{"".join(lines)}</table>'
        caption = f"<p>{escape(printable(self.caption))}</p>" if self.caption else ""
        return f'<div style="overflow-x:auto">{table}</div>{caption}'

    @property
    def has_titles(self) -> bool:
        """Whether any column has a title. If none has, there is no line of titles."""
        return any(column.name for column in self.columns)

    def bounds(self, k: int) -> tuple[int, int]:
        """The least width of column `k` at which no word is broken, and the width at which nothing wraps."""
        column = self.columns[k]
        least, most = column.widths(Text(column.name))
        most = least if column.gives == "wrap" else most  # titles may wrap if cells are narrower
        for texts, _, indent in self.rows:
            within = column.widths(texts[k])
            least, most = (max(a, b + indent * (k == 0)) for a, b in zip((least, most), within, strict=True))
        return least, most


def columns_that_fit(columns: Sequence[FittedColumn], least: Sequence[int], width: int) -> list[int]:
    """Return the indices of the columns that are shown, in order.

    Args:
        columns: columns of the table.
        least: least width of each column.
        width: width of the terminal.

    Example:
        >>> columns = [FittedColumn("id"), FittedColumn("prompt", leaves=2), FittedColumn("rows", leaves=1)]
        >>> columns_that_fit(columns, [5, 10, 4], 12)
        [0, 2]
    """
    shown = list(range(len(columns)))
    while sum(least[k] for k in shown) + GAP * (len(shown) - 1) > width:
        spare = [k for k in shown if columns[k].leaves]
        if not spare:
            break
        shown.remove(max(spare, key=lambda k: columns[k].leaves))
    return shown


def widths_within(bounds: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Distribute a width over columns: each gets its least width, and then a share of the rest.

    Args:
        bounds: the least and the greatest width of each column.
        width: total width.

    Example:
        >>> widths_within([(5, 5), (4, 30), (3, 8)], 30)
        [5, 17, 8]
    """
    widths = [least for least, _ in bounds]
    rest = width - sum(widths)
    if rest < 0:  # the words do not fit
        while sum(widths) > max(width, len(widths)):
            widths[widths.index(max(widths))] -= 1
        return widths
    wanting = sorted(range(len(bounds)), key=lambda k: bounds[k][1] - bounds[k][0])
    for place, k in enumerate(wanting):
        more = max(0, min(bounds[k][1] - bounds[k][0], rest // (len(wanting) - place)))
        widths[k] += more
        rest -= more
    return widths

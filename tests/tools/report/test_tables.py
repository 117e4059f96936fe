"""A table is laid out for the width of a terminal, and for a notebook."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.pipeline.tools.report import FittedColumn, FittedTable
from headrace.pipeline.tools.report.tables import CELL, widths_within


def table() -> FittedTable:
    """Each way to shrink, a column that leaves, letters of two cells, an indented row and an empty one."""
    columns = [
        FittedColumn("name of it", gives="wrap"),
        FittedColumn("cut", gives="cut"),
        FittedColumn("n", right=True),
        FittedColumn("most", right=True, gives="wrap", leaves=1),
    ]
    made = FittedTable(columns, "a title", "a caption")
    made.add("alpha beta", "what is the sum", "1", "2 3")
    made.add("gamma delta epsilon", "漢字漢字漢字", "1,000", "12 345 678", style="dim", indent=2)
    made.add("", "", "", "")
    made.add("x" * 32, "y", "7", "")
    return made


WIDE = """\
a title
name of it                        cut                  n        most
────────────────────────────────────────────────────────────────────
alpha beta                        what is the sum      1         2 3
  gamma delta epsilon             漢字漢字漢字     1,000  12 345 678

xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx  y                    7
a caption
"""
MIDDLE = """\
a title
name of it                      cut               n     most
────────────────────────────────────────────────────────────
alpha beta                      what is the…      1      2 3
  gamma delta epsilon           漢字漢字漢字  1,000   12 345
                                                         678

xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx  y                 7
xx
a caption
"""
NARROW = """\
a title
name of it   cut             n
──────────────────────────────
alpha beta   what is t…      1
  gamma      漢字漢字 …  1,000
  delta
  epsilon

xxxxxxxxxxx  y               7
xxxxxxxxxxx
xxxxxxxxxx
a caption
"""


TOO_NARROW = """\
a title
name
of it  cut         n
────────────────────
alpha  what …      1
beta
  gam  漢字 …  1,000
  ma
  del
  ta
  eps
  ilo
  n

xxxxx  y           7
xxxxx
xxxxx
xxxxx
xxxxx
xxxxx
xx
a caption
"""


@pytest.mark.parametrize(
    ("width", "shown"), [(70, WIDE), (68, WIDE), (60, MIDDLE), (30, NARROW), (20, TOO_NARROW)]
)
def test_a_table_at_each_width_equals_one_by_hand(width, shown):
    """At 68 nothing wraps. At 30 the last column is left out. At 20 a title wraps, and words are broken."""
    out = io.StringIO()
    Console(file=out, width=width).print(table())
    lines = out.getvalue().splitlines()
    assert [line.rstrip() for line in lines] == shown.splitlines()


def test_titles_and_dim_rows_have_a_style_in_a_terminal():
    out = io.StringIO()
    Console(file=out, width=70, force_terminal=True, color_system="standard").print(table())
    lines = out.getvalue().splitlines()
    styles = {
        at: line.partition("m")[0].removeprefix("\x1b[") for at, line in enumerate(lines) if "\x1b" in line
    }
    assert styles == {0: "3", 1: "1", 4: "2", 7: "2;3"}


@pytest.mark.parametrize(
    ("bounds", "width", "widths"),
    [
        ([(5, 5), (4, 30), (3, 8)], 30, [5, 17, 8]),
        ([(5, 5), (4, 30), (3, 8)], 43, [5, 30, 8]),
        ([(5, 5), (4, 30), (3, 8)], 99, [5, 30, 8]),
        ([(5, 5), (4, 30), (3, 8)], 12, [5, 4, 3]),
        ([(0, 10), (0, 10)], 7, [3, 4]),  # the odd cell goes to the last column
        ([(5, 5), (4, 30), (3, 8)], 11, [4, 4, 3]),  # the words do not fit: the widest column shrinks
        ([(5, 5), (4, 30), (3, 8)], 9, [3, 3, 3]),
        ([(5, 5), (4, 30), (3, 8)], 1, [1, 1, 1]),
        ([(2, 2)], 0, [1]),
    ],
)
def test_a_width_is_shared_by_the_columns_as_by_hand(bounds, width, widths):
    assert widths_within(bounds, width) == widths


def test_a_notebook_has_all_cells_with_their_alignment():
    made = FittedTable([FittedColumn("<a>"), FittedColumn("b", right=True)], "t&\x1b", "c<")
    made.add("1", "2", style="dim")
    made.add("3", "4", style="bold")
    (left, right) = (f'style="{CELL};text-align:{side}"' for side in ("left", "right"))
    assert made._repr_html_() == (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse">'
        '<caption style="text-align:left">t&amp;\\x1b</caption>'
        f"<tr><th {left}>&lt;a&gt;</th><th {right}>b</th></tr>"
        f"<tr style=opacity:.7><td {left}>1</td><td {right}>2</td></tr>"
        f"<tr><td {left}>3</td><td {right}>4</td></tr></table></div><p>c&lt;</p>"
    )
    bare = FittedTable([FittedColumn("")])
    bare.add("1")
    assert bare._repr_html_() == (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse">'
        f"<tr><td {left}>1</td></tr></table></div>"
    )

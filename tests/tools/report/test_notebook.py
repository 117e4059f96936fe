"""A notebook shows tables with the numbers of the objects, and data are escaped."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from batches import batch_of
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.tools.report.notebook import ColumnTable, shown_value
from headrace.transforms import Criterion, FanOutCollapse, SampleFilter

pytestmark = pytest.mark.slow

TAGS = {"div", "table", "caption", "tr", "th", "td", "p", "details", "summary"}
HOSTILE = '<img src=x onerror="alert(1)">&amp;\x1b[31m\u202e<table><script>'


class Tables(HTMLParser):
    """A parser that reads the tables of some HTML as rows of cells. Anything but plain tables is an error."""

    def __init__(self, html: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text, self._open = "", []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS
        assert {name for name, _ in attributes} <= {"style"}
        for _, style in attributes:
            assert "color" not in style.replace("border", "")
            assert "url" not in style
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self._open and self._open[-1] in ("th", "td"):
            self.tables[-1][-1][-1] += data


def tables(thing) -> list[list[list[str]]]:
    return Tables(thing._repr_html_()).tables


def test_a_pipeline_lists_its_stages_with_non_default_options():
    pipeline = composed("pipeline=grpo", "pipeline.stages.gate.group_size=2")
    (head, *rows), = tables(pipeline)  # fmt: skip
    assert head == ["", "stage", "class", "options"]
    assert [row[1] for row in rows] == pipeline.order
    assert rows[0] == ["1", "gate", "CompletenessGate", "group_size=2"]
    assert [f"  {n}. {name}: {kind}({options})" for n, name, kind, options in rows] == repr(
        pipeline
    ).splitlines()[1:]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_a_ledger_counts_rows_rollouts_and_groups(rows):
    """A rollout or group leaves with its last row."""
    rollouts, kept = (list(column) for column in zip(*rows, strict=True))
    groups = [rollout // 2 for rollout in rollouts]
    batch = TensorDict(
        {"group_id": groups, "rollout_id": rollouts, "kept": torch.tensor(kept)}, batch_size=[len(rows)]
    )
    only_kept = SampleFilter(criterion=lambda b: b["kept"], action="drop")
    ledger = Pipeline({"filter": only_kept}).run(batch).ledger
    (head, *lines), = tables(ledger)  # fmt: skip
    stay = [i for i, each in enumerate(kept) if each]

    def counts(places):
        return [len(places), len({rollouts[i] for i in places}), len({groups[i] for i in places})]

    everyone, trained = counts(range(len(rows))), counts(stay)
    left = [a - b for a, b in zip(everyone, trained, strict=True)]
    expected = [["collected", *map(str, everyone)], ["trained", *map(str, trained)]]
    if left[0]:
        name = ledger.names[1].replace("/", ": ").replace("_", " ")
        expected.insert(1, [f"{name}, dropped", *(f"−{count}" if count else "0" for count in left)])
    assert head == ["", "rows", "rollouts", "groups"]
    in_part = [line for line in lines if line[0].startswith("parts of ")]
    assert [line for line in lines if line not in in_part] == expected
    gone = [i for i, each in enumerate(kept) if not each]
    parts = [a + b > c for a, b, c in zip(counts(gone), trained, everyone, strict=True)]
    assert bool(in_part) == any(parts)


def test_a_report_has_the_funnel_the_groups_and_the_numbers():
    batch = batch_of([1.0, 3, 5, 5], [0, 0, 7, 7])
    run = composed("pipeline=grpo", "pipeline.stages.gate.group_size=2").run(batch)
    report = make_report(run, step=3)
    funnel, groups, numbers = tables(report)
    assert funnel[0][1:3] == ["rows", "rollouts"]
    assert funnel[2][:3] == ["filter: zero variance, masked", "−2", "−2"]
    assert groups[0][:3] == ["id", "row", "segments"]
    assert [row[0] for row in groups[1:]] == ["0", "7"]
    assert dict(numbers[1:])["rows/trained"] == "2"
    assert len(numbers) == len(report.numbers) + 1
    assert tables(report.groups)[0] == groups
    assert len(tables(report.rollouts)[0]) == 5
    assert tables(run) == tables(run.ledger)


@pytest.mark.parametrize(("rows", "more"), [(12, ""), (13, "and 1 more"), (1012, "and 1,000 more")])
def test_a_long_table_has_the_number_of_hidden_rows(rows, more):
    table = ColumnTable(a_b=np.arange(rows), c=np.linspace(0, 1, rows))
    shown = Tables(table._repr_html_("title"))
    (head, *lines), = shown.tables  # fmt: skip
    assert head == ["a b", "c"]
    assert lines == [[str(row), shown_value(table["c"][row])] for row in range(12)]
    assert shown.text.endswith(f"{lines[-1][1]}{more}")
    assert shown.text.startswith("title")
    assert Tables(ColumnTable()._repr_html_()).tables == [[]]


def test_data_are_escaped_in_html():
    class Odd(Criterion):
        reason = HOSTILE

        def __call__(self, batch):
            return batch["rollout_id"] > 4

        def __repr__(self):
            return HOSTILE

    pipeline = Pipeline({"collapse": FanOutCollapse(), "odd": SampleFilter(criterion=Odd(), action="drop")})
    run = pipeline.run(batch_of([1.0, 2, 3], [0, 0, 0], [4, 5, 6]))
    for thing in (pipeline, run, run.ledger, make_report(run), make_report(run).groups):
        html = thing._repr_html_()
        found = Tables(html)  # only tags of tables
        assert "\x1b" not in html
        assert "\u202e" not in html
        if thing in (pipeline, run):
            assert '<img src=x onerror="alert(1)">&amp;' in found.text


def test_numbers_are_short_and_ids_are_whole():
    values = [2**62, np.int64(7), 0.123456, 11610.0, float("nan"), np.inf, np.True_, "text", False, -np.inf]
    values += [1e15, 1e15 - 1, -1e15, np.float32(0.5), 2.6, 1.4]
    assert [shown_value(value) for value in values] == [
        str(2**62), "7", "0.1235", "11,610", "–", "inf", "yes", "text", "no", "-inf",
        "1e+15", "999,999,999,999,999", "-1e+15", "0.5", "2.6", "1.4",
    ]  # fmt: skip

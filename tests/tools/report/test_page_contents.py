"""The data of a page are those of its reports, cut to what a page can hold."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reports_by_hand import COLUMNS, TEXTS, report_by_hand

from headrace.pipeline import page_data
from headrace.pipeline.tools.report import symptoms
from headrace.pipeline.tools.report.page_contents import columns_beside, cut_tokens, fitting_texts, shortened
from headrace.pipeline.tools.report.texts import TokenValues

CONTENTS = sys.modules["headrace.pipeline.tools.report.page_contents"]


def whole(start: str) -> dict[str, Any]:
    return {"start": start, "missing": 0, "end": ""}


def test_every_column_of_a_page_equals_one_by_hand():
    """The row 0 has the whole gradient. The newest policy has the version 7."""
    report = report_by_hand()
    (step,) = page_data([report], title="t")["steps"]
    assert step["groups"] == {
        "id": ["five", "three"],
        "label": ["One and one?", "Two?"],
        "asked": [whole("One\nand one?"), whole("Two?")],
        "prompt": [whole("user: One\nand one?"), None],
        "rollouts": [2, 0],
        "expected": [3, None],
        "compared": [2, 0],
        "baseline": [0.5, None],
        "reward_mean": [0.5, None],
        "reward_std": [pytest.approx(math.sqrt(0.5)), None],
        "zero_variance": [False, False],
        "complete": [False, True],
        "staleness": [3, 1],
    }
    assert step["rows"] == {
        "row": [0, 1, 2, 3],
        "group": ["five", "five", "three", "three"],
        "rollout": ["a", "b", "c", "c"],
        "reward": [1.0, 0.0, None, None],
        "rewards": [[1.0, 0.0], [0.0, 0.0], [None, 1.0], [None, None]],
        "compared": [2, 2, None, None],
        "advantage": [0.5, -0.5, None, None],
        "advantage_by_row": [0.25, -0.25, None, None],
        "tokens": [3, 4, 2, None],
        "weight": [0.5, 0.25, None, None],
        "share": [1.0, 0.0, 0.0, 0.0],
        "other_share": [0.75, 0.25, 0.0, None],
        "status": ["completed", "truncated", None, "failed"],
        "reason": ["", "filter/low", "", "gate/failed"],
        "staleness": [3, None, 0, 1],
        "minibatch": [1, None, 0, None],
        "microbatch": [0, None, 2, None],
        "rank": [3, None, 0, None],
        "response": [None, whole("Zwei"), whole("Drei\\x1b"), whole("Vier")],
        "by_token": [
            {
                "texts": ["x", "y\\x00"],
                "values": {"advantage": [0.1235, pytest.approx(math.nan, nan_ok=True)]},
            }
            | {"at": 2, "missing": 0},
            None,
            {"texts": None, "values": {"advantage": [1.0]}, "at": 1, "missing": 0},
            None,
        ],
        "beside": [
            {"ground truth": "2"},
            {"acc": True, "n": None, "in": "[1]"},
            {"ground truth": "4", "other columns": "no JSON"},
            {"other columns": "[1]"},
        ],
    }
    assert (step["step"], step["shown"]) == (7, {"groups": 2, "of": 2})
    assert step["funnel"][0] == {
        "name": "collected", "rows": 4, "rollouts": 3, "groups": 2, "tokens": 8, "out": [],
    }  # fmt: skip
    assert step["numbers"] == report.numbers
    assert step["verdict"] == "The mean reward is 0.5."
    assert [each["name"] for each in step["advisories"]] == [each.name for each in report.advisories]


def test_rows_without_columns_have_the_number_of_the_row_and_unknown_values():
    bare = report_by_hand({}, row=[0, 1])
    bare = replace(bare, columns={name: bare.columns[name][:2] for name in ("row", "reason")}, by_token={})
    (step,) = page_data([bare], title="t")["steps"]
    assert not any(step["groups"].values())
    known = {"row": [0, 1], "group": [0, 0], "rollout": [0, 1], "reason": ["", "filter/low"]}
    known["share"] = [0.0, 0.0]
    assert step["rows"] == {name: known.get(name, [None, None]) for name in step["rows"]}


def test_a_page_has_the_curves_totals_and_symptoms_of_its_history():
    """A number that a step lacks is None in its curve. Symptoms are those of the advisories of the steps."""
    reports = [replace(report_by_hand(), step=step) for step in (2, 3)]
    for report, truncated in zip(reports, (0.9, 0.0), strict=True):
        numbers = {"rows/in": 4.0, "rows/trained": 2.0, "rollouts/truncated": truncated}
        report.__dict__["numbers"] = numbers | ({"rare": 5.0} if report.step == 3 else {})
    data = page_data(reports, title="a\x1b")
    assert (data["title"], data["recorded"], data["curve_steps"]) == ("a\\x1b", 2, [2, 3])
    assert data["recipe"] == [{"name": "gate", "text": "Gate()"}, {"name": "filter", "text": "Filter()"}]
    assert data["curves"] == {
        "rows/in": [4.0, 4.0],
        "rows/trained": [2.0, 2.0],
        "rollouts/truncated": [0.9, 0.0],
        "rare": [None, 5.0],
    }
    assert data["totals"] == {"rows/in": 8.0, "rows/trained": 4.0}
    texts = [
        "90 % of the rollouts were truncated.",
        "45 % of the rollouts were truncated (mean of steps 2 to 3).",
    ]
    assert [[each["text"] for each in step["advisories"]] for step in data["steps"]] == [
        [text] for text in texts
    ]
    (symptom,) = data["symptoms"]
    known = symptoms()["rollouts-truncated"]
    assert symptom["title"] == known.title
    assert [each["text"] for each in symptom["remedies"]] == [each.text for each in known.remedies]
    assert data["steps"][1]["unchecked"][0] == (
        f"{symptoms()['rewards-missing'].title}: needs {symptoms()['rewards-missing'].needs}"
    )
    given = {"history": [(9, {"a": 1.0})], "totals": {"rows/in": 7.0}, "recorded": 11}
    data = page_data(reports, title="t", **given)
    assert (data["curve_steps"], data["curves"], data["totals"]) == ([9], {"a": [1.0]}, {"rows/in": 7.0})
    assert data["recorded"] == 11


@pytest.mark.parametrize(
    ("groups", "rows", "shown"),
    [(9, 4, [5, 3]), (9, 3, [5]), (9, 1, [5]), (1, 9, [5]), (2, 9, [5, 3])],
)
def test_a_page_shows_whole_groups_up_to_both_limits_but_one_at_least(monkeypatch, groups, rows, shown):
    """Both groups have two rows. The rewards of the first differ, so it comes first."""
    monkeypatch.setattr(CONTENTS, "GROUPS", groups)
    monkeypatch.setattr(CONTENTS, "ROWS", rows)
    report = report_by_hand(TEXTS | {"group_label": ["5", "5", "3", "3"]})
    (step,) = page_data([report], title="t")["steps"]
    assert step["groups"]["id"] == [str(each) for each in shown]
    assert step["shown"] == {"groups": len(shown), "of": 2}
    assert step["rows"]["row"] == [row for row in range(4) if COLUMNS["group_id"][row] in shown]
    bare = replace(report, columns={"row": np.arange(4), "reason": np.zeros(4, int)}, by_token={})
    (step,) = page_data([bare], title="t")["steps"]
    assert step["rows"]["row"] == [*range(4)][:rows]


def test_a_page_shows_200_groups_or_5000_rows_and_500_tokens_of_a_response():
    """The other groups and rows are only in the funnel and the numbers."""
    rows = np.arange(5001)
    columns = {"row": rows, "reason": np.zeros(5001, int)}
    (step,) = page_data([replace(report_by_hand({}), columns=columns, by_token={})], title="t")["steps"]
    assert (step["rows"]["row"], step["funnel"][0]["rows"]) == ([*range(5000)], 5001)
    columns = {name: column[:201] for name, column in columns.items()}
    columns |= {"group_id": np.arange(201), "reward": np.arange(201.0)}
    (step,) = page_data([replace(report_by_hand({}), columns=columns, by_token={})], title="t")["steps"]
    assert step["shown"] == {"groups": 200, "of": 201}
    for tokens, at, missing in ((500, 500, 0), (501, 375, 1), (502, 375, 2)):
        cut = cut_tokens(TokenValues(None, {"advantage": [0.0] * tokens}))
        assert (cut["at"], cut["missing"], len(cut["values"]["advantage"])) == (at, missing, 500)


def size(text: Any) -> int:
    return len(json.dumps({"": text}, separators=(",", ":")))


def test_texts_are_taken_row_by_row_until_the_room_is_full():
    """The first row of a group also takes its question and its prompt. The room is used to the last byte."""
    report = replace(report_by_hand(TEXTS | {"other_columns": [""] * 4}), by_token={})
    order, question = [2, 0, 1, 3], {2: ["Two?"], 0: ["One\nand one?", "user: One\nand one?"]}
    needs = []
    for row in order:
        of_row = [
            whole(text) for text in [*question.get(row, []), TEXTS["response"][row].replace("\x1b", "\\x1b")]
        ]
        truth = TEXTS["ground_truth"][row]
        needs.append(sum(map(size, [*of_row, *([{"ground truth": truth}] if truth else [])])))
    for count in range(5):
        for spare, fits in ((0, count), (-1, max(count - 1, 0))):
            found = fitting_texts(report, order, sum(needs[:count]) + spare)
            assert [*found.responses] == order[:fits], (count, spare)
            assert [*found.asked] == [row for row in (2, 0) if row in order[:fits]]
            assert [*found.prompts] == [row for row in (0,) if row in order[:fits]]
            assert [*found.beside] == [row for row in (2, 0) if row in order[:fits]]


@pytest.mark.parametrize(("more", "shown"), [("", 1000), ("x", 999)])
def test_the_texts_of_a_page_take_at_most_three_megabytes(more, shown):
    """Each of 1,000 responses takes 3,000 bytes. A page writes a letter `<` in six bytes."""
    letters = 3000 - size(whole(""))
    texts = ["<" * (letters // 6) + "x" * (letters % 6)] * 1000
    columns = {"row": np.arange(1000), "reason": np.zeros(1000, int)}
    report = report_by_hand({"response": [*texts[:-1], texts[-1] + more]})
    (step,) = page_data([replace(report, columns=columns, by_token={})], title="t")["steps"]
    assert sum(text is not None for text in step["rows"]["response"]) == shown


def test_the_room_for_texts_is_shared_evenly_by_all_steps(monkeypatch):
    """Three steps have 300 bytes, so each has 100, which is enough for one of two responses."""
    monkeypatch.setattr(CONTENTS, "PAGE_TEXTS", 300)
    report = replace(report_by_hand({"response": ["x" * 40] * 4}), by_token={})
    (earlier,) = page_data([report], title="t")["steps"]
    data = page_data([report, report], title="t", earlier=[earlier])
    counts = [sum(each is not None for each in step["rows"]["response"]) for step in data["steps"]]
    assert counts == [1, 1, 1]


def test_columns_beside_a_response_are_plain_and_short():
    others = [json.dumps({"a": "x" * 300, "b": "x" * 301, "c\x1b": 0.5, "d": {"e": [False]}})] * 4
    found = columns_beside(report_by_hand({"other_columns": others}), 1)
    assert found == {"a": "x" * 300, "b": shortened("x" * 301, 300), "c\\x1b": 0.5, "d": "{'e': [False]}"}
    assert found["b"] == f"{'x' * 225} [… 1 character left out …] {'x' * 75}"
    assert columns_beside(report_by_hand({}), 1) == {}

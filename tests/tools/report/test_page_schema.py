"""A page is refused unless its data follow the schema."""

from __future__ import annotations

import copy
import re
from typing import TypedDict

import pages
import pytest
from busy import busy_batch, stages

from headrace.pipeline import Pipeline, make_report, page_data
from headrace.pipeline.tools.report import render_page
from headrace.pipeline.tools.report.page_schema import Groups, ShownRows, check_keys

pytestmark = pytest.mark.slow

PARTS = {
    "page": lambda run: run,
    "page.recipe[4]": lambda run: run["recipe"][4],
    "page.steps[1]": lambda run: run["steps"][1],
    "page.steps[1].funnel[0]": lambda run: run["steps"][1]["funnel"][0],
    "page.steps[0].funnel[3].out[0]": lambda run: run["steps"][0]["funnel"][3]["out"][0],
    "page.steps[0].shown": lambda run: run["steps"][0]["shown"],
    "page.steps[0].groups": lambda run: run["steps"][0]["groups"],
    "page.steps[1].rows": lambda run: run["steps"][1]["rows"],
}


@pytest.fixture
def run():
    return copy.deepcopy(pages.fan_out_run(2))


@pytest.mark.parametrize("where", PARTS)
def test_each_missing_or_unknown_key_is_refused_by_name_and_place(run, where):
    part = PARTS[where](run)
    for key in list(part):
        value = part.pop(key)
        with pytest.raises(ValueError, match=rf"^{re.escape(where)} must have .*; missing: {key}\. Build it"):
            render_page(run)
        part[key] = value
    render_page(run)
    part["surprise"] = []
    with pytest.raises(ValueError, match=rf"^{re.escape(where)} must have .*; unknown: surprise\. Build it"):
        render_page(run)


class Part(TypedDict):
    name: str


class Sometimes(TypedDict, total=False):
    before: Part


class Whole(Sometimes):
    all_there: list[Part]
    some_none: list[Part | None]


def test_none_is_allowed_only_in_lists_that_may_have_it():
    good = {"name": "a"}
    check_keys({"all_there": [good], "some_none": [None, good]}, Whole, "page")
    with pytest.raises(ValueError, match=r"^page.some_none\[1\] must have .*; missing: name"):
        check_keys({"all_there": [good], "some_none": [None, {}]}, Whole, "page")
    with pytest.raises(TypeError):
        check_keys({"all_there": [None], "some_none": []}, Whole, "page")


def test_a_page_may_name_two_recipes(run):
    render_page(run | {"versus": ["grpo", "dr_grpo"]})
    with pytest.raises(ValueError, match=r"^page .*versus, difference, certificates; unknown: against\."):
        render_page(run | {"against": ["grpo", "dr_grpo"]})


def test_the_tables_of_a_report_have_the_columns_of_the_schema(make_batch):
    batch = busy_batch(make_batch)
    for rows in (batch, batch[:0], batch.exclude("group_id")[:3]):
        pipeline = Pipeline(stages() if "group_id" in rows.keys() else {})
        pipeline(rows)
        run = page_data([make_report(pipeline)], title="real")
        render_page(run)
        for table, schema in (("groups", Groups), ("rows", ShownRows)):
            assert list(run["steps"][0][table]) == list(schema.__annotations__)


def test_rows_of_the_page_have_the_reasons_of_the_ledger(make_batch):
    """A trained row has an empty reason. The batch has rows of four fates."""
    run = Pipeline(stages()).run(busy_batch(make_batch))
    rows = page_data([make_report(run)], title="real")["steps"][0]["rows"]
    reason_of = {each["row"]: name for name in run.ledger.counts() for each in run.ledger.rows(name)}
    assert len(set(reason_of.values())) > 3
    assert rows["reason"] == [reason_of[row].replace("trained", "") for row in rows["row"]]

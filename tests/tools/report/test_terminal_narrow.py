"""In a terminal of 80 or 60 columns, no line is longer than the terminal, and no word is broken."""

from __future__ import annotations

import inspect
import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.pipeline import Pipeline, load_pipeline, make_report
from headrace.pipeline.tools.certify import Certificate, Judgement
from headrace.pipeline.tools.certify.certify_task import show_certificates
from headrace.pipeline.tools.plan.group_sizes import GroupsSeen, show_group_sizes
from headrace.pipeline.tools.replay.compare_task import show_comparison
from headrace.pipeline.tools.report import (
    Comparison,
    FittedColumn,
    FittedTable,
    history_table,
    show_pipeline,
    show_report,
)
from headrace.transforms import (
    CompletenessGate,
    FanOutCollapse,
    Finite,
    GroupRelativeAdvantage,
    LossWeight,
    SampleFilter,
)

pytestmark = pytest.mark.slow

WIDTHS = pytest.mark.parametrize("width", [80, 60])
RECIPES = ("as/prime_rl_with_lengths", "dr_grpo_without_a_baseline")


def printed(width: int, show, *arguments) -> str:
    """The text that a function prints to its console, or the printed text of the object that it returns."""
    out = io.StringIO()
    console = Console(file=out, width=width)
    if "console" in inspect.signature(show).parameters:
        show(*arguments, console)
    else:
        console.print(show(*arguments))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def assert_whole(text: str, *words: str) -> None:
    assert {word for each in words for word in each.split()} - set(text.split()) == set()


def below_the_least_reward_that_was_asked_for(batch):
    return batch["next", "reward"].flatten() > -900


@pytest.fixture
def reports(make_batch):
    """Two reports of one batch, with ids of 62 bits, and long reasons, prompts, numbers and names."""
    batch = make_batch([0.123, 1.5, -0.75, 0.25, 1, 2], [0, 0, 0, 0, 1, 1], [0, 1, 1, 2, 3, 4])
    for name in ("group_id", "rollout_id"):
        batch[name] = batch[name] + 2**62 - 9
    batch["next", "reward"] *= 1234.567
    batch["prompt_text"] = ["Write 314159 backwards, then check the result of it."] * 6
    made = []
    for scale in ("none", "group"):
        stages = {
            "completeness_of_groups": CompletenessGate(group_size=3, on_incomplete="drop"),
            "collapse": FanOutCollapse(reward="sum"),
            "judged": SampleFilter(criterion=below_the_least_reward_that_was_asked_for),
            "advantage": GroupRelativeAdvantage(scale=scale),
            "weight": LossWeight(),
        }
        made.append(make_report(Pipeline(stages).run(batch.clone()), step=123_456))
    return made


@WIDTHS
def test_a_report_breaks_no_word(reports, width):
    text = printed(width, show_report, reports[0])
    said = "judged: below the least reward that was asked for, masked parts of 1 rollout and 1 group"
    assert_whole(text, said, str(2**62 - 9), str(2**62 - 8), "completeness_of_groups: incomplete ×2")
    assert "Write" not in text  # a prompt is left out before a word is broken
    assert "Write 314159" in printed(120, show_report, reports[0])


def test_columns_of_the_groups_leave_one_after_the_other(make_batch):
    """The number of compared rollouts leaves first, then the prompt, and then the number of rows."""
    batch = make_batch([0.0, 1, float("inf")], [0, 0, 0])
    batch["prompt_text"] = ["Write 314159 backwards."] * 3
    excludes = SampleFilter(criterion=Finite(), action="exclude")
    report = make_report(Pipeline({"finite": excludes, "advantage": GroupRelativeAdvantage()}).run(batch))
    found = []
    for width in range(100, 25, -1):
        lines = printed(width, show_report, report).splitlines()
        head = next(line.split() for line in lines if "left" in line.split())
        found.append(tuple(name for name in ("rows", "prompt", "compared") if name in head))
    assert list(dict.fromkeys(found)) == [
        ("rows", "prompt", "compared"),
        ("rows", "prompt"),
        ("rows",),
        (),
    ]


@WIDTHS
def test_the_training_table_counts_rollouts_and_groups_by_reason(reports, width):
    text = printed(width, history_table, [reports[0].numbers] * 2, "where the rows of two long steps went")
    assert_whole(text, "where the rows of two long steps went", "completeness_of_groups: incomplete")
    lines = {line.split(":")[0].strip(): line.split()[-3:] for line in text.splitlines() if line.split()}
    assert lines["completeness_of_groups"] == ["−4", "−4", "−2"]
    numbers = reports[0].numbers
    name = "judged/below_the_least_reward_that_was_asked_for"
    assert [numbers[f"{unit}out/{name}"] for unit in ("", "rollouts/", "groups/")] == [1, 0, 0]


@WIDTHS
def test_a_comparison_breaks_no_word(reports, width):
    comparison = Comparison(RECIPES)
    second = dict(reports[1].columns)
    second["advantage"] = second["advantage"] + np.arange(6)  # no multiples of the first
    comparison.add(reports[0], replace(reports[1], columns=second))
    text = printed(width, show_comparison, comparison)
    assert_whole(text, *RECIPES, "trained by both", "cosine of the rows' gradient shares")
    said = "share of the gradient that moves to other groups", "loss weight × tokens in the loss,"
    assert_whole(text, *said)


@WIDTHS
def test_certificates_break_no_word(width):
    judged = Judgement((1.0225, None, -0.5272), 0.099, 0.9952, 0.07327, 0.548)
    found = [Certificate(name, "stop_or_continue", 4, 256, judged, judged) for name in RECIPES]
    text = printed(width, show_certificates, found)
    assert_whole(text, *RECIPES, "ratio to the true gradient", "1.0225 – -0.5272 9.9% 0.9952")
    assert_whole(text, "stop_or_continue, groups of 4, 256 outcomes")


@WIDTHS
def test_a_plan_breaks_no_word(width):
    rewards = np.tile(np.repeat([0.0, 1.0, 0.0, 1.0], [8, 3, 5, 8]), (500, 1)).reshape(1500, 8) * 0.123456
    seen = GroupsSeen(
        equal=rewards.min(1) == rewards.max(1),
        prompt=np.arange(1500) // 2,
        step=np.arange(1500) % 2,
        group=np.repeat(np.arange(1500), 8),
        rewards=rewards.ravel(),
        values=rewards.reshape(-1, 1),
        compared=np.array([1500]),
    )
    text = printed(width, show_group_sizes, seen, [2, 4, 8, 16, 32, 64], 1.0)
    said = "rollouts per informative group", "500", "0.25 to 0.5", "solve rate, at 0.123456"
    assert_whole(text, *said)


@WIDTHS
def test_a_pipeline_breaks_no_word(width):
    pipeline = load_pipeline("pipeline=dapo", "pipeline.stages.gate.on_incomplete=drop")
    text = printed(width, show_pipeline, pipeline)
    assert_whole(text, repr(pipeline))
    assert not [line for line in text.splitlines()[1:] if not line.startswith("  ")]


WORD = st.text("abcdefgh", min_size=1, max_size=9)
CELL = st.lists(WORD, max_size=5).map(" ".join)


@given(st.lists(st.tuples(CELL, CELL, st.integers(0, 10**6)), max_size=4), st.integers(38, 90))
def test_a_table_breaks_no_word_if_the_longest_words_fit(rows, width):
    """Two columns of nine letters, a cut column of ten, and a column of seven digits fit a width of 38."""
    columns = [FittedColumn("one", gives="wrap"), FittedColumn("two", gives="wrap")]
    columns += [FittedColumn("cut", gives="cut", leaves=1), FittedColumn("count", right=True)]
    table = FittedTable(columns, "a title")
    for one, two, count in rows:
        table.add(one, two, one, str(count), indent=2)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for one, two, count in rows:
        assert_whole(text, one, two, str(count))


@pytest.mark.parametrize("width", range(5, 21))
def test_a_column_leaves_only_if_the_others_and_two_blanks_between_them_do_not_fit(width):
    """The columns have 5, 6 and 4 characters. The second leaves first, and then the third."""
    table = FittedTable(
        [FittedColumn("aaaaa"), FittedColumn("bbbbbb", leaves=2), FittedColumn("cccc", leaves=1)]
    )
    table.add("1", "2", "3")
    fit = "aaaaa  bbbbbb  cccc" if width >= 19 else "aaaaa  cccc" if width >= 11 else "aaaaa"
    assert printed(width, lambda: table).splitlines()[0].rstrip() == fit


def test_a_table_without_titles_has_no_line_of_titles():
    table = FittedTable([FittedColumn("", gives="wrap"), FittedColumn("", right=True)])
    table.add("rows", "12")
    assert printed(20, lambda: table).split() == ["rows", "12"]
    assert "<th" not in table._repr_html_()

"""``headrace view`` shows the contents of the files and nothing else."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import urllib.request
from dataclasses import FrozenInstanceError

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from busy import stages
from command import headrace_here
from stored_runs import LARGE, report_of_step, served, started, step_batch, write_run

from headrace.pipeline import Pipeline, ReportFolder, make_report, page_data, write_dump
from headrace.pipeline.tools.dumps import refused_report
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.pipeline.tools.report.history import HISTORY
from headrace.pipeline.tools.view import stored_run
from headrace.pipeline.tools.view.server import ViewServer, view
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "second", steps=3, shift=0.25)


@pytest.fixture(scope="module")
def client(run, other):
    with served(run, other) as client:
        yield client


def table_of(run, step):
    return pq.read_table(run / "rollouts" / f"step_{step:08d}.parquet").to_pylist()


def without_step(rows):
    return [{name: value for name, value in row.items() if name != "step"} for row in rows]


def shown(answer):
    """The rows of an answer by column. Large integers are sent as texts, and are integers here."""
    names = [name for name, _ in answer["columns"]]
    kinds = dict(answer["columns"])
    rows = [dict(zip(names, cells[1:], strict=True)) for cells in answer["rows"]]
    for row in rows:
        for name, value in row.items():
            if kinds[name] == "text" and value is not None:
                row[name] = value["start"]
            if kinds[name] == "integer" and value is not None:
                row[name] = int(value)
    return rows


# -- rows and prompts of the files -----------------------------------------------------------------------


def test_every_row_of_every_step_is_shown_with_every_column_of_its_file(client, run):
    for step in range(4):
        pages = [client.ask("rows", run=0, step=step, sort="row", offset=at, count=4) for at in (0, 4, 8)]
        expected = without_step(table_of(run, step))
        assert [row for page in pages for row in shown(page)] == expected
        assert {(page["found"], page["of"]) for page in pages} == {(9, 9)}
    assert expected[0]["group_id"] == LARGE + 9


def test_the_lowest_reward_comes_first_and_rows_without_a_reward_last(client, run, tmp_path):
    rewards = [row["rollout_reward"] for row in shown(client.ask("rows", run=0, step=1, sort="reward"))]
    assert rewards == sorted(row["rollout_reward"] for row in table_of(run, 1))
    highest = shown(client.ask("rows", run=0, step=1, order="descending", sort="advantage"))
    assert [row["row"] for row in highest] == [
        row["row"] for row in sorted(table_of(run, 1), key=lambda row: (-row["advantage"], row["row"]))
    ]
    table = pq.read_table(run / "rollouts" / "step_00000001.parquet")
    gaps = pa.array([None, math.nan, 3.0, -1.0, *[2.0] * 5])
    table = table.set_column(table.column_names.index("rollout_reward"), "rollout_reward", gaps)
    (tmp_path / "rollouts").mkdir()
    pq.write_table(table, tmp_path / "rollouts" / "step_00000001.parquet", row_group_size=2)
    with served(tmp_path) as alone:
        for order, first in (("ascending", 3), ("descending", 2)):
            rows = shown(alone.ask("rows", run=0, step=1, order=order, sort="reward"))
            assert [row["row"] for row in rows][::8] == [first, 1]
            assert [row["rollout_reward"] for row in rows[-2:]] == [None, None]


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_groups_in_the_loss_come_first_in_the_order_of_their_spread_of_rewards(client, run, order):
    """A loop computes the largest reward minus the smallest one of each group, over rows in the loss."""
    for step in range(4):
        rows, spread = table_of(run, step), {}
        for row in rows:
            own = [
                each["rollout_reward"]
                for each in rows
                if each["group_id"] == row["group_id"] and each["reason"] == "trained"
            ]
            spread[row["group_id"]] = max(own) - min(own) if own else -1.0
        sign = -1 if order == "descending" else 1
        wanted = sorted(
            rows,
            key=lambda row: (
                -spread[row["group_id"]],
                row["group_id"],
                sign * row["rollout_reward"],
                row["row"],
            ),
        )
        found = shown(client.ask("rows", run=0, step=step, order=order))
        assert [row["row"] for row in found] == [row["row"] for row in wanted]


def test_the_recipe_of_a_run_is_shown_if_its_history_has_one(tmp_path, run, make_batch):
    named = tmp_path / "named"
    with ReportFolder(named, title="dr_grpo") as folder:
        folder.add(report_of_step(0))
    with served(run, named) as client:
        assert [each["recipe"] for each in client.ask("runs")["runs"]] == ["", "dr_grpo"]
    (named / "rollouts" / HISTORY).write_text(json.dumps({"recipe": "x" * 81}) + "\n")
    with served(named) as client:
        assert client.ask("runs")["runs"][0]["recipe"] == "x" * 80
    for damage in ("", "[", "{}", '{"recipe": 3}', "[" * 100_000):
        (named / "rollouts" / HISTORY).write_text(damage + "\n")
        with served(named) as client:
            assert client.ask("runs")["runs"][0]["recipe"] == ""


def test_one_prompt_has_the_reward_and_the_advantage_of_each_rollout(client, run):
    """The numbers equal those of a loop over the rows of all steps. A rollout counts with its first row."""
    for line in client.ask("prompts")["prompts"]:
        answer = client.ask("prompt", key=line["key"])
        wanted = []
        for step in range(4):
            of = [row for row in table_of(run, step) if row["prompt"] == answer["text"]]
            firsts = {row["rollout_id"]: row for row in reversed(of)}
            wanted += [[step, firsts[id]["rollout_reward"], firsts[id]["advantage"]] for id in sorted(firsts)]
        assert answer["dots"][0] == wanted


def test_rows_are_found_by_reason_group_and_text_as_by_a_loop(client, run):
    rows = table_of(run, 2)
    asked = {
        ("reason", "trained"): lambda row: row["reason"] == "trained",
        ("reason", "left"): lambda row: row["reason"] != "trained",
        ("reason", "filter/zero_variance"): lambda row: row["reason"] == "filter/zero_variance",
        ("group", str(LARGE + 7)): lambda row: row["group_id"] == LARGE + 7,
        ("group", str(LARGE)[3:9]): lambda row: str(LARGE)[3:9] in str(row["group_id"]),
        ("group", "999"): lambda row: False,
        ("text", "żÓŁW"): lambda row: row["prompt"] == "Żółw?",
        ("text", "SO IT IS 8"): lambda row: "So it is 8" in row["response"],
        ("text", ".*"): lambda row: False,
    }
    for (name, value), wanted in asked.items():
        answer = client.ask("rows", run=0, step=2, sort="row", **{name: value})
        assert [row["row"] for row in shown(answer)] == [row["row"] for row in rows if wanted(row)], value
        assert answer["of"] == 9


def test_a_prompt_is_found_in_all_steps_of_both_runs_as_by_a_loop(client, run, other):
    expected = {}
    for place, (folder, steps) in enumerate(((run, 4), (other, 3))):
        for step in range(steps):
            for row in table_of(folder, step):
                of_step = expected.setdefault(row["prompt"], ({}, {}))[place].setdefault(step, [])
                of_step.append(row["rollout_reward"])
    listed = client.ask("prompts")
    assert {line["label"] for line in listed["prompts"]} == set(expected)
    assert all(re.fullmatch("[0-9a-f]{32}", line["key"]) for line in listed["prompts"])  # 128 bits
    for line in listed["prompts"]:
        found = client.ask("prompt", key=line["key"])
        assert found["text"] == line["label"]
        for place, rewards in enumerate(expected[line["label"]]):
            steps = found["runs"][place]
            assert [step for step, *_ in steps] == list(rewards)
            for step, groups, rollouts, reward in steps:
                assert (groups, rollouts) == (1, 3)
                assert reward == pytest.approx(np.mean(rewards[step]), abs=1e-12)
        for place, (told, rewards) in enumerate(zip(line["runs"], expected[line["label"]], strict=True)):
            every = [reward for of_step in rewards.values() for reward in of_step]
            assert told["reward"] == pytest.approx(np.mean(every), abs=1e-12)
            rows = shown(client.ask("rows", run=place, step=0, prompt=line["key"]))
            assert {row["prompt"] for row in rows} <= {line["label"]}
            assert len(rows) == len(rewards.get(0, []))
    means = [np.mean([each["reward"] for each in line["runs"]]) for line in listed["prompts"]]
    assert means == sorted(means)
    assert [line["label"] for line in client.ask("prompts", text="żółw")["prompts"]] == ["Żółw?"]
    answer = client.ask("rows", run=1, step=2, sort="row")
    texts = [client.ask("prompt", key=key)["text"] for key in answer["keys"]]
    assert texts == [row["prompt"] for row in shown(answer)]


def write_rows(folder, steps):
    """Write a file for each step, with rows (group, rollout, reward, prompt)."""
    (folder / "rollouts").mkdir()
    for step, rows in steps.items():
        names = ("group_id", "rollout_id", "rollout_reward", "prompt")
        table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
        pq.write_table(table, folder / "rollouts" / f"step_{step:08d}.parquet")
    return folder


def test_each_kind_of_column_is_shown_or_left_out(tmp_path):
    """Numbers that are not finite are unknown. Lists of integers, and bytes, are not shown."""
    text, number = [{"start": "a\\x1b\n", "characters": 3}, None, {"start": "", "characters": 0}], [1.0, None]
    columns = {
        "row": ("integer", pa.array([0, 1, 2]), [0, 1, 2]),
        "text": ("text", pa.array(["a\x1b\n", None, ""]), text),
        "large": ("text", pa.array(["b"] * 3, pa.large_string()), [{"start": "b", "characters": 1}] * 3),
        "small": ("integer", pa.array([1, None, 3], pa.int8()), [1, None, 3]),
        "flag": ("integer", pa.array([True, False, None]), [True, False, None]),
        "half": ("number", pa.array([0.5, None, math.inf], pa.float32()), [0.5, None, None]),
        "list": (
            "numbers",
            pa.array([[1.0, math.nan], None, []], pa.list_(pa.float64())),
            [number, None, []],
        ),
        "fixed": ("numbers", pa.array([[1.0, None]] * 3, pa.list_(pa.float32(), 2)), [number] * 3),
    }
    hidden = {"ints": pa.array([[1]] * 3), "bytes": pa.array([b"x"] * 3), "step": pa.array([7] * 3)}
    table = pa.table({name: values for name, (_, values, _) in columns.items()} | hidden)
    (tmp_path / "rollouts").mkdir()
    pq.write_table(table, tmp_path / "rollouts" / "step_00000004.parquet", row_group_size=2)
    with served(tmp_path) as client:
        answer = client.ask("rows", run=0, step=4, order="descending", sort="row")
    cells = [[at, *(shown[at] for _, _, shown in columns.values())] for at in (2, 1, 0)]
    assert answer == {
        "columns": [[name, kind] for name, (kind, _, _) in columns.items()],
        "rows": cells,
        "keys": [],
        "found": 3,
        "of": 3,
    }


def test_the_line_of_a_step_has_the_counts_of_its_first_and_of_its_last_level(tmp_path):
    """Entries of another form, which a damaged file may have, are left out."""
    gone = [{"reason": "incomplete\x1b", "rows": 2}, {"reason": "failed", "rows": 0}, {"rows": "3"}, "odd"]
    funnel = [
        {"name": "collected", "rows": 9, "rollouts": 8, "groups": 3, "out": []},
        {"name": "gate", "rows": 7, "rollouts": 6, "groups": 2, "out": gone},
        "odd",
        {"name": "filter", "rows": 4, "rollouts": 3, "groups": 1, "out": [{"reason": "low", "rows": 3}]},
    ]
    numbers = {"reward/all/mean": 0.5, "frac_reward_zero_std": 0.25, "response_length/mean": 12.0, "a\x1b": 1}
    numbers |= {"response_characters/mean": 40, "rollouts/truncated": 0.125, "text": "5", "flag": True}
    for step, of_step in ((3, {"funnel": funnel, "numbers": numbers}), (11, [])):
        table = pa.table({"row": [0, 1], "group_id": [5, 5]})
        table = table.replace_schema_metadata({"headrace.step": json.dumps(of_step)})
        (tmp_path / "run" / "rollouts").mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / "run" / "rollouts" / f"step_{step:08d}.parquet")
    with served(tmp_path / "run" / "rollouts") as client:
        answer = client.ask("runs")
        of = {name: client.ask("metric", name=name)["runs"][0] for name in ("a\\x1b", "text", "flag")}
    lines = {
        "step": [3, 11],
        "rows": [2, 2],
        "rollouts": [8, None],
        "groups": [3, None],
        "trained": [4, None],
        "reward": [0.5, None],
        "flat": [0.25, None],
        "length": [12.0, None],
        "characters": [40, None],
        "truncated": [0.125, None],
        "left": [{"gate/incomplete\\x1b": 2, "filter/low": 3}, {}],
    }
    told = {"name": "run", "recipe": "", "folder": str(tmp_path / "run" / "rollouts"), "problems": []}
    told |= {"failed": [], "metrics": [], "steps": lines}  # metrics are those of the last step
    assert answer == {"runs": [told], "same": "group_id"}
    assert of == {
        "a\\x1b": [[3, 1], [11, None]],
        "text": [[3, None], [11, None]],
        "flag": [[3, None], [11, None]],
    }


def test_an_answer_has_as_many_rows_or_prompts_as_asked_for_and_200_at_most(tmp_path):
    rows = [(at, at, float(at), f"prompt {at:03d}") for at in range(203)]
    folder = write_rows(tmp_path, {0: rows})
    assert [row[0] for row in stored_run.StoredRun(folder).rows(0, sort="group_id")["rows"]] == [*range(50)]
    with served(folder) as client:
        for how, places in (
            ({}, range(50)),
            ({"count": 3, "offset": 201}, range(201, 203)),
            ({"count": 200}, range(200)),
            ({"count": 201}, range(200)),
            ({"count": 0}, []),
        ):
            found = client.ask("rows", run=0, step=0, sort="group_id", **how)
            assert [row["group_id"] for row in shown(found)] == [*places]
            assert (found["found"], found["of"]) == (203, 203)
            listed = client.ask("prompts", **how)
            assert [line["label"] for line in listed["prompts"]] == [f"prompt {at:03d}" for at in places]
            assert listed["found"] == 203


def test_prompts_are_sorted_by_the_mean_of_both_runs_and_those_without_a_reward_are_last(tmp_path):
    """Prompts of equal means are sorted by their texts. Of A the runs have the means 1 and 0."""
    first = [(1, 1, 1.0, "A"), (2, 2, None, "D"), (3, 3, 0.25, "C"), (4, 4, 0.5, "B"), (5, 5, None, "E")]
    for name, rows in (("one", first), ("two", [(1, 1, 0.0, "A"), (6, 6, 0.75, "F")])):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, {2: rows})
    with served(tmp_path / "one", tmp_path / "two") as client:
        for how, labels in (({}, "CABFDE"), ({"order": "highest"}, "FABCDE")):
            listed = client.ask("prompts", **how)["prompts"]
            assert "".join(line["label"] for line in listed) == labels
        lines = {line["label"]: line["runs"] for line in listed}
        (answer,) = (client.ask("prompt", key=line["key"]) for line in listed if line["label"] == "A")
    nothing = {"steps": 1, "groups": 1, "rollouts": 1, "reward": None, "first": [2, None], "last": [2, None]}
    one = {"steps": 1, "groups": 1, "rollouts": 1, "reward": 1.0, "first": [2, 1.0], "last": [2, 1.0]}
    assert lines["D"] == [nothing, None]
    assert lines["A"] == [one, one | {"reward": 0.0, "first": [2, 0.0], "last": [2, 0.0]}]
    dots = [[[2, 1.0, None]], [[2, 0.0, None]]]
    assert answer == {"text": "A", "runs": [[[2, 1, 1, 1.0]], [[2, 1, 1, 0.0]]], "dots": dots}


def test_prompts_are_found_in_files_that_lack_other_columns(tmp_path):
    """Without ids, each row is a rollout and a group of its own. A step without prompts is left out."""
    (tmp_path / "rollouts").mkdir()
    ids = {"group_id": [1], "rollout_id": [1]}
    tables = [{"prompt": ["A", "A", "B"]}, {"row": [0]}, {"prompt": ["B"], "reward": [0.5], **ids}]
    for step, columns in enumerate(tables):
        pq.write_table(pa.table(columns), tmp_path / "rollouts" / f"step_{step}.parquet")
    with served(tmp_path) as client:
        listed = client.ask("prompts")["prompts"]
        found = {line["label"]: client.ask("prompt", key=line["key"]) for line in listed}
    one = {"steps": 1, "groups": 2, "rollouts": 2, "reward": None, "first": [0, None], "last": [0, None]}
    two = {"steps": 2, "groups": 2, "rollouts": 2, "reward": 0.5, "first": [0, None], "last": [2, 0.5]}
    assert {line["label"]: line["runs"] for line in listed} == {"A": [one], "B": [two]}
    assert found["A"]["dots"] == [[[0, None, None]] * 2]
    assert found["B"] == {
        "text": "B",
        "runs": [[[0, 1, 1, None], [2, 1, 1, 0.5]]],
        "dots": [[[0, None, None], [2, 0.5, None]]],
    }


def test_rows_without_a_reward_are_in_the_order_of_the_file(tmp_path):
    (tmp_path / "rollouts").mkdir()
    table = pa.table({"row": [5, 3, 4], "group_label": ["a", "b", "a"], "response": ["x", None, "y"]})
    pq.write_table(table, tmp_path / "rollouts" / "step_00000000.parquet", row_group_size=1)
    with served(tmp_path) as client:
        for how, rows in (
            ({}, [3, 4, 5]),
            ({"group": "a"}, [4, 5]),
            ({"text": "X"}, [5]),
            ({"reason": "left"}, [3, 4, 5]),  # the file has no reasons
            ({"order": "descending"}, [5, 4, 3]),
        ):
            assert [row["row"] for row in shown(client.ask("rows", run=0, step=0, **how))] == rows
        assert client.ask("text", run=0, step=0, place=1, column="response") == {"text": ""}


def test_the_mean_of_a_prompt_counts_each_rollout_with_a_reward_once(tmp_path):
    """One of two rollouts of step 3 has no reward, and one of step 4 has two rows: (1 + 0 + 0) / 3."""
    rows = {
        3: [(1, 1, 1.0, "Q"), (1, 2, None, "Q")],
        4: [(2, 3, 0.0, "Q"), (2, 3, 0.0, "Q"), (2, 4, 0.0, "Q")],
    }
    with served(write_rows(tmp_path, rows)) as client:
        [told] = client.ask("prompts")["prompts"][0]["runs"]
    assert told["reward"] == pytest.approx(1 / 3)
    assert (told["rollouts"], told["first"], told["last"]) == (4, [3, 1.0], [4, 0.0])


def test_ids_of_64_bits_are_sorted_as_integers(tmp_path):
    ids = [LARGE + 2, LARGE, LARGE + 3, LARGE + 1]
    with served(write_rows(tmp_path, {0: [(each, each, 0.5, "Q") for each in ids]})) as client:
        for order, expected in (("ascending", sorted(ids)), ("descending", sorted(ids, reverse=True))):
            rows = shown(client.ask("rows", run=0, step=0, sort="group_id", order=order))
            assert [row["group_id"] for row in rows] == expected


def test_integers_texts_and_dots_are_cut_only_beyond_their_limits(tmp_path):
    """Integers above 2⁵³ are sent as texts, long texts have a separate end, and 200 dots are the maximum."""
    ids, lengths = [2**53, 2**53 + 1, -(2**53), -(2**53) - 1], [600, 601, 599, 602]
    rows = [(own, own, 0.5, "Q" * length) for own, length in zip(ids, lengths, strict=True)]
    dots = [(1, number // 2, 0.5, "Many?") for number in range(2, 404)]  # 201 rollouts of two rows
    with served(write_rows(tmp_path, {0: rows, 1: dots})) as client:
        cells = {row[1]: row[4] for row in client.ask("rows", run=0, step=0, sort="rollout_id")["rows"]}
        assert {*cells} == {2**53, str(2**53 + 1), -(2**53), str(-(2**53) - 1)}
        assert sorted((cell["characters"], "end" in cell) for cell in cells.values()) == [
            (599, False),
            (600, False),
            (601, True),
            (602, True),
        ]
        labels = [line["label"] for line in client.ask("prompts", text="Q")["prompts"]]
        assert {*labels} == {"Q" * 159 + "…"}
        (many,) = client.ask("prompts", text="Many")["prompts"]
        assert len(client.ask("prompt", key=many["key"])["dots"][0]) == 200


def test_if_a_step_has_two_files_one_is_shown_and_the_other_is_named(tmp_path):
    folder = write_rows(tmp_path, {3: [(1, 1, 0.5, "Q")]}) / "rollouts"
    pq.write_table(pa.table({"group_id": [7, 7]}), folder / "step_3.parquet")
    with served(tmp_path) as client:
        (told,) = client.ask("runs")["runs"]
        assert told["steps"]["step"] == [3]
        assert told["problems"] == ["step_3.parquet: step 3 has two files; step_00000003.parquet is shown"]
        assert client.ask("rows", run=0, step=3, sort="group_id")["of"] == 1


def test_a_search_of_prompts_and_of_rows_ignores_case(tmp_path):
    """A lower-case sigma is another letter at the end of a word."""
    with served(write_rows(tmp_path, {0: [(1, 1, 0.5, "ΟΔΟΣΑ")]})) as client:
        assert client.ask("prompts", text="ΟΔΟΣ")["found"] == 1
        assert client.ask("rows", run=0, step=0, text="ΟΔΟΣ")["found"] == 1


def test_metrics_of_a_step_equal_those_of_the_page(client):
    report = report_of_step(2)
    page = page_data([report], title="")["steps"][0]
    runs = client.ask("runs")["runs"]
    assert [each["name"] for each in runs] == ["first", "second"]
    line = {name: values[2] for name, values in runs[0]["steps"].items()}
    assert line["reward"] == page["numbers"]["reward/all/mean"]
    assert line["flat"] == page["numbers"]["frac_reward_zero_std"]
    assert (line["groups"], line["trained"]) == (page["funnel"][0]["groups"], page["funnel"][-1]["rows"])
    assert line["left"] == {"filter/zero_variance": 3} | {
        name: rows for name, rows in line["left"].items() if name != "filter/zero_variance"
    }
    assert sum(line["left"].values()) == 9 - line["trained"]
    metrics = {name: client.ask("metric", name=name)["runs"][0][2][1] for name in runs[0]["metrics"]}
    timed = {name for name in metrics if name.startswith("time/")}
    assert {name: metrics[name] for name in metrics if name not in timed} == {
        name: value for name, value in page["numbers"].items() if name not in timed
    }
    for name, value in (("reward/all/max", 2.0), ("no such", None)):
        steps = [[[step, value] for step in range(n)] for n in (4, 3)]
        assert client.ask("metric", name=name) == {"runs": steps}


def test_a_long_text_is_whole_on_request(tmp_path):
    text = "<b>" + "Zażółć 🐢\n" * 100_000
    responses = [text, *["short"] * 8]
    write_dump(report_of_step(0, response_text=responses), tmp_path / "rollouts")
    with served(tmp_path) as client:
        answer = client.ask("rows", run=0, step=0, sort="row")
        cell = answer["rows"][0][1 + [name for name, _ in answer["columns"]].index("response")]
        assert cell["start"] == text[: stored_run.EXCERPT]
        assert (cell["characters"], cell["end"]) == (len(text), text[-80:])
        assert client.ask("text", run=0, step=0, place=0, column="response")["text"] == text


def test_the_footer_of_an_unchanged_file_is_read_once(tmp_path):
    found = stored_run.StoredRun(write_rows(tmp_path, {0: [(1, 1, 0.5, "Q")], 1: [(2, 2, 0.5, "Q")]}))
    before = dict(found.steps())
    write_dump(report_of_step(1), tmp_path / "rollouts")
    assert [found.steps()[step] is before[step] for step in (0, 1)] == [True, False]
    with pytest.raises(FrozenInstanceError):  # so it may be shared
        before[0].rows = 2


def test_steps_written_while_viewing_are_found(tmp_path):
    write_run(tmp_path / "live", steps=1)
    with served(tmp_path / "live") as client:
        assert client.ask("runs")["runs"][0]["steps"]["step"] == [0]
        write_dump(report_of_step(1), tmp_path / "live" / "rollouts")
        write_dump(report_of_step(0, 0.5), tmp_path / "live" / "rollouts")
        assert client.ask("runs")["runs"][0]["steps"]["step"] == [0, 1]
        rewards = [row["rollout_reward"] for row in shown(client.ask("rows", run=0, step=0))]
        assert 0.5 in rewards


# -- requests and files that are refused -------------------------------------------------------------------


def test_only_the_listed_files_are_served(client, run):
    outside = "../../../../../etc/passwd %2e%2e/%2e%2e/etc/passwd ..%2f..%2fetc%2fpasswd //etc/passwd C:\\x"
    beside = "report.html rollouts/step_00000000.parquet server.py page/../../server.py"
    odd = "api api/ api/__class__ api/../view.js view.js/ ./view.js view.js%00 %76iew.js"
    for path in f"{outside} {beside} {odd}".split():
        status, _, body = client.send(client.path + path)
        assert status == 404, path
        assert json.loads(body) == {"error": "there is nothing of this name"}
    secret = client.path.strip("/")
    for path in (
        "/",
        "/view.html",
        "/api/runs",
        f"/{secret[:-1]}/",
        f"/{secret}x/",
        "/../",
        "*",
        "http://x/",
    ):
        status, _, body = client.send(path)
        assert status in (403, 404), path
        assert secret not in body.decode()
    assert client.send(f"/{secret}")[0] == 404
    _, headers, body = client.send("/")
    assert body == b"Open the whole address that headrace view has printed.\n"
    assert headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("query", "status", "error"),
    [
        ("rows?run=0", 400, "step is an integer from 0 on; got ''"),
        ("rows?step=0", 400, "run is an integer from 0 on; got ''"),
        *(
            (f"rows?run=0&step={step}", 400, f"step is an integer from 0 on; got {step!r}")
            for step in ("../../secret", "0x1", "-1")
        ),
        ("rows?run=0&step=%D9%A3", 400, "step is an integer from 0 on; got '٣'"),
        ("rows?run=2&step=0", 400, "run is below 2; got 2"),
        ("rows?run=0&step=9", 422, "the run first has no step 9"),
        (
            f"rows?run=0&step=0&order={'up' * 30}",
            400,
            f"order is one of ascending, descending; got '{'up' * 20}'",
        ),
        ("rows?run=0&step=0&odd=../x&more=2", 400, "there is no 'odd'"),
        ("rows?run=0&step=0&step=0", 400, "a name occurs twice"),
        ("rows?run=0&step=0&offset=-1", 400, "offset is an integer from 0 on; got '-1'"),
        (f"rows?run=0&step={'9' * 19}", 400, f"step is an integer from 0 on; got '{'9' * 19}'"),
        (f"rows?run=0&step={'x' * 50}", 400, f"step is an integer from 0 on; got '{'x' * 40}'"),
        (f"rows?{'&'.join(f'{at}=' for at in range(20))}", 400, "run is an integer from 0 on; got ''"),
        (f"rows?{'&'.join(f'{at}=' for at in range(21))}", 400, "Max number of fields exceeded"),
        (
            "rows?run=0&step=0&sort=response",
            422,
            "rows are sorted by a column of numbers; step 0 has no 'response'",
        ),
        *(
            (
                f"text?run=0&step=0&place={at}&column=response",
                422,
                f"step 0 has no text 'response' of a row {at}",
            )
            for at in (9, 10)
        ),
        ("text?run=0&step=0&place=0&column=reward", 422, "step 0 has no text 'reward' of a row 0"),
        ("prompts?order=x", 400, "order is one of lowest, highest; got 'x'"),
        ("prompt?key=x", 422, "no step of these runs has this prompt"),
        ("runs?odd=", 400, "there is no 'odd'"),
        ("odd", 404, "there is nothing of this name"),
    ],
)
def test_the_error_of_a_query_equals_one_by_hand(client, query, status, error):
    found, _, body = client.send(f"{client.path}api/{query}")
    assert (found, json.loads(body)) == (status, {"error": error})


@pytest.mark.parametrize("what", ["file", "folder", "pipe"])
def test_a_link_out_of_the_folder_is_not_followed(run, tmp_path, what):
    rows = tmp_path / "run" / "rollouts"
    if what == "folder":
        rows.parent.mkdir()
        rows.symlink_to(run / "rollouts")
        with pytest.raises(stored_run.ConfigError, match="is a link to another folder"):
            stored_run.StoredRun(rows.parent)
        return
    write_run(rows.parent, steps=1)
    if what == "file":
        (rows / "step_00000001.parquet").symlink_to(run / "rollouts" / "step_00000001.parquet")
    else:
        os.mkfifo(rows / "step_00000001.parquet")
    found = stored_run.StoredRun(rows.parent)
    assert list(found.steps()) == [0]
    [problem] = found.problems()
    assert problem.startswith("step_00000001.parquet: ")
    assert ("it is a link, which is not followed" if what == "file" else "plain file") in problem


def test_only_local_host_names_are_answered(client):
    port = client.server.server_address[1]
    assert client.server.socket.getsockname()[0] == "127.0.0.1"
    for host in (f"127.0.0.1:{port}", "localhost", "localhost:9000"):  # ssh forwards another port
        assert client.send(client.path, host=host)[0] == 200
    foreign = "evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost:x", "0.0.0.0"
    for host in ("", *foreign):
        for path in (client.path, client.path + "api/runs", "/"):
            status, _, body = client.send(path, host=host)
            assert status == 403, host
            assert b"first" not in body


def test_only_get_is_answered(client):
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
        status, headers, _ = client.send(client.path + "api/runs", method=method, body=b"step=0")
        assert (status, headers["Allow"]) == (405, "GET"), method
    assert client.send(client.path, method="NONSENSE")[0] == 501


def test_a_body_is_not_read_as_a_second_request(client):
    first, second = (
        f"{method} {client.path}api/runs HTTP/1.1\r\nHost: localhost\r\n" for method in ("POST", "GET")
    )
    with socket.create_connection(client.server.server_address) as connection:
        connection.sendall(f"{first}Content-Length: {len(second) + 2}\r\n\r\n{second}\r\n".encode())
        answer = connection.makefile("rb").read()  # up to the end of the connection
    assert [line.split()[1] for line in answer.splitlines() if line.startswith(b"HTTP/")] == [b"405"]


def test_an_error_is_printed_unless_the_browser_has_closed_the_connection(client, capsys):
    for error, printed in (
        (BrokenPipeError(), False),
        (ConnectionResetError(), False),
        (KeyError("x"), True),
    ):
        try:
            raise error
        except Exception:
            client.server.handle_error(None, ("127.0.0.1", 1))
        assert ("KeyError" in capsys.readouterr().err) == printed


def test_every_response_forbids_foreign_scripts_and_declares_its_type(client):
    kinds = {"": "text/html", "view.js": "text/javascript", "view.css": "text/css"}
    for path in (*kinds, "api/runs", "nothing", "api/rows?run=9&step=0"):
        _, headers, _ = client.send(client.path + path)
        assert headers["Content-Type"] == f"{kinds.get(path, 'application/json')}; charset=utf-8"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers
        rules = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
        assert rules["default-src"] == "'none'"
        assert {rules["script-src"], rules["style-src"], rules["connect-src"]} == {"'self'"}
        assert rules["frame-ancestors"] == "'none'"
        assert "unsafe" not in headers["Content-Security-Policy"]


def test_all_files_that_the_viewer_refers_to_are_served(client):
    """From its first page on, through the files that it loads."""
    left, seen = [""], set()
    while left:
        seen.add(path := left.pop())
        status, _, body = client.send(client.path + path)
        assert status == 200, path
        named = re.findall(r'(?:src="|href="|from "\./)(\w+\.\w+)"', body.decode())
        left += {*named} - seen - {*left}
    assert {"page.css", "view.css", "view_rows.js", "numbers.js"} <= seen


class Touch:
    """An object whose pickle runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed_and_a_damaged_file_is_named(run, tmp_path):
    rows = tmp_path / "run" / "rollouts"
    write_run(rows.parent, steps=1)
    whole = (rows / "step_00000000.parquet").read_bytes()
    canary = tmp_path / "ran"
    code = pickle.dumps(Touch(canary))
    kind = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": code}
    field = pa.field("evil", pa.binary(), metadata=kind)
    plain = pq.read_table(rows / "step_00000000.parquet")
    metadata = {**plain.schema.metadata, b"headrace.step": code, b"headrace.recipe": b'{"a": 1}'}
    table = plain.append_column(field, pa.array([code] * 9)).replace_schema_metadata(metadata)
    pq.write_table(table, rows / "step_00000001.parquet")
    (rows / "step_00000002.parquet").write_bytes(code)
    (rows / "step_00000003.parquet").write_bytes(whole[: len(whole) // 2])
    (rows / "step_4.parquet").write_bytes(whole)
    (rows / "step_00000004.parquet").write_bytes(whole)
    (rows / "step_00000005.parquet.tmp").write_bytes(whole)
    with served(rows.parent) as client:
        found = client.ask("runs")["runs"][0]
        assert found["steps"]["step"] == [0, 1, 4]
        names = [problem.split(":")[0] for problem in found["problems"]]
        assert names == ["step_00000002.parquet", "step_00000003.parquet", "step_4.parquet"]
        answer = client.ask("rows", run=0, step=1, sort="row")
        assert "evil" not in dict(answer["columns"])
        assert shown(answer) == without_step(plain.to_pylist())
        assert client.ask("metric", name="rows/in")["runs"][0][1] == [1, None]
        (rows / "step_00000001.parquet").write_bytes(b"gone")
        assert "cannot be read as Parquet" in client.ask("rows", status=422, run=0, step=1)["error"]
    assert not canary.exists()


def test_a_file_that_declares_too_much_data_is_not_read(run, monkeypatch):
    file = pq.ParquetFile(run / "rollouts" / "step_00000002.parquet").metadata
    size = file.row_group(0).total_byte_size
    for rows, most in ((9, size), (8, size), (9, size - 1)):
        monkeypatch.setattr(stored_run, "MAX_STEP_ROWS", rows)
        monkeypatch.setattr(stored_run, "MAX_STEP_BYTES", most)
        if (rows, most) == (9, size):
            assert stored_run.read_footer(run / "rollouts" / "step_00000002.parquet", 2).rows == 9
            continue
        with pytest.raises(stored_run.UnreadableRows) as raised:
            stored_run.read_footer(run / "rollouts" / "step_00000002.parquet", 2)
        said = f"a step has at most {rows} rows and {most:,} bytes; found 9 rows and {size:,} bytes"
        assert str(raised.value) == said


def test_the_error_of_a_decoder_is_one_line_of_200_letters(run, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("x" * 201 + "\nmore")

    monkeypatch.setattr(stored_run.pq, "ParquetFile", fails)
    with pytest.raises(stored_run.UnreadableRows, match=f"^it cannot be read as Parquet: {'x' * 200}$"):
        stored_run.read_footer(run / "rollouts" / "step_00000002.parquet", 2)


@pytest.mark.parametrize(("more", "read"), [(0, True), (1, False)])
def test_a_step_has_four_million_rows_at_most(tmp_path, more, read):
    path = tmp_path / "step_0.parquet"
    pq.write_table(pa.table({"row": np.zeros(2**22 + more, np.int8)}), path)
    if read:
        assert stored_run.read_footer(path, 0).rows == 2**22
        return
    limits = "a step has at most 4,194,304 rows and 8,589,934,592 bytes; found 4,194,305 rows and "
    with pytest.raises(stored_run.UnreadableRows, match=limits):
        stored_run.read_footer(path, 0)


def test_a_file_that_is_gone_is_named_with_the_reason(tmp_path):
    for read in (stored_run.stamp_of, lambda path: stored_run.opened(path).__enter__()):
        with pytest.raises(
            stored_run.UnreadableRows, match=r"^it cannot be read: No such file or directory$"
        ):
            read(tmp_path / "step_0.parquet")


def test_a_folder_whose_files_cannot_be_read_names_three_of_them(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for step in range(4):
        (tmp_path / "rollouts" / f"step_{step}.parquet").write_bytes(b"PAR1" if step else b"")
    with pytest.raises(stored_run.ConfigError) as raised:
        stored_run.StoredRun(tmp_path)
    said = str(raised.value)
    assert said.startswith(
        f"{tmp_path}: no file of rows can be read. step_0.parquet: it cannot be read as Parquet: "
    )
    assert [each in said for each in ("step_1", "step_2", "step_3")] == [True, True, False]
    for step, named in ((5, "Step 5"), (None, "The first")):
        failed = json.dumps([[step, "no reward\x1b"], [6, "other"]])
        (tmp_path / "rollouts" / "failed_steps.json").write_text(failed)
        with pytest.raises(stored_run.ConfigError) as raised:
            stored_run.StoredRun(tmp_path)
        assert str(raised.value) == f"{tmp_path} has no rows: all steps failed. {named}: no reward\\x1b"


# -- the command --------------------------------------------------------------------------------------------


def test_the_command_prints_the_runs_and_the_address(run, other, monkeypatch, capsys):
    """Ctrl-C ends it, and closes its port."""
    servers = []

    def until_ctrl_c(server):
        servers.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(ViewServer, "serve_forever", until_ctrl_c)
    assert view([str(run), str(other)]) == 0
    (server,) = servers
    port = server.server_address[1]
    assert capsys.readouterr().out == (
        f"{run}: 4 steps\n{other}: 3 steps\n\nOpen http://127.0.0.1:{port}/{server.secret}/\n"
        f"From another machine: ssh -N -L {port}:127.0.0.1:{port} HOST, then the same address.\n"
        "Ctrl-C ends it.\n\n"
    )
    assert len(server.secret) == 22  # 128 bits
    assert port > 1023  # any free port
    assert server.RequestHandlerClass.timeout == 60  # after this many seconds, an idle connection is closed
    assert server.socket.fileno() == -1
    assert view([str(run), "--port", str(port)]) == 0
    for wrong in (-1, 2**16):
        with pytest.raises(stored_run.ConfigError, match=rf"a port is from 1 to 65535; got {wrong}$"):
            view([str(run), f"--port={wrong}"])


def test_an_error_of_the_command_says_what_to_do(tmp_path, run):
    (tmp_path / "empty").mkdir()
    (tmp_path / "alone.jsonl").touch()
    for at, name in enumerate(("1/b", "1/a", "2")):  # the last is the oldest
        shutil.copytree(run / "rollouts", tmp_path / "many" / name / "rollouts")
        os.utime(tmp_path / "many" / name / "rollouts", (1e9 - at, 1e9 - at))
    (tmp_path / "many" / "as_text" / "rollouts").mkdir(parents=True)  # newer, and not to be viewed
    (tmp_path / "many" / "as_text" / "rollouts" / "step_00000000.jsonl").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, message in (
            ([], "the following arguments are required: FOLDER"),
            (["nowhere"], "nowhere does not exist. Give the folder of a run"),
            (["--path", str(run)], "unknown option '--path'; the only option is --port"),
            ([str(run), "--no-open"], "No browser is started: view prints the address"),
            ([str(run / "report.html")], f"is a file. headrace view {run}\n"),
            (["many"], "many is no run, but has runs in it. The newest: headrace view many/1/b\n"),
            (["alone.jsonl"], "alone.jsonl is a file. Give the folder of a run, which has report.html"),
            (["empty"], "headrace task=replay source.path=empty hydra.run.dir=FOLDER"),
            ([str(run)] * 3, "two runs are shown side by side at most; got 3 folders"),
            ([str(run), "--port", port], f"--port {port}: address already in use. Take another port"),
            ([str(run), "-p", port], f"--port {port}: address already in use"),
            ([str(run), "--port", "99999"], "a port is from 1 to 65535; got 99999"),
            ([str(run), "--prot", "1"], "unknown option '--prot'"),
        ):
            done = headrace_here(tmp_path, "view", *words, check=False)
            assert (done.returncode, done.stdout) == (2, ""), words
            assert message in done.stderr
            assert done.stderr.startswith("headrace: ")
            assert "Traceback" not in done.stderr


def test_without_pyarrow_the_command_names_what_to_install(tmp_path, run, monkeypatch):
    # Modules that are imported must be removed, because they would not import pyarrow again.
    for name in [name for name in sys.modules if name.startswith("headrace.pipeline.tools.view")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = headrace_here(tmp_path, "view", str(run), check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "view needs pyarrow: pip install pyarrow" in done.stderr


def test_the_command_serves_until_ctrl_c_and_exits_quietly_without_torch(run):
    code = (
        "import sys\nfrom headrace.pipeline.main import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'tensordict', 'hydra.core') if name in sys.modules][:1])"
    )
    with started(["view", str(run)], run.parent, code=code) as (process, printed, address):
        assert printed[0] == f"{run}: 4 steps"
        with urllib.request.urlopen(address + "api/runs") as answer:
            assert json.load(answer)["runs"][0]["steps"]["step"] == [0, 1, 2, 3]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "torch" not in out


# -- the rows that a run writes ----------------------------------------------------------------------------


def rows_on_disk(folder):
    return [(step, *row) for step, batch in open_dump(folder) for row in zip(
        batch["rollout_id"].tolist(), batch["next", "reward"].flatten().tolist(), strict=True)]  # fmt: skip


def test_the_rows_of_a_step_that_was_refused_are_kept(tmp_path):
    """All rewards of step 1 are NaN, as if the grader had failed. No number of the run includes the step."""
    pipeline, folder = Pipeline(stages()), ReportFolder(tmp_path / "run", every=None)
    for step in range(3):
        batch = step_batch(step)
        if step == 1:
            batch["next", "reward"] = torch.full((9,), math.nan)
        try:
            folder.add(make_report(pipeline.run(batch), step=step))
        except BatchError as err:
            folder.fail(step, str(err), refused_report(batch, step, err))
    assert "1 of 3 steps failed, and is in no number here: step 1." in folder.close().read_text()
    with served(tmp_path / "run") as client:
        (run,) = client.ask("runs")["runs"]
        assert [step for step, _ in run["failed"]] == [1]
        assert run["steps"]["step"] == [0, 1, 2]
        assert run["steps"]["reward"][1] is None
        found = client.ask("rows", run=0, step=1)
        assert found["found"] == 9
        names = [name for name, _ in found["columns"]]
        assert {row[names.index("reason") + 1]["start"] for row in found["rows"]} == {"collapse/refused_step"}
        assert found["rows"][0][names.index("response") + 1]["start"].startswith("Answer")


def test_failed_steps_and_their_reasons_are_beside_the_rows(tmp_path):
    folder = ReportFolder(tmp_path / "run", every=None)
    folder.fail(0, "group 3 has 7 of 8")
    folder.add(report_of_step(1))
    folder.fail(None, "half a line")
    with served(tmp_path / "run") as client:
        (run,) = client.ask("runs")["runs"]
        assert run["steps"]["step"] == [1]
        assert run["failed"] == [[0, "group 3 has 7 of 8"], [None, "half a line"]]
        file = tmp_path / "run" / "rollouts" / "failed_steps.json"
        for damaged in ('{"a": 1}', "[[1, 2]]", "[" * 100_000, "no JSON"):
            file.write_text(damaged)
            (run,) = client.ask("runs")["runs"]
            assert run["failed"] == []
            assert "failed_steps.json: " in run["problems"][0]
        os.truncate(file, 2**24)
        assert "at most" not in client.ask("runs")["runs"][0]["problems"][0]
        os.truncate(file, 2**24 + 1)
        assert "at most 16,777,216 bytes" in client.ask("runs")["runs"][0]["problems"][0]
    file.write_text('[[0, "earlier"], [5, "later"]]')
    resumed = ReportFolder(tmp_path / "run", every=None, existing="resume")
    resumed.add(report_of_step(2))
    assert resumed.failed == [(0, "earlier")]
    assert json.loads(file.read_text()) == [[0, "earlier"]]


def test_a_resumed_run_has_each_row_once(tmp_path):
    write_run(tmp_path / "run", steps=4)
    with pytest.raises(FileExistsError, match=r"rows of another run, 4 files.*existing='resume'") as caught:
        ReportFolder(tmp_path / "run")
    assert "hydra" not in str(caught.value)
    with ReportFolder(tmp_path / "run", existing="resume") as again:
        assert len(rows_on_disk(tmp_path / "run" / "rollouts")) == 36
        again.add(report_of_step(2, 0.5))
        assert [step for step, *_ in open_dump(tmp_path / "run" / "rollouts")] == [0, 1, 2]
        again.add(report_of_step(3, 0.5))
    write_run(tmp_path / "whole", steps=2)
    with ReportFolder(tmp_path / "whole", existing="resume") as whole:
        for step in (2, 3):
            whole.add(report_of_step(step, 0.5))
    found = rows_on_disk(tmp_path / "run" / "rollouts")
    assert found == rows_on_disk(tmp_path / "whole" / "rollouts")
    assert len(found) == len({row[:2] for row in found}) == 36


def test_a_repeated_step_is_refused_and_replaces_nothing(tmp_path):
    folder = ReportFolder(tmp_path, every=None)
    folder.add(report_of_step(0))
    before = rows_on_disk(tmp_path / "rollouts")
    with pytest.raises(ValueError, match=r"found step 0 again. Set make_report\(run, step=...\)"):
        folder.add(report_of_step(0, 0.5))
    assert rows_on_disk(tmp_path / "rollouts") == before
    with pytest.raises(ValueError, match="existing must be"):
        ReportFolder(tmp_path, existing="replace")

"""The page after a restart shows the whole run."""

from __future__ import annotations

import dataclasses
import json
import math
from random import Random

import pytest
from busy import reported
from pages import data_of, rollouts_of, step_of

from headrace.pipeline import ReportFolder
from headrace.pipeline.tools.report.history import HISTORY, add_step, begin_history, read_history, read_recipe
from headrace.pipeline.tools.report.page_contents import cut_step

pytestmark = pytest.mark.slow


@pytest.fixture
def report_of(make_batch):
    """A function that makes the report of a step. Some numbers change from step to step."""
    report = reported(make_batch)[1]

    def made(step: int):
        dice, other = Random(step), dataclasses.replace(report, step=step)
        changes = {"reward/all/mean": dice.random() + step / 20, "rollouts/truncated": dice.random()}
        changes |= {"response_length/mean": 10.0 + 3 * step, "rows/trained": float(dice.random() > 0.1)}
        changes |= {"frac_reward_zero_std": math.nan if dice.random() < 0.3 else 0.7}
        changes |= {"rare/number": 1.0} if step % 7 == 3 else {}
        other.__dict__["numbers"] = report.numbers | changes
        return other

    return made


def what_is_said(folder: ReportFolder) -> dict:
    """The page's data and the advice about the whole run."""
    data = data_of(folder.close())
    del data["run"]
    return data | {"advice": (folder.verdict, folder.advisories, folder.unchecked)}


@pytest.mark.parametrize(("seed", "dump"), [(0, None), (1, "parquet"), (2, "parquet")])
def test_a_run_with_restarts_says_the_same_as_one_without(tmp_path, report_of, monkeypatch, seed, dump):
    """The run is killed after some steps, and continues at the next step or an earlier one."""
    dice = Random(seed)
    steps = dice.randint(13, 16)
    monkeypatch.setattr("headrace.pipeline.tools.report.folder.POINTS", 4)  # so that curves are thinned
    monkeypatch.setattr("headrace.pipeline.tools.report.folder.SHARE", math.inf)  # each step writes a page
    options = {"dump": dump, "steps": 3, "existing": "resume"}
    whole = ReportFolder(tmp_path / "whole", every=None, **options)
    for step in range(steps):
        whole.add(report_of(step))

    first, marks = 0, []
    for last in (False, False, False, True):
        folder = ReportFolder(tmp_path / "parts", every=0, **options)
        end = steps if last else dice.randint(first + 1, steps)
        for step in range(first, end):
            folder.add(report_of(step))
        marks = [each for each in marks if each < first] + [first]
        first = max(1, min(end, steps - 1) - dice.choice([0, 0, 1, 5]))
    assert what_is_said(folder) == what_is_said(whole)
    assert data_of(folder.close())["run"]["restarts"] == marks[1:]
    assert data_of(whole.close())["run"]["restarts"] == []


@pytest.mark.parametrize(
    "change", [None, ("</html>", "</html>"), ("page-data", "data"), ('"verdict"', '"x"')]
)
def test_only_a_page_of_this_version_keeps_the_steps_before_a_restart(tmp_path, report_of, change):
    """A page that was not written, or that another version wrote, is replaced."""
    page = tmp_path / "report.html"
    for step in range(2):
        with ReportFolder(tmp_path, existing="resume") as folder:
            folder.add(report_of(step))
        if step == 0:
            page.write_text(page.read_text().replace(*change)) if change else page.unlink()
    kept = change is not None and change[0] == change[1]
    assert [each["step"] for each in data_of(page)["steps"]] == [0, 1][not kept :]
    assert data_of(page)["curve_steps"] == [0, 1]


def test_a_run_that_fails_after_a_restart_keeps_its_verdict_and_advisories(tmp_path, report_of):
    for step in range(2):
        with ReportFolder(tmp_path, existing="resume") as folder:
            folder.add(report_of(step))
    with ReportFolder(tmp_path, existing="resume") as again:
        again.fail(2, "no rows")
    assert (again.verdict, again.advisories) == (folder.verdict, folder.advisories)
    assert [each["step"] for each in data_of(tmp_path / "report.html")["steps"]] == [0, 1]


@pytest.mark.parametrize("room", [0, 40, 150, 3 * 44, 3 * 44 - 1, 10_000])  # each text takes 44 bytes
def test_an_earlier_step_keeps_as_many_texts_as_fit(room):
    step = step_of([row for group in range(3) for row in rollouts_of(group, [0.0, 1.0])])
    texts = [{"start": f"text {at}", "missing": 0, "end": ""} for at in range(9)]
    step["groups"]["asked"], step["rows"]["response"] = texts[:3], texts[3:]
    cut = cut_step(step, room)
    left = [*cut["groups"]["asked"], *cut["rows"]["response"]]
    size, expected = 0, []
    for text in texts:
        assert len(json.dumps({"": text}, separators=(",", ":"))) == 44
        size += 44
        expected.append(text if size <= room else None)
    assert left == expected
    cut["groups"]["asked"], cut["rows"]["response"] = texts[:3], texts[3:]
    assert cut == step  # nothing else is changed


def test_a_restarted_run_keeps_the_time_of_its_beginning(tmp_path, report_of, monkeypatch):
    for time, step in (("first", 0), ("second", 1), ("third", 2)):
        monkeypatch.setattr("headrace.pipeline.tools.report.folder.now", lambda time=time: time)
        with ReportFolder(tmp_path, existing="resume") as folder:
            folder.add(report_of(step))
    assert data_of(tmp_path / "report.html")["run"]["began"] == "first"
    assert read_history(tmp_path / "rollouts" / HISTORY).starts == [(0, "first"), (1, "second"), (2, "third")]


def test_a_step_that_was_being_written_at_the_kill_is_left_out(tmp_path, report_of):
    with ReportFolder(tmp_path, existing="resume") as folder:
        folder.add(report_of(0))
    with (tmp_path / "rollouts" / HISTORY).open("a") as file:
        file.write('{"step": 1, "numb')
    with ReportFolder(tmp_path, existing="resume") as folder:
        folder.add(report_of(1))
    assert data_of(tmp_path / "report.html")["curve_steps"] == [0, 1]


@pytest.mark.parametrize(
    "line", ["no JSON", '{"step": 1}', '{"step": "a", "began": "b"}', "[1]", "0123456789" * 9]
)
def test_a_damaged_history_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / HISTORY
    begin_history(path, 0, "now", resumes=False)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(
        ValueError, match=r"history.ndjson: line 2 must have a step .* Remove the file"
    ) as found:
        read_history(path)
    assert f"found {line[:80]!r}." in str(found.value)


@pytest.mark.parametrize(("letters", "known"), [(10_000, True), (10_001, False)])
def test_the_recipe_of_a_run_is_read_from_a_line_of_at_most_10_000_letters(tmp_path, letters, known):
    name = "x" * (letters - len('{"recipe": ""}'))
    (tmp_path / HISTORY).write_text(json.dumps({"recipe": name}) + "\n")
    assert read_recipe(tmp_path) == (name if known else "")


def test_another_run_begins_a_new_history(tmp_path):
    path = tmp_path / HISTORY
    for resumes, expected in ((False, []), (True, [(0, {"a": 1.0})]), (False, [])):
        assert begin_history(path, 1, "now", resumes=resumes).steps == expected
        add_step(path, 0, {"a": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 0]

"""The page of a run grows with the run, costs little, and shows when the run has ended."""

from __future__ import annotations

import json
import os

import pytest
from busy import reported
from omegaconf import OmegaConf
from pages import data_of
from stored_runs import report_of_step

from headrace.installed import versions
from headrace.pipeline import Pipeline, ReportFolder, make_report
from headrace.pipeline.tools.report import folder as folders

pytestmark = pytest.mark.slow


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets. Writing a page takes `writing` seconds."""

    class Clock:
        now, writing, pages = 0.0, 0.0, 0

        def monotonic(self):
            return self.now

    clock, write = Clock(), folders.write_page

    def slowly(data, path):
        clock.now, clock.pages = clock.now + clock.writing, clock.pages + 1
        write(data, path)

    monkeypatch.setattr(folders.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(folders, "write_page", slowly)
    return clock


def test_a_page_is_live_until_its_folder_is_closed(make_batch, tmp_path, clock):
    with ReportFolder(tmp_path / "new", every=2.0) as folder:
        assert not (tmp_path / "new").exists()
        for step in range(3):
            folder.add(reported(make_batch, step=step)[1])
            clock.now += 2.0
            data = data_of(tmp_path / "new" / "report.html")
            assert [each["step"] for each in data["steps"]] == list(range(step + 1))
            assert data["run"]["live"] == 2.0
        assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["report.html", "rollouts"]
    assert data_of(tmp_path / "new" / "report.html")["run"]["live"] is None


def test_a_failing_loop_closes_its_page(make_batch, tmp_path):
    report = reported(make_batch)[1]

    def loop():
        with ReportFolder(tmp_path) as folder:
            folder.add(report)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    data = data_of(tmp_path / "report.html")
    assert data["run"]["live"] is None
    assert data["curve_steps"] == [0]


def test_pages_are_written_at_most_once_per_interval(make_batch, tmp_path, clock):
    report = reported(make_batch)[1]
    folder = ReportFolder(tmp_path, every=5.0, dump=None)
    for _ in range(20):
        folder.add(report)
        clock.now += 1.0
    assert clock.pages == 4


def test_writing_pages_takes_at_most_two_percent_of_the_time(make_batch, tmp_path, clock):
    report = reported(make_batch)[1]
    clock.writing = 0.5
    folder = ReportFolder(tmp_path, every=1.0, dump=None)
    for _ in range(150):
        folder.add(report)
        clock.now += 1.0
    assert clock.pages > 2
    assert (clock.pages - 1) * 0.5 <= 0.02 * clock.now  # without the first page, for which a user waits


def test_a_long_run_has_a_page_of_bounded_size_with_the_advisories_of_all_steps(make_batch, tmp_path):
    report = reported(make_batch)[1]
    empty = {"rows/trained": 0.0}
    folder = ReportFolder(tmp_path, every=None, dump=None)
    for step in range(2000):
        folder.add(_with(report, step, empty if step == 777 else {}))
    data = data_of(folder.close())
    assert 250 <= len(data["curve_steps"]) <= 500
    assert data["curve_steps"][0] == 0
    assert data["curve_steps"][-1] == 1999
    shown = [step["step"] for step in data["steps"]]
    assert len(shown) <= 20
    texts = [each["text"] for each in data["steps"][-1]["advisories"]]
    assert any(text.startswith("Nothing was trained at step 777") for text in texts)


def test_several_reports_of_step_0_are_separate(make_batch, tmp_path):
    report = reported(make_batch)[1]
    folder = ReportFolder(tmp_path, every=0.0, dump=None)
    for rows in (8.0, 0.0):
        folder.add(_with(report, 0, {"rows/trained": rows}))
    said = [[each["name"] for each in step["advisories"]] for step in data_of(folder.close())["steps"]]
    assert ["nothing-trains" in names for names in said] == [False, True]


def test_a_closed_page_is_written_once_and_again_after_more_steps(make_batch, tmp_path, clock):
    folder = ReportFolder(tmp_path, every=None)
    for pages in (1, 2):
        folder.add(reported(make_batch, step=pages)[1])
        assert folder.close() == folder.close() == tmp_path / "report.html"
        assert clock.pages == pages


def _with(report, step, numbers):
    """The same report for another step, with other numbers."""
    import dataclasses

    other = dataclasses.replace(report, step=step)
    other.__dict__["numbers"] = report.numbers | numbers
    other.__dict__.update({name: getattr(report, name) for name in ("funnel", "rollouts", "groups")})
    return other


def test_the_page_has_exactly_the_symptoms_of_its_advisories(make_batch, tmp_path):
    report = reported(make_batch)[1]
    folder = ReportFolder(tmp_path)
    folder.add(_with(report, 0, {"rollouts/truncated": 0.9, "groups/incomplete": 0.0, "staleness/mean": 0.0}))
    data = data_of(folder.close())
    fired = {each["name"] for step in data["steps"] for each in step["advisories"]}
    assert "rollouts-truncated" in fired
    assert {each["name"] for each in data["symptoms"]} == fired
    assert folder.advisories[0].name in fired
    assert folder.verdict == "The mean reward is 3."


def test_the_page_has_the_start_and_command_of_the_run(make_batch, tmp_path):
    config = "pipeline: {a: <b>}\n"
    folder = ReportFolder(tmp_path, config=config)
    folder.setup = folders.Setup(OmegaConf.create(config), ["pipeline=grpo"])
    folder.add(reported(make_batch)[1])
    run = data_of(folder.close())["run"]
    assert run["config"] == config
    assert run["overrides"] == ["pipeline=grpo"]
    assert run["versions"] == versions()
    assert run["began"] <= run["written"]
    assert run["began"].endswith("+00:00")
    assert not [value for value in os.environ.values() if len(value) > 12 and value in json.dumps(run)]


def test_an_object_that_is_not_a_run_or_report_is_refused(tmp_path, make_batch):
    run = Pipeline({}).run(make_batch([1.0], [0]))
    with pytest.raises(TypeError, match="make_report takes a run, a decision or a pipeline; got TensorDict"):
        make_report(run.batch)
    with pytest.raises(TypeError, match=r"add takes make_report\(run, step=...\); got Run"):
        ReportFolder(tmp_path).add(run)


def test_negative_seconds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every must be finite and ≥ 0; got -1"):
        ReportFolder(tmp_path, every=-1)


def test_a_resumed_run_without_a_new_step_keeps_its_page(tmp_path):
    with ReportFolder(tmp_path, every=None) as folder:
        folder.add(report_of_step(0))
    page = (tmp_path / "report.html").read_text()
    with ReportFolder(tmp_path, every=None, existing="resume"):
        pass
    assert (tmp_path / "report.html").read_text() == page

"""The page of a run grows with the run, costs little, and shows when the run has ended."""

from __future__ import annotations

import json
import os

import pytest
from busy import reported
from composed import configure
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from pages import data_of
from stored_runs import report_of_step

from headrace.installed import versions
from headrace.pipeline import ConfigError, Pipeline, ReportFolder, make_report
from headrace.pipeline.tools.report import FittedColumn, FittedTable
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


def test_pages_are_written_at_most_once_in_five_seconds(make_batch, tmp_path, clock):
    report = reported(make_batch)[1]
    folder = ReportFolder(tmp_path, dump=None)
    for _ in range(21):
        folder.add(report)
        clock.now += 1.0
    assert clock.pages == 5


def test_writing_pages_takes_at_most_two_percent_of_the_time(make_batch, tmp_path, clock):
    report = reported(make_batch)[1]
    clock.writing = 0.5
    folder = ReportFolder(tmp_path, every=1.0, dump=None)
    for _ in range(60):
        folder.add(report)
        clock.now += 1.0
    assert clock.pages > 2
    assert (clock.pages - 1) * 0.5 <= 0.02 * clock.now  # without the first page, for which a user waits


def test_a_long_run_has_a_page_of_bounded_size_with_the_advisories_of_all_steps(make_batch, tmp_path):
    """A page has fewer than 20 steps and fewer than 500 points of a curve, and also the last."""
    report = reported(make_batch)[1]
    empty = {"rows/trained": 0.0}
    folder = ReportFolder(tmp_path, every=None, dump=None)
    steps = {18: range(19), 19: [*range(0, 20, 2), 19]}
    points = {498: range(499), 499: [*range(0, 500, 2), 499]}
    for step in range(500):
        folder.add(_with(report, step, empty if step == 333 else {}))
        data = data_of(folder.close()) if step in {*steps, *points} else {}
        if step in steps:
            assert [each["step"] for each in data["steps"]] == [*steps[step]]
        if step in points:
            assert data["curve_steps"] == [*points[step]]
    texts = [each["text"] for each in data["steps"][-1]["advisories"]]
    assert any(text.startswith("Nothing was trained at step 333") for text in texts)


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


def test_a_page_has_what_its_folder_was_given(make_batch, tmp_path):
    """The table of missing groups is at the last step. A page of two recipes has no verdict."""
    report = reported(make_batch)[1]
    folder = ReportFolder(tmp_path, title="t", every=0.5, dump=None, versus=["one", "two"])
    folder.notices, folder.unsaid, folder.difference = ["a\x1b"], ["x"], "d\x1b"
    folder.missing = FittedTable([FittedColumn("length"), FittedColumn("lost")], caption="c")
    folder.missing.add("1 to 2", "3")
    for step in range(2):
        folder.add(_with(report, step, {}))
    data = data_of(tmp_path / "report.html")
    assert (data["run"]["live"], data["run"]["config"], data["run"]["overrides"]) == (1.0, None, [])
    assert "failed" not in data
    folder.fail(7, "why\x1b")
    data = data_of(folder.close())
    assert (data["title"], data["notices"], data["unsaid"]) == ("t", ["a\\x1b"], ["x"])
    assert (data["versus"], data["difference"], data["rows_kept"]) == (["one", "two"], "d\\x1b", False)
    said = "1 of 3 steps failed, and is in no number here: step 7."
    assert data["failed"] == {"said": said, "reasons": ["step 7: why\\x1b"]}
    table = {"name": "length", "head": ["length", "lost"], "lines": [["1 to 2", "3"]], "note": "c"}
    assert [step["survivors"] for step in data["steps"]] == [[], [table]]
    assert [(step["verdict"], step["advisories"]) for step in data["steps"]] == [("", [])] * 2
    assert data["totals"]["rows/in"] == 2 * report.numbers["rows/in"]
    assert data["recorded"] == 2
    with ReportFolder(tmp_path / "no page", page=False) as without:
        without.add(report)
    assert without.close() is None
    assert sorted(file.name for file in (tmp_path / "no page").iterdir()) == ["rollouts"]


def test_failed_steps_are_counted_and_twenty_of_them_are_named():
    failed = [folders.FailedStep(3, "a"), folders.FailedStep(None, "b")]
    assert folders.said_of_failed(failed, 1000) == [
        "2 of 1,002 steps failed, and are in no number here: step 3, a step without a number.",
        "step 3: a",
        "a step without a number: b",
    ]
    for number, more in ((20, ""), (21, " and 1 more")):
        said, *reasons = folders.said_of_failed([folders.FailedStep(at, "x") for at in range(number)], 0)
        names = ", ".join(f"step {at}" for at in range(20))
        assert said == f"{number} of {number} steps failed, and are in no number here: {names}{more}."
        assert reasons == [f"step {at}: x" for at in range(20)]


def test_a_folder_is_configured_as_the_command_says(tmp_path, monkeypatch):
    """Outside of the command there are no overrides and no name of a recipe."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    words = ["task=replay", "source.path=x", "report.steps=7", "report.every=3", "report.dump=jsonl"]
    config = configure("config", *words, "report.html=false")
    folder = ReportFolder.configured(config, tmp_path, title="replay of x")
    assert (folder.title, folder.recipe, folder.existing) == ("headrace, replay of x", "", "raise")
    assert (folder.steps, folder.every, folder.dump, folder.page) == (7, 3.0, "jsonl", False)
    assert folder.config == OmegaConf.to_yaml(config, resolve=True)
    assert folder.setup == (config, [])
    with pytest.raises(ConfigError, match=r"^report\.steps must be an integer ≥ 2; got 1"):
        ReportFolder.configured(configure("config", *words, "report.steps=1"), tmp_path, title="")
    folder.add(report_of_step(4))
    folder.add(report_of_step(5))
    with pytest.raises(FileExistsError) as raised:
        ReportFolder.configured(config, tmp_path, title="")
    assert str(raised.value) == (
        f"{tmp_path / 'rollouts'} has the rows of another run, 2 files from step_00000004.jsonl on: take "
        "another folder, hydra.run.dir=FOLDER (with -m hydra.sweep.dir=FOLDER), or remove these files"
    )
    with pytest.raises(FileExistsError) as raised:
        ReportFolder(tmp_path)
    assert str(raised.value).endswith(
        " on: take another folder, or continue its run with ReportFolder(existing='resume'), or remove these "
        "files"
    )


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

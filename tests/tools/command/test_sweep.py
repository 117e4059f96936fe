"""A sweep ends with a table that has a line for each job."""

from __future__ import annotations

import io
import json
import re
import time

import pytest
from batches import batch_of
from command import QUICK, headrace_here
from omegaconf import OmegaConf
from rich.console import Console

from headrace.pipeline import ConfigError, Pipeline, make_report, write_dump
from headrace.pipeline.tools.command.arguments import hydra_arguments
from headrace.pipeline.tools.command.sweep import FILE, SweepTable, record_job, show_sweep

pytestmark = pytest.mark.slow


def test_the_numbers_of_a_training_are_those_of_its_file(tmp_path):
    """Twelve steps have the rewards 0 to 11. Each trains one row more than the step before, from 0, of 20."""
    lines = [f"{step},{step},20,{step}" for step in range(12)]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,reward/all/mean,rows/in,rows/trained", *lines]))
    said = {"job": 0, "task": "train", "overrides": [], "number": 11.0, "failure": ""}
    record_job(tmp_path, began=(tmp_path / "metrics.csv").stat().st_mtime, **said)
    written = (tmp_path / FILE).read_text()
    found = json.loads(written)
    assert written.strip() == json.dumps(found, indent=1)
    assert (found["steps"], found["rewards"], found["trained"]) == (12, [1.0, 10.0], 66 / 240)
    later = time.time() + 60
    record_job(tmp_path, began=later, **said)
    found = json.loads((tmp_path / FILE).read_text())
    assert not {"steps", "rewards", "trained"} & found.keys()  # the file is of an earlier job
    assert found["seconds"] == found["ended"] - later
    for rows, share in ((0, None), (4, 0.0)):
        (tmp_path / "metrics.csv").write_text(f"step,rows/in\n0,{rows}\n")
        record_job(tmp_path, began=0.0, **said)
        found = json.loads((tmp_path / FILE).read_text())
        assert (found["steps"], found["rewards"], found["trained"]) == (1, [], share)


def test_the_jobs_of_a_sweep_are_shown_by_number_without_those_of_an_earlier_one(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "100")
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    sweep, said = SweepTable(), {"task": "replay", "number": 1.0}
    sweep.on_multirun_start(config)
    for number in (1, 0, 2):
        record_job(tmp_path / str(number), began=time.time(), job=number, overrides=[], failure="", **said)
    for number, ended in ((0, sweep.began), (2, sweep.began - 1)):
        file = tmp_path / str(number) / FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | {"ended": ended}))
    sweep.on_multirun_end(config)
    shown = capsys.readouterr().out
    assert "a sweep of 2 jobs" in shown
    assert re.findall(r"^ +(\d) ", shown, re.M) == ["0", "1"]
    record_job(tmp_path / "more" / "3", began=time.time(), job=3, overrides=[], failure="bad", **said)
    with pytest.raises(SystemExit) as ended:
        sweep.on_multirun_end(config)
    assert ended.value.code == 2


def table(done):
    """The cells of the header, the cells of each line, and the printed text from the table to the end."""
    after = done.stdout[done.stdout.index("a sweep of ") :].splitlines()
    lines = [line.split() for line in after if line.strip()]
    rule = next(place for place, line in enumerate(lines) if line[0].startswith("──"))
    return lines[1], [line for line in lines[rule + 1 :] if line[0].isdecimal()], "\n".join(after)


@pytest.mark.torchrl
def test_a_sweep_ends_with_the_result_or_the_error_of_each_job(tmp_path, monkeypatch):
    """Two jobs of the first sweep raise an unexpected error. One job of the second has an invalid option."""
    from headrace.pipeline.tools.command import job

    build = job.build_pipeline

    def sometimes(config):
        if config.stages.split.seed == 2:
            raise KeyError("out of the blue")
        return build(config)

    monkeypatch.setattr(job, "build_pipeline", sometimes)
    words = [*QUICK, "train.steps=1", "hydra.sweep.dir=sweep", "report.dump=null", "report.html=false"]
    done = headrace_here(tmp_path, "-m", "pipeline=grpo,dr_grpo", "seed=1,2", *words, check=False)
    head, lines, after = table(done)
    assert done.returncode == 2
    assert head == ["job", "pipeline", "seed", "reward", "trained", "steps", "seconds"]
    assert [line[:3] for line in lines] == [
        ["0", "grpo", "1"],
        ["1", "grpo", "2"],
        ["2", "dr_grpo", "1"],
        ["3", "dr_grpo", "2"],
    ]
    assert [line[3] == "failed" for line in lines] == [False, True, False, True]
    assert "job 1 failed: KeyError('out of the blue')" in after
    assert "Traceback" not in done.stderr
    assert all(line[4] == "→" and line[-2] == "1" for line in lines[::2])
    assert lines[0][3] == lines[2][3]  # the first rollouts depend only on the seed
    assert "written to sweep, a folder for each job" in after
    assert max(map(len, after.partition("job 1 failed")[0].splitlines())) <= 80
    again = headrace_here(tmp_path, "-m", "pipeline=grpo", "seed=4,abc", *words, check=False)
    _, others, after = table(again)
    assert [line[:2] for line in others] == [["0", "4"], ["1", "abc"]]
    assert lines[0][3] != others[0][2] != "failed"
    assert "job 1 failed: seed must be an integer; got 'abc'" in after
    assert len(list(tmp_path.rglob(FILE))) == 4


def test_replays_and_comparisons_show_their_results(tmp_path):
    batch = batch_of([0.0, 1.0, 0.0, 2.0], [0, 0, 1, 1])
    write_dump(make_report(Pipeline({}).run(batch)), tmp_path / "rollouts")
    words = ["source.path=rollouts", "pipeline.stages.gate.group_size=2", "report.html=false"]
    head, lines, _ = table(headrace_here(tmp_path, "-m", "task=replay", *words, "pipeline=rloo,dr_grpo"))
    assert head == ["job", "pipeline", "rows", "trained", "seconds"]
    assert all(float(line[2]) > 0 for line in lines)
    pairs = "pipelines=[grpo,rloo],[grpo,dr_grpo]"
    head, lines, _ = table(headrace_here(tmp_path, "-m", "task=compare", *words, pairs))
    assert head == ["job", "pipelines", "correlation", "seconds"]
    assert [line[0] for line in lines] == ["0", "1"]


def shown(jobs, folder, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    show_sweep(jobs, folder, console)
    return console.export_text()


def test_a_line_of_a_sweep_has_the_options_that_differ_and_the_results():
    """Options with equal last names are shown with their full names. Job 1 failed before its first step."""
    job = {"task": "train", "failure": "", "seconds": 1234.56, "steps": 1000, "trained": 0.375}
    first = {"job": 0, "overrides": ["rows=llm", "+a.size=2", "b.size=3"], "rewards": [0.125, 0.875]}
    failed = {
        "job": 1,
        "overrides": ["rows=llm", "a.size=4", "b.size=3"],
        "failure": f"it\x1b failed{' and' * 40}",
    }
    last = {"job": 12, "overrides": ["rows=llm", "b.size=5"], "rewards": [0.5], "trained": 0.0}
    jobs = [job | first, {"task": "train", "seconds": 2} | failed, job | last | {"seconds": 0.26}]
    said = "\n".join(line.rstrip() for line in shown(jobs, "out").splitlines())
    assert (
        said
        == f"""\
a sweep of 3 jobs
job  a.size  b.size         reward  trained  steps  seconds
───────────────────────────────────────────────────────────
  0  2       3       0.125 → 0.875      38%   1000   1234.6
  1  4       3              failed        –      –      2.0
 12  –       5       0.500 → 0.500       0%   1000      0.3
reward: mean over the first quarter and over the last quarter of the steps; with fewer than 12
steps, the first and the last step. trained: share of the rows that are trained, over all steps
job 1 failed: it\\x1b failed{" and" * 40}
written to out, a folder for each job"""
    )


@pytest.mark.parametrize(
    ("tasks", "cells"),
    [
        (["replay"] * 3, ["1,235", "–", "failed"]),
        (["replay", "plan", "audit"], ["rows trained 1,235", "–", "failed"]),
        (["plan", "replay", "audit"], ["uninformative 1,235", "–", "failed"]),
        (["xray", "plan", "audit"], ["xray 1,235", "–", "failed"]),
    ],
)
def test_a_line_of_a_sweep_has_the_number_that_its_task_returned(tasks, cells):
    numbers = zip(tasks, (1234.56, None, 1.0), ("", "", "bad"), strict=True)
    jobs = [
        {"job": at, "task": task, "overrides": [], "number": number, "failure": failure, "seconds": 1}
        for at, (task, number, failure) in enumerate(numbers)
    ]
    name = "rows trained" if len({*tasks}) == 1 else "number"
    width = max(len(name), *map(len, cells))
    folder = "/".join(["out"] * 30)  # wider than the console
    assert shown(jobs, folder).splitlines() == [
        "a sweep of 3 jobs",
        f"job  {name:>{width}}  seconds",
        "─" * (width + 14),
        *(f"  {at}  {cell:>{width}}      1.0" for at, cell in enumerate(cells)),
        "job 2 failed: bad",
        f"written to {folder}, a folder for each job",
    ]


def test_the_table_of_a_sweep_breaks_no_word_in_a_narrow_terminal(tmp_path):
    words = ["pipeline=reinforce_pp_baseline", "pipeline.stages.split.minibatches=4", "seed=1"]
    job = {"task": "train", "failure": "", "seconds": 1234.5, "steps": 1000, "trained": 0.375}
    jobs = [{**job, "job": k, "overrides": words[k:], "rewards": [0.125, 0.875]} for k in range(3)]
    words = set(shown(jobs, tmp_path, width=80).split())
    assert {"job", "pipeline", "minibatches", "reward", "trained", "steps", "seconds"} <= words
    assert {"reinforce_pp_baseline", "0.125", "0.875", "1234.5", "38%", "1000"} <= words


@pytest.mark.torchrl
def test_a_sweep_accepts_options_that_all_its_recipes_have(tmp_path):
    """Both recipes have the stage relative_length, and Hydra's default recipe grpo does not."""
    words = [
        *QUICK,
        "train.steps=1",
        "hydra.sweep.dir=sweep",
        "report.dump=null",
        "report.html=false",
        "pipeline.stages.relative_length.coefficient=0.25",
        "pipeline.stages.advantage.clip=[-5,5]",
        "pipeline.stages.signs.negative=0.5",
        "pipeline.stages.signs=signs",
        "pipeline.after.signs=advantage",
        "~pipeline.stages.filter",
    ]
    done = headrace_here(tmp_path, "-m", "pipeline=length_bonus,gr3", *words)
    head, lines, _ = table(done)
    assert head == ["job", "pipeline", "reward", "trained", "steps", "seconds"]
    assert [line[1] for line in lines] == ["length_bonus", "gr3"]
    for job, line in enumerate(lines):
        assert "failed" not in line
        stages = OmegaConf.load(tmp_path / "sweep" / str(job) / "config.yaml").pipeline.stages
        assert (stages.relative_length.coefficient, stages.advantage.clip) == (0.25, [-5, 5])
        assert (stages.signs.negative, stages["filter"]) == (0.5, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "pipeline=tis,grpo pipeline.stages.correction.level=token",
            "pipeline=grpo has no stage 'correction'",
        ),
        (
            "pipeline=tis,mis pipeline.stages.correction.levle=token",
            r"\(did you mean .*correction.level=token\?",
        ),
        ("pipeline=tis,mi pipeline.stages.correction.level=token", "unknown recipe 'mi'"),
        ("pipeline=tis,mis pipeline.stages.overlong.cache=4", "pipeline=tis has no stage 'overlong'"),
    ],
)
def test_an_option_is_refused_if_a_recipe_of_the_sweep_lacks_it(words, message):
    with pytest.raises(ConfigError, match=message):
        hydra_arguments(["-m", *words.split()])


@pytest.mark.parametrize(
    ("words", "ready"),
    [
        ("pipeline=tis,mis seed=1", ["seed=1"]),
        (
            "pipeline=tis seed=1,2 pipeline.stages.correction.level=token",
            ["pipeline.stages.correction.level=token"],
        ),
        (
            "pipeline=tis,mis pipeline.stages.correction.level=token,sequence",
            ["pipeline.stages.correction.level=token,sequence"],
        ),
        (
            "pipeline=tis,mis pipeline.stages.correction.level=token",
            ["++pipeline.stages.correction.level=token"],
        ),
    ],
)
def test_a_fixed_option_of_swept_recipes_is_composed_with_a_plus(words, ready):
    assert hydra_arguments(["-m", *words.split()])[-1:] == ready

"""A task in Python has the numbers of the command, prints nothing, and leaves no files behind."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from command import headrace_here
from composed import configure
from dumps import write_lines
from omegaconf import OmegaConf
from tensordict import TensorDict

import headrace
from headrace.pipeline import ConfigError, TaskResult, load_pipeline, make_report, write_dump
from headrace.pipeline.tools.dumps.readers import SourceError
from headrace.pipeline.wording import for_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Two steps of four groups of four rollouts."""
    folder = tmp_path_factory.mktemp("dump")
    for step in range(2):
        columns = {
            "group_id": torch.arange(16) // 4,
            "rollout_id": torch.arange(16),
            "expected_rollouts": torch.full((16,), 4),
            ("next", "reward"): torch.arange(16.0) % (3 + step),
            ("masks", "all_assistant_mask"): torch.ones(16, 4, dtype=torch.bool),
        }
        batch = TensorDict(columns, batch_size=[16])
        run = load_pipeline("grpo").run(batch)
        write_dump(make_report(run, step=step, batch=batch), folder)
    return folder


def grade(prompts, responses):
    return [0.0] * len(responses)


OVERLONG = ["pipeline.stages.overlong.max_length=4", "pipeline.stages.overlong.cache=2"]


@pytest.mark.parametrize("output", [None, "out"])
@pytest.mark.parametrize(
    ("call", "words", "keywords", "source"),
    [
        (lambda **kept: headrace.replay("d", **kept), "replay pipeline=grpo", [], {}),
        (
            lambda **kept: headrace.replay("d", "rloo", "seed=3", group_size=4, **kept),
            "replay pipeline=rloo seed=3",
            ["pipeline.stages.gate.group_size=4"],
            {"group_by": "prompt"},
        ),
        (
            lambda **kept: headrace.audit(Path("d"), "pipeline=as/trl", "audit.strict=true", **kept),
            "audit pipeline=as/trl audit.strict=true",
            [],
            {"regrade": grade},
        ),
        (
            lambda **kept: headrace.plan(
                "d", "~pipeline.stages.filter", "seed=3", group_sizes=(2, 4), missing="skip", **kept
            ),
            "plan pipeline.stages.filter=null plan.group_sizes=[2, 4] seed=3",
            ["pipeline.stages.collapse.missing=skip"],
            {},
        ),
        (
            lambda **kept: headrace.compare("d", "dapo", "grpo", "seed=3", *OVERLONG, **kept),
            f"compare pipeline=grpo pipelines=[dapo,grpo] seed=3 {' '.join(OVERLONG)}",
            [],
            {"group_size": 8},
        ),
    ],
)
def test_a_function_runs_the_task_of_the_command_that_has_its_options(
    call, words, keywords, source, output, tmp_path, monkeypatch
):
    """A fake task looks at the configuration, the folder and the overrides. It gets those of the command."""
    task, *typed = re.split(r"(?<!,) ", words)
    expected = OmegaConf.to_container(
        configure("config", f"task={task}", *(each for each in typed if each not in OVERLONG), *keywords)
    )
    expected["source"] |= {**source, "path": "d"}

    def perform(config, folder, overrides, console):
        assert OmegaConf.to_container(config) == expected
        assert (folder.is_dir(), console.quiet, for_python(), overrides) == (True, True, "tasks", typed)
        (folder / "a").touch()
        return TaskResult(0.5, {"a": 1}, "8 rows")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headrace.pipeline.tools.tasks.perform", perform)
    (tmp_path / "out").mkdir()
    found = call(source=source or None, output=output)
    assert (float(found), found["a"], found.said, found.folder) == (0.5, 1, "8 rows", output and Path(output))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("a")] == ["out/a"] * (
        output is not None
    )
    with pytest.raises(FrozenInstanceError):
        found.number = 1.0


@pytest.mark.parametrize("function", [headrace.replay, headrace.audit, headrace.plan])
def test_the_signature_of_a_task_has_the_keywords_of_load_pipeline(function):
    def keywords(of):
        parameters = inspect.signature(of).parameters.values()
        return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}

    own = {"source", "output"} | ({"group_sizes"} if function is headrace.plan else set())
    assert keywords(function) == own | keywords(headrace.load_pipeline)


def test_a_replay_takes_the_options_of_load_pipeline_and_has_numbers_for_each_step(dump):
    options = {"max_length": 4, "cache": 2}
    found = headrace.replay(dump, "grpo", stages={"overlong": options}, before={"overlong": "advantage"})
    plain = headrace.replay(dump)
    assert [step["rows/in"] for step in found["steps"]] == [16, 16]
    changed = [step["overlong/mean"] for step in found["steps"]]
    assert changed == [-1.0, -1.0]  # all rows have 4 tokens, and the penalty grows from 2 to 4
    assert "overlong/mean" not in plain["steps"][0]
    assert plain["failed_steps"] == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda dump: headrace.replay(dump, source={"pth": 1, "other": 2}),
            ConfigError,
            r"no option 'pth' \(did you mean 'path'",
        ),
        (lambda dump: headrace.replay(dump, source={"skip_bad": 3}), ConfigError, "source.skip_bad must be"),
        (
            lambda dump: headrace.replay(dump, scales=3),
            ConfigError,
            r"no keyword 'scales' \(did you mean 'sc",
        ),
        (lambda dump: headrace.audit(dump, "grp"), ConfigError, "unknown recipe 'grp'"),
        (lambda dump: headrace.plan(dump, group_sizes=[0]), ConfigError, "plan.group_sizes must be"),
        (lambda dump: headrace.compare(dump, "grpo", "grpo"), ConfigError, "must name two different recipes"),
        (lambda dump: headrace.replay(dump / "no"), SourceError, "there is no such file or folder"),
    ],
)
def test_invalid_options_are_refused_with_the_errors_of_the_command(dump, call, error, message):
    with pytest.raises(error, match=message):
        call(dump)


def test_a_result_says_what_was_read_and_what_was_not_checked(dump, tmp_path):
    said = {
        "replay": repr(headrace.replay(dump, output=tmp_path)),
        "audit": repr(headrace.audit(dump)),
        "plan": repr(headrace.plan(dump)),
        "compare": repr(headrace.compare(dump, "grpo", "rloo")),
    }
    trained = r"TaskResult\(32: 32 rows train, of 32 rows in 2 steps; not checked, .*; files in .*\)"
    checked = r"32 rows in 2 steps; 8 checks: \d passed, \d not checked: \w+ \(.* no .*\)"
    assert re.fullmatch(trained, said["replay"])
    assert re.search(checked, said["audit"])
    assert "32 rows in 2 steps)" in said["plan"]
    assert "32 rows in 2 steps)" in said["compare"]
    assert not any("\n" in each for each in said.values())


def test_a_result_has_the_number_of_records_left_out(tmp_path):
    rows = [{"id": 0, "score": float(at), "text": "4"} for at in range(2)]
    path = write_lines(tmp_path / "own.jsonl", [*rows, {"id": 0, "text": "4"}])
    found = headrace.replay(path, source={"columns": COLUMNS, "group_size": 2, "skip_bad": True})
    assert "2 rows in 1 step, without 1 malformed records" in repr(found)


def opened(path):
    return headrace.open_dump(path, columns=COLUMNS)


OF_THE_COMMAND = re.compile(r"\bheadrace [a-z]|task=|hydra\.|\bnull\b|\bfalse\b|\btrue\b|in braces|a word")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda own: headrace.replay(own), "source={'columns': {'group': ID, 'reward': 'score', 'resp"),
        (
            lambda own: headrace.open_dump(own),
            "\ncolumns={'group': ID, 'reward': 'score', 'response': TEXT}, g",
        ),
        (lambda own: headrace.open_dump(own), "Set format to one of"),
        (lambda own: headrace.open_dump(own, columns={"group": "id"}), "such as columns={'group': 'problem"),
        (lambda own: headrace.replay(opened(own)), "replay takes the path of a dump, and the options of o"),
        (lambda own: headrace.compare(opened(own), "grpo", "rloo"), "compare takes the path of a dump"),
        (lambda own: headrace.plan(opened(own)), "in source={…}; got Source(table: /"),
        (lambda own: headrace.replay(own, source={"columns": COLUMNS}), "add source={'group_size': 4}"),
        (lambda own: headrace.replay(own, source={"group_size": None, "skip_bad": None}), "got None"),
        (
            lambda own: headrace.replay(own, source=OF_FIVE),
            "have the size 4. For this dump, set source.group_size=4",
        ),
        (lambda own: headrace.replay(own, columns=COLUMNS), "source={'columns': {'response': …}}"),
        (lambda own: headrace.replay(own, columns={"uid": "x"}), "pipeline.columns: unknown column 'uid'"),
        (lambda own: headrace.replay(own, "RLOO"), "(did you mean 'rloo'?); headrace.recipes() lists all"),
        (lambda own: load_pipeline("RLOO"), "(did you mean 'rloo'?); headrace.recipes() lists all"),
        (lambda own: headrace.compare(own, "dapo", 3), "second must be a string; got 3"),
        (
            lambda own: load_pipeline("grpo", "pipeline.patience=1,2"),
            "For a list: 'pipeline.patience=[1",
        ),
        (lambda own: load_pipeline(scale=None), "'none'; got None"),
        (lambda own: load_pipeline(shuffle=None), "pipeline.stages.split.shuffle must be True or False; got"),
        (
            lambda own: load_pipeline(group_size="x"),
            "pipeline.stages.gate.group_size must be an integer or N",
        ),
        (lambda own: load_pipeline(after="collapse"), "must be a mapping, as {'name': value} or None; got"),
        (lambda own: load_pipeline(stages={"advantage": {"clip": [None, None]}}), "may be None; got [None, "),
        (lambda own: _twice(own), "take another folder, output, or remove these files"),
    ],
)
def test_an_error_in_python_shows_the_syntax_of_python(tmp_path, call, said):
    lines = [{"id": at // 4, "score": float(at % 2), "text": str(at), "expected": None} for at in range(16)]
    with pytest.raises((ValueError, OSError)) as refused:
        call(write_lines(tmp_path / "own.jsonl", lines))
    assert said in str(refused.value)
    assert not OF_THE_COMMAND.search(str(refused.value))
    assert len(str(refused.value)) < 1000


COLUMNS = {"group": "id", "reward": "score", "response": "text"}
OF_FIVE = {"columns": COLUMNS, "group_size": 5}


def _twice(own):
    for _ in range(2):
        headrace.replay(own, source={**OF_FIVE, "group_size": 4}, output=own.parent / "out")


def test_an_error_of_the_command_shows_the_syntax_of_the_command(tmp_path):
    write_lines(tmp_path / "own.jsonl", [{"id": 0, "score": 1.0, "text": "4"}] * 2)
    columns = "'source.columns={group: id, reward: score, response: text}'"
    for words, said in {
        "task=replay source.path=own.jsonl": "\n'source.columns={group: ID, reward: score, response: TEXT}'",
        f"task=replay source.path=own.jsonl {columns}": "type:\nheadrace task=replay source.path=own.jsonl",
        "pipeline=RLOO": "headrace recipes lists all",
        "pipeline.stages.split.shuffle=null": "must be true or false; got null",
    }.items():
        assert said in headrace_here(tmp_path, *shlex.split(words), check=False).stderr

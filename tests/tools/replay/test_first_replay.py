"""The error of a first replay names the options with which the second command runs."""

from __future__ import annotations

import json
import os
import re
import shlex

import dumps
import pytest
from command import told
from composed import configure
from hydra.core.hydra_config import HydraConfig

from headrace.pipeline import ConfigError
from headrace.pipeline.tools.command.perform import check_types, perform
from headrace.pipeline.tools.dumps.readers import SourceError, open_dump
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_running_command(monkeypatch):
    """Forget the overrides of a command of another test, because errors would repeat them."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)


def lines(name, record):
    """Return a function that writes two groups of two, with the rewards 1 and 0, into a file of this name."""
    return lambda folder: dumps.write_lines(folder / name, [record(i // 2, i, 1.0 - i % 2) for i in range(4)])


def atropos(folder):
    dumps.write_lines(folder / "groups.jsonl", [dumps.atropos_group([1.0, 0.0])] * 2)


def slime(folder):
    folder.mkdir()
    dumps.slime_dump(folder / "5.pt", samples=[dumps.slime_sample(i // 2, i, 1.0 - i % 2) for i in range(4)])


def replayed(config, output, console=None):
    """Replay as the command does, with the types of all settings checked."""
    return perform(config, output, [], console)


def trl(folder, **more):
    columns = {"prompt": ["a", "a", "b", "b"], "completion": ["1"] * 4, "accuracy": [1.0, 0.0] * 2, **more}
    dumps.trl_dump(folder / "completions_4.parquet", step=[4] * 4, advantage=[0.5, -0.5] * 2, **columns)


FOLDERS = {  # the function that writes a folder, and the options that its error must name
    "atropos": (atropos, ["source.group_size=2"]),
    "nemo_gym": (
        lines("a_rollouts.jsonl", lambda group, i, reward: dumps.gym_row(group, i % 2, reward)),
        ["source.group_size=2"],
    ),
    "prime_hosted": (
        lines("samples.jsonl", lambda group, i, reward: dumps.hosted_row(group, i, reward)),
        ["source.group_size=2"],
    ),
    "slime": (slime, ["source.group_size=2"]),
    "trl": (trl, ["source.group_by=prompt", "source.group_size=2"]),
    "trl with two rewards": (
        lambda folder: trl(folder, short=[0.5, 0.5, 0.25, 1.0]),
        ["source.group_by=prompt", "source.group_size=2", "pipeline.stages.collapse.columns=2"],
    ),
    "verl": (
        lines("7.jsonl", lambda group, i, reward: dumps.verl_row(None, reward, prompt=f"{group}?")),
        ["source.group_by=prompt", "source.group_size=2"],
    ),
    "verl with ids": (
        lines("7.jsonl", lambda group, i, reward: dumps.verl_row(f"{group}_{i}_0", reward)),
        ["source.group_size=2"],
    ),
    "verifiers": (
        lines("results.jsonl", lambda group, i, reward: dumps.verifiers_row(group, reward, timing=i)),
        ["source.group_size=2"],
    ),
    "prime_rl": (
        lines(
            "traces.jsonl",
            lambda group, i, reward: dumps.episode(
                f"{group}", f"{i}", {"a": {"score": reward, "weight": 1.0}}
            ),
        ),
        ["source.group_size=2"],
    ),
    "nemo_rl": (
        lines("train_data_step3.jsonl", lambda group, i, reward: dumps.nemo_row(i, reward, prompt=group + 1)),
        ["source.group_by=prompt", "source.group_size=2"],
    ),
    "open_instruct": (
        lines("a_rollouts_0.jsonl", lambda group, i, reward: dumps.open_instruct_row(i, group, reward)),
        ["source.group_size=2"],
    ),
    "tinker": (
        lines(
            "train_rollout_summaries.jsonl", lambda group, i, reward: dumps.tinker_row(group, i % 2, reward)
        ),
        ["source.group_size=2"],
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_one_message_names_all_missing_options_as_a_command_that_runs(name, tmp_path):
    write, options = FOLDERS[name]
    write(tmp_path / "a dump")
    with pytest.raises(ConfigError, match=f"a dump of {name.split()[0]}: ") as raised:
        replayed(configure("config", "task=replay", f"source.path={tmp_path / 'a dump'}"), tmp_path / "out")
    assert not (tmp_path / "out" / "rollouts").exists()  # so that the next command can write there
    first, *words = shlex.split(str(raised.value).splitlines()[-1])
    assert (first, words[2:]) == ("headrace", options)
    trained, _ = told(replayed, configure("config", *words), tmp_path / "out")
    assert trained == 4


def test_the_proposed_group_size_is_the_most_frequent_one_of_the_first_step(tmp_path):
    """The first step has groups of 2, 3 and 2 rollouts. A later step has groups of 4."""
    uids = [f"{group}_{at}_0" for group, size in (("a", 2), ("b", 3), ("c", 2)) for at in range(size)]
    rows = [dumps.verl_row(uid, 1.0, 7) for uid in uids]
    rows += [dumps.verl_row(f"{group}_{at}_0", 1.0, 8) for group in "abcd" for at in range(4)]
    path = dumps.write_lines(tmp_path / "7.jsonl", rows)
    assert open_dump(path).lacking() == {"group_size": 2}


def test_a_replay_replaces_the_rows_of_a_replay_in_which_every_step_failed(tmp_path):
    """The rows of a replay without failed steps are not replaced."""
    rows = [dumps.slime_sample(0, i, 1.0 - i % 2) for i in range(3)]
    for step in (4, 5, 6):
        (tmp_path / "dump").mkdir(exist_ok=True)
        dumps.slime_dump(tmp_path / "dump" / f"{step}.pt", step, samples=rows)
    words = ["task=replay", f"source.path={tmp_path / 'dump'}"]
    with pytest.raises(BatchError, match="group 0 has 3 of 4"):
        told(replayed, configure("config", *words, "source.group_size=4"), tmp_path / "out")
    assert len(list((tmp_path / "out" / "rollouts").glob("step_*"))) == 3
    for step in (4, 6):
        (tmp_path / "dump" / f"{step}.pt").unlink()
    trained, _ = told(replayed, configure("config", *words, "source.group_size=3"), tmp_path / "out")
    assert trained == 3
    assert [each.name for each in (tmp_path / "out" / "rollouts").glob("step_*")] == ["step_00000005.parquet"]
    assert json.loads((tmp_path / "out" / "rollouts" / "failed_steps.json").read_text()) == []
    with pytest.raises(FileExistsError, match="has the rows of another run, 1 file "):
        told(replayed, configure("config", *words, "source.group_size=3"), tmp_path / "out")


def test_the_folder_of_a_run_is_replayed_even_if_it_has_another_dump(tmp_path):
    slime(tmp_path / "dump")
    words = ("task=replay", "source.group_size=2")
    told(replayed, configure("config", *words, f"source.path={tmp_path / 'dump'}"), tmp_path / "run")
    dumps.write_lines(tmp_path / "run" / "7.jsonl", [dumps.verl_row("a_0_0", 1.0)])
    trained, _ = told(
        replayed, configure("config", "task=replay", f"source.path={tmp_path / 'run'}"), tmp_path / "again"
    )
    assert trained == 4


@pytest.mark.parametrize("task", ["replay", "audit", "plan", "compare"])
def test_names_of_columns_are_settings_of_every_task_that_reads_dumps(task):
    words = (f"task={task}", "source.path=a.jsonl", "source.format=table")
    columns = "source.columns={group: id, reward: metrics.score, response: [a, b]}"
    check_types(configure("config", *words, columns))
    with pytest.raises(ConfigError, match=r"source\.columns must be names and values .*got \['a'\]"):
        check_types(configure("config", *words, "source.columns=[a]"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.pt"])
def test_the_error_of_a_git_lfs_pointer_says_what_the_file_is(name, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for text in (pointer, pointer.ljust(1024)):  # a pointer has at most 1,024 bytes
        (tmp_path / name).write_text(text)
        with pytest.raises(SourceError, match=rf"{name}: .*a pointer of Git LFS.*1 of 1 files"):
            open_dump(tmp_path / name)


def test_the_error_of_an_unknown_format_names_the_nearest_one_and_its_missing_keys(tmp_path):
    row, nearest = {"input": "a", "output": "b", "reward": 1}, "The nearest format is verl, which has the "
    for more, lacks in (({}, "keys 'score', 'step', too"), ({"step": 1}, "key 'score', too")):
        path = dumps.write_lines(tmp_path / f"{len(more)}.jsonl", [row | more])
        with pytest.raises(SourceError, match=f"'input', 'output', 'reward'.* {nearest}{lacks}"):
            open_dump(path)


@pytest.mark.parametrize(
    ("row", "left"),
    [
        (
            {"case": 0, "metrics": {"score": 0}, "said": "4"},
            {"ID": "case", "NUMBER": "metrics.score", "TEXT": "said"},
        ),
        ({"question": 0, "score": 0, "said": "4"}, {"TEXT": "said"}),
        ({"completion": "4", "uid": 0, "prompt": "2+2?", "reward": 0}, {}),
    ],
)
def test_the_error_of_an_unknown_format_ends_with_the_options_of_the_format_table(row, left, tmp_path):
    """Columns with usual names are filled in. With the other names and the group size, the command runs."""
    group, reward, *_ = (key for key, value in row.items() if not isinstance(value, str))
    rewards = [{"score": 1 - i % 2} if reward == "metrics" else 1 - i % 2 for i in range(4)]
    rows = [row | {group: i // 2, reward: rewards[i]} for i in range(4)]
    dumps.write_lines(tmp_path / "mine" / "a.jsonl", rows)
    words = ["task=replay", f"source.path={tmp_path / 'mine'}"]
    with pytest.raises(SourceError) as raised:
        replayed(configure("config", *words), tmp_path / "out")
    line = str(raised.value).splitlines()[-1]
    assert re.findall(r"[A-Z]{2,}", line) == [*left, "ROLLOUTS"]
    for placeholder, name in (left | {"ROLLOUTS": "2"}).items():
        line = line.replace(placeholder, name)
    trained, _ = told(replayed, configure("config", *words, *shlex.split(line)), tmp_path / "out")
    assert trained == 4
    with pytest.raises(SourceError, match=", ".join(sorted(map(repr, row)))) as raised:
        open_dump(tmp_path / "mine")
    assert len(re.findall(r"[A-Z]{2,}", str(raised.value).splitlines()[-1])) == 1 + len(left)


def test_the_newest_run_of_a_folder_of_runs_is_named(tmp_path):
    slime(tmp_path / "dump")
    words = ("task=replay", "source.group_size=2", f"source.path={tmp_path / 'dump'}")
    for at, name in enumerate(("b", "a")):
        told(replayed, configure("config", *words), tmp_path / "outputs" / name)
        os.utime(tmp_path / "outputs" / name / "rollouts", (at, at))
    with pytest.raises(SourceError, match=rf"outputs is no run.* newest is {tmp_path}/outputs/a$"):
        open_dump(tmp_path / "outputs")

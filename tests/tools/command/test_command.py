"""The command, as a user runs it in a folder."""

from __future__ import annotations

import csv
import os
import signal
import time
from contextlib import redirect_stdout

import pytest
import torch
from command import QUICK, Started, headrace, headrace_here, run_here
from composed import configure
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from headrace.pipeline import ConfigError
from headrace.pipeline.main import main
from headrace.pipeline.tools.command.job import check_settings, choose_device
from headrace.pipeline.tools.command.process import fail, paragraph_of, remove_unused
from headrace.pipeline.wording import printable

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, headrace(folder, *QUICK, "hydra.run.dir=out", "pipeline=dr_grpo", "seed=1")


def test_a_training_prints_the_order_of_stages_and_the_closing_table(finished):
    _, done = finished
    assert "4. advantage: GroupRelativeAdvantage(scale='none')" in done.stdout
    assert "1. gate:      CompletenessGate(expected_groups=RepeatSampler(prompts=1110" in done.stdout
    assert "where the rows of 2 steps went" in done.stdout
    assert "collected" in done.stdout
    assert "trained" in done.stdout
    *lines, folder, page = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert folder.startswith("written to ")
    assert page.startswith("the page: file:///")
    assert done.stderr == ""


def test_a_training_writes_the_resolved_config_and_the_numbers_of_every_step(finished):
    folder, _ = finished
    config = OmegaConf.load(folder / "out" / "config.yaml")
    assert config.pipeline.stages.split.seed == config.sampler.seed == 1
    with (folder / "out" / "metrics.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert [float(step["step"]) for step in steps] == [0, 1]
    for step in steps:
        assert float(step["rows/in"]) == 40  # 4 groups of 8 rollouts; 2 of each group have two segments
        assert float(step["rollouts/in"]) == 32
        left = sum(float(value) for key, value in step.items() if key.startswith("out/"))
        assert float(step["rows/trained"]) + left == 40


def test_the_same_seed_gives_the_same_run_in_any_process(finished, tmp_path):
    folder, _ = finished
    headrace_here(tmp_path, *QUICK, "hydra.run.dir=out", "pipeline=dr_grpo", "seed=1")
    again, before = (without_times(place / "out" / "metrics.csv") for place in (tmp_path, folder))
    assert again == before


def without_times(path):
    with path.open() as file:
        timed = ("time/", "seconds/", "optimiser/tokens_per_second")
        return [{k: v for k, v in step.items() if not k.startswith(timed)} for step in csv.DictReader(file)]


@pytest.mark.torchrl
def test_the_gate_learns_its_groups_only_from_an_environment_of_whole_draws(tmp_path, monkeypatch):
    """Without ``whole_draws``, rows of a group may come in later batches. Groups that the user gives stay."""
    words = [*QUICK, "train.steps=1", "report.html=false", "report.dump=null"]
    given = headrace_here(tmp_path, *words, "pipeline.stages.gate.expected_groups=[0,1,2,3]").stdout
    assert "expected_groups=[0, 1, 2, 3]" in given
    monkeypatch.delattr("headrace.pipeline.reverse.ReverseEnv.whole_draws")
    shown = headrace_here(tmp_path, *words).stdout
    assert "gate:      CompletenessGate(" in shown
    assert "expected_groups" not in shown


def test_cfg_job_prints_the_configuration(tmp_path):
    shown = OmegaConf.create(headrace_here(tmp_path, "--cfg", "job", "pipeline=dr_grpo").stdout)
    assert shown.pipeline.stages.advantage.scale == "none"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["pipeline=gprpo", "env.failing=1"])
def test_a_process_prints_the_error_as_one_paragraph(tmp_path, word):
    """Hydra raises the first error before the task begins, and a stage raises the second within the task."""
    done = headrace(tmp_path, *QUICK, word, "pipeline.stages.gate.on_incomplete=raise", check=False)
    here = headrace_here(tmp_path, *QUICK, word, "pipeline.stages.gate.on_incomplete=raise", check=False)
    assert done.returncode == here.returncode == 2
    assert done.stderr == here.stderr
    assert done.stderr.startswith("headrace: ")


def test_a_command_that_fails_removes_its_own_folder_and_no_other(tmp_path):
    for words in (
        ["pipeline.stages.advantage.eps=-1"],
        ["task=replay", "source.path=nothing"],
        ["task=replay"],
        ["train.steps=0", "hydra.run.dir=mine/out"],
    ):
        assert headrace_here(tmp_path, *words, check=False).returncode == 2
        assert not [path for path in tmp_path.rglob("*") if path.is_file()], words
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]  # a folder of the user
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.csv").write_text("step\n0\n")
    headrace_here(tmp_path, "train.steps=0", "hydra.run.dir=run", check=False)
    assert (run / "metrics.csv").read_text() == "step\n0\n"


def test_rewards_do_not_depend_on_the_form_of_the_micro_batches(tmp_path):
    """The gradient is the same if rows are packed, cut by tokens, or in a loss without loss weights."""
    packed = "train.transform={_target_: headrace.transforms.pack, _partial_: true}"
    folded = ["pipeline.stages.weight.fold=token_mean", "loss.aggregation=token_mean"]
    by_tokens = "pipeline.stages.split.max_tokens=50"
    ways = {"whole": [], "packed": [packed, by_tokens], "folded": folded}
    ways["trees"] = ["train.transform=tree", "pipeline.stages.split.tree=group", by_tokens]
    rewards, alone = {}, ["report.html=false", "report.dump=null"]
    for name, words in ways.items():
        headrace_here(tmp_path, *QUICK, f"hydra.run.dir={name}", *alone, *words)
        with (tmp_path / name / "metrics.csv").open() as file:
            rewards[name] = [float(step["reward/all/mean"]) for step in csv.DictReader(file)]
    assert len(rewards["whole"]) == 2
    assert all(each == rewards["whole"] for each in rewards.values())


@pytest.mark.torchrl
def test_ctrl_c_prints_the_closing_table(tmp_path):
    run = Started(main, tmp_path, *QUICK, "train.steps=100000", "hydra.run.dir=out")
    metrics = tmp_path / "out" / "metrics.csv"
    for _ in range(600):
        if metrics.exists() and metrics.read_text().count("\n") > 2:
            break
        assert run.process.is_alive(), run.ends()
        time.sleep(0.1)
    os.kill(run.process.pid, signal.SIGINT)
    done = run.ends(60)
    assert done.returncode == 130
    assert "interrupted after step" in done.stdout
    assert "collected" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_default_experiment_learns(tmp_path):
    """The reward rises from below 0.15 to above 0.25 in 8 steps, with every stage, fan-out and failures."""
    done = headrace_here(tmp_path, "hydra.run.dir=out", "train.steps=8", "optimizer.lr=0.003")
    with (tmp_path / "out" / "metrics.csv").open() as file:
        steps = list(csv.DictReader(file))
    rewards = [float(step["reward/all/mean"]) for step in steps]
    assert max(rewards[:3]) < 0.15
    assert min(rewards[-3:]) > 0.25
    for reason in ("gate: incomplete", "filter: zero variance"):
        assert reason in done.stdout
    assert all(float(step["rows/in"]) > float(step["rollouts/in"]) for step in steps)


ELSEWHERE = "hydra.run.dir=FOLDER (with -m hydra.sweep.dir=FOLDER) sets the output folder"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileExistsError(17, "File exists", "out"),
            f"out: this is a file, and a folder is required. {ELSEWHERE}",
        ),
        (FileExistsError("out has steps of another run"), "out has steps of another run"),
        (OSError(28, "No space left on device", "m.csv"), f"m.csv: no space left on device. {ELSEWHERE}"),
        (OSError(28, "No space left on device"), f"no space left on device. {ELSEWHERE}"),
        (OSError("Of a reader"), f"of a reader. {ELSEWHERE}"),
        (
            ValueError("Config group override with 3"),
            "pipeline=3, rows=1.5 must be the name of a file, as in pipeline=grpo",
        ),
        (ValueError("As it is"), "As it is"),
        (ConfigCompositionException("Could not find 'pipeline/x'"), "unknown recipe 'x'; headrace recipes"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_error_is_said_with_the_option_that_mends_it(error, said, monkeypatch):
    monkeypatch.setattr("sys.argv", ["a=1", "--cfg", "pipeline=3", "rows=1.5", "device=cpu"])
    assert paragraph_of(error).startswith(said)
    assert said.startswith("unknown recipe") or paragraph_of(error) == said


DAY, OWN = "outputs/day", ["outputs", "outputs/day", "outputs/day/time"]
HYDRAS = ".hydra/config.yaml"


@pytest.mark.parametrize(
    ("files", "words", "left"),
    [
        ({}, [], []),
        ({HYDRAS: "a", "headrace.log": ""}, [], []),
        ({HYDRAS: "a"}, ["seed=1", "hydra.run.dir=outputs/day/time"], OWN[:2]),
        ({HYDRAS: "a", "../9-00/log": "a"}, [], [*OWN[:2], f"{DAY}/9-00", f"{DAY}/9-00/log"]),
        ({"headrace.log": "a line"}, [], [*OWN, f"{DAY}/time/headrace.log"]),
        ({"headrace.log": "", "page": ""}, [], [*OWN, f"{DAY}/time/headrace.log", f"{DAY}/time/page"]),
    ],
)  # fmt: skip
def test_an_output_folder_is_removed_only_if_the_command_wrote_nothing(
    files, words, left, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["headrace", *words])
    output = tmp_path / "outputs" / "day" / "time"
    for name, text in files.items():
        output.mkdir(parents=True, exist_ok=True)
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(text)
    remove_unused(output)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == left


@pytest.mark.parametrize(
    ("error", "expected", "said", "status"),
    [
        (ValueError("as\x1bit is\n:100:"), True, "as\\x1bit is\n:100:", 2),
        (KeyError("x"), False, "KeyError('x')", 1),
        (RuntimeError("plain"), False, "plain", 1),
    ],
)
def test_an_error_ends_the_command_with_its_text_and_its_status(
    error, expected, said, status, monkeypatch, capsys
):
    """In a sweep the next job begins. With the traceback, the error itself is raised."""
    if not expected:
        said += (
            "\nThis error was not expected; HYDRA_FULL_ERROR=1 before the command shows where it comes from."
        )
    monkeypatch.setenv("HEADRACE_TRACE", "0")
    with pytest.raises(SystemExit) as ended:
        fail(error, expected=expected)
    assert (ended.value.code, *capsys.readouterr()) == (status, "", f"headrace: {said}\n")
    assert printable(fail(error, expected=expected, go_on=True), keep="\n") == said
    assert capsys.readouterr().err == f"headrace: {said}\n"
    monkeypatch.setenv("HEADRACE_TRACE", "1")
    with pytest.raises(type(error)) as raised:
        fail(error, expected=expected, go_on=True)
    assert raised.value is error


@pytest.mark.parametrize(
    ("ends", "status"),
    [(0, 0), (1, 1), (KeyboardInterrupt(), 130), (ValueError(), 2), (KeyError(), 1)],
    ids=repr,
)
def test_the_status_of_the_command_says_how_it_ended(ends, status, monkeypatch, tmp_path):
    def answers(_):
        if isinstance(ends, BaseException):
            raise ends
        return ends

    monkeypatch.setattr("headrace.pipeline.tools.command.process.answer", answers)
    assert headrace_here(tmp_path, check=False).returncode == status


@pytest.mark.parametrize("words", [["--version"], ["--cfg", "job"]])
def test_the_command_ends_quietly_if_the_reader_of_its_output_closes_the_pipe(words, tmp_path):
    """The status is that of SIGPIPE. What the command prints later is dropped, without an error."""
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does in `headrace recipes | head`
    with open(writer, "w") as pipe, redirect_stdout(pipe):
        done = run_here(lambda: print_into(pipe), tmp_path, "headrace", *words)
        print("later")
    assert (done.returncode, done.stderr) == (128 + 13, "")


def print_into(file):
    with redirect_stdout(file):  # run_here() has redirected it, too
        main()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.steps=0", "train.steps must be an integer ≥ 1; got 0"),
        ("train.epochs=0", "train.epochs must be an integer ≥ 1; got 0"),
        ("threads=0", "threads must be an integer ≥ 1; got 0"),
        ("train.max_grad_norm=0", "train.max_grad_norm must be > 0 or null; got 0"),
        ("train.max_grad_norm=-1.5", "train.max_grad_norm must be > 0 or null; got -1.5"),
        *((word, None) for word in ("train.steps=1", "train.epochs=1", "threads=1", "threads=null")),
        *((word, None) for word in ("train.max_grad_norm=0.5", "train.max_grad_norm=null")),
    ],
)
def test_counts_of_a_training_are_at_least_1(word, said):
    config = configure("config", word)
    if said is None:
        check_settings(config)
        return
    with pytest.raises(ConfigError, match=f"^{said}$"):
        check_settings(config)


def test_a_training_runs_on_a_device_of_the_machine(monkeypatch):
    assert choose_device("cpu") == torch.device("cpu")
    for there, listed in (((), "auto, cpu"), (("cuda", "mps"), "auto, cpu, cuda, mps")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: "cuda" in there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: "mps" in there)
        with pytest.raises(ConfigError, match=f"^device=none is not available; choose from {listed}$"):
            choose_device("none")
    made = []
    monkeypatch.setattr(torch, "empty", lambda *_, device: made.append(device) or torch.zeros(0))
    choose_device("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choose_device("auto")
    assert made == ["cuda", "cpu"]

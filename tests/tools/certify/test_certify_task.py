"""``task=certify`` prints a table, writes the numbers, and names the tasks that a recipe refuses."""

from __future__ import annotations

import io
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from command import headrace_here, told
from composed import configure
from omegaconf import OmegaConf
from rich.console import Console

from headrace.pipeline import ConfigError
from headrace.pipeline.tools.certify import (
    Certificate,
    FanOut,
    Forks,
    OneTurn,
    SeveralRewards,
    StopOrContinue,
    Trajectory,
    certify,
)
from headrace.pipeline.tools.certify.certificate import Judgement, Refused, count_outcomes
from headrace.pipeline.tools.certify.certify_task import number, on_page, show_certificates
from headrace.transforms import BatchTransform

pytestmark = pytest.mark.slow

ONLY = "certify.only=[stop_or_continue]"
MINE = """
from headrace.pipeline.tools.certify import Trajectory, Prompt, SmallTask

class Coin(SmallTask):
    def __init__(self):
        super().__init__(theta=[0.5])

    def prompts(self):
        return [Prompt(1.0, (Trajectory((((0, 0),),), (0.0,)), Trajectory((((0, 1),),), (1.0,))))]
"""


def certified(folder: Path, *words: str) -> tuple[float, str, list[dict]]:
    """Run the command. Return its number, its text and the certificates of its file."""
    value, text = told(certify, configure("config", "task=certify", *words), folder, words)
    written = (folder / "certificate.json").read_text()
    found = json.loads(written)
    assert written.strip() == json.dumps(found, indent=1)
    return value, text, found["certificates"]


def test_the_command_prints_a_table_and_writes_the_numbers(tmp_path):
    value, text, (first, second) = certified(tmp_path, ONLY, "pipelines=[rloo,dr_grpo]")
    assert value == pytest.approx(0.25)
    assert "stop_or_continue, groups of 4, 256 outcomes" in text
    assert "0.7500 0.7500 0.7500" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "certificate.json",
        "config.yaml",
        "report.html",
    ]
    assert list(first) == ["recipe", "task", "group_size", "outcomes", "advantage", "loss"]
    assert list(first["advantage"]) == ["ratio", "relative_bias", "cosine", "variance"]
    assert list(first["loss"]) == ["ratio", "relative_bias", "cosine", "variance", "scale"]
    assert (first["recipe"], second["recipe"], first["group_size"]) == ("rloo", "dr_grpo", 4)
    assert first["advantage"]["ratio"] == pytest.approx([1, 1, 1], abs=1e-12)


def test_overrides_apply_to_the_certified_recipe(tmp_path):
    words = ["pipeline=rloo", "pipeline.stages.advantage.baseline=mean", "certify.group_sizes=[2,3]", ONLY]
    _, text, found = certified(tmp_path, *words)
    assert [(each["recipe"], each["group_size"], each["outcomes"]) for each in found] == [
        ("rloo", 2, 16),
        ("rloo", 3, 64),
    ]
    assert found[0]["advantage"]["ratio"] == pytest.approx([0.5] * 3)
    assert "groups of 2, 16 outcomes" in text


def test_a_recipe_that_refuses_a_task_is_named_with_the_reason(tmp_path):
    _, text, found = certified(tmp_path, "pipelines=[gigpo,rloo]", "certify.only=[stop_or_continue,fan_out]")
    assert [each["recipe"] for each in found] == ["rloo", "rloo"]
    assert "gigpo refuses the rows of stop_or_continue, fan_out: stage 'states'" in text
    assert "the batch has" not in text  # the page has the whole reason
    page = (tmp_path / "report.html").read_text()
    assert '"recipe":"rloo","task":"stop_or_continue","group_size":4' in page
    assert "stage 'states', StateAdvantage(weight=1.0) needs the key 'state_id'" in page
    with pytest.raises(ConfigError, match=r"each recipe refuses the rows of each task: .*'state_id'"):
        certified(tmp_path, "pipeline=gigpo", ONLY)


def test_a_user_task_is_certified(tmp_path, monkeypatch):
    (tmp_path / "coins.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    _, _, found = certified(tmp_path, "+certify.tasks.coin={_target_: coins.Coin}", "certify.only=[coin]")
    assert (found[0]["task"], found[0]["outcomes"]) == ("coin", 16)


def test_a_user_recipe_is_certified_among_others(tmp_path):
    (tmp_path / "mine" / "pipeline").mkdir(parents=True)
    text = "defaults: [rloo]\nstages: {advantage: {baseline: mean}}\n"
    (tmp_path / "mine" / "pipeline" / "own.yaml").write_text(text)
    words = [f"hydra.searchpath=[file://{tmp_path}/mine]", "pipelines=[own,rloo]", ONLY]
    headrace_here(tmp_path, "task=certify", *words, f"hydra.run.dir={tmp_path}/out")
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())["certificates"]
    ratios = {each["recipe"]: each["advantage"]["ratio"][0] for each in found}
    assert ratios == pytest.approx({"own": 0.75, "rloo": 1.0})


def test_an_unavailable_group_size_is_reported_for_its_task_only(tmp_path):
    words = ["certify.group_sizes=[3]", "certify.only=[forks,fan_out]", "pipeline=rloo"]
    _, text, found = certified(tmp_path, *words)
    assert [each["task"] for each in found] == ["fan_out"]
    assert "rloo refuses the rows of forks: Forks samples 2 rollouts at a time" in text


def test_each_task_and_group_size_has_a_table_whose_columns_leave_in_a_narrow_window():
    exact = Judgement((1.0, 0.5), 0.125, 0.99, 0.0733333, 0.75)
    nothing = Judgement((None, -0.00001), None, None, 0.0, None)
    found = [
        Certificate("a", "one", 4, 1256, exact, nothing),
        Certificate("b", "one", 4, 1256, nothing, None),
        Certificate("a", "one", 2, 16, exact, exact),
    ]
    text = io.StringIO()
    show_certificates(found, Console(file=text, width=80))
    titles = """
        ratio to the                            loss:   loss:
recipe  true gradient   bias  cosine  variance  scale  cosine
─────────────────────────────────────────────────────────────
"""
    assert text.getvalue() == (
        f"\none, groups of 4, 1,256 outcomes{titles}"
        "a       1.0000 0.5000  12.5%  0.9900   0.07333      –       –\n"
        "b       – 0.0000           –       –         0      –       –\n"
        f"\none, groups of 2, 16 outcomes{titles}"
        "a       1.0000 0.5000  12.5%  0.9900   0.07333   0.75  0.9900\n"
    )
    for width, left in ((55, "bias cosine scale cosine"), (42, "bias cosine cosine"), (36, "bias cosine")):
        text = io.StringIO()
        show_certificates(found[:1], Console(file=text, width=width))
        (line,) = [line for line in text.getvalue().splitlines() if line.startswith("recipe")]
        assert line[line.index("bias") :].split() == left.split()


def test_the_page_has_the_numbers_of_a_certificate_or_the_reason_why_there_is_none():
    names = ("ratio", "relative_bias", "cosine", "variance", "scale")
    numbers = dict(zip(names, ((1.0, 0.5), 0.125, 0.99, 0.07, 0.75), strict=True))
    more = dict(zip(names, ((None,), None, None, 0.0, None), strict=True))
    nothing = dict(zip(names, ((), None, None, None, None), strict=True))
    head = {"recipe": "a", "task": "one", "group_size": 4}
    with_loss = Certificate("a", "one", 4, 16, Judgement(**numbers), Judgement(**more))
    said = {"outcomes": 16, "refused": ""}
    assert on_page(with_loss) == head | said | {"advantage": numbers, "loss": more}
    bare = replace(with_loss, loss=None)
    assert on_page(bare) == head | said | {"advantage": numbers, "loss": nothing}
    refused = {"outcomes": 0, "refused": "no rows", "advantage": nothing, "loss": nothing}
    assert on_page(Refused("a", "one", 4, "no rows")) == head | refused


def test_tasks_that_a_recipe_refuses_for_one_reason_are_on_one_line():
    """A reason ends where the values of the task begin."""
    text = io.StringIO()
    reasons = {
        "a": "rewards must be ≥ 0; found -1",
        "b": "rewards must be ≥ 0; found -2",
        "c": "needs a key; the batch has d",
    }
    found = [Refused("rloo", task, 4, reason) for task, reason in reasons.items()]
    show_certificates(found, Console(file=text, width=30))  # no sentence is wrapped
    assert text.getvalue().splitlines() == [
        "rloo refuses the rows of a, b: rewards must be ≥ 0",
        "rloo refuses the rows of c: needs a key",
    ]


def test_certificates_cannot_be_changed():
    for kind in (Certificate, Judgement, Refused, Trajectory):
        with pytest.raises(FrozenInstanceError):
            object.__new__(kind).name = "another"


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (FanOut, "fan_out"),
        (Forks, "forks"),
        (SeveralRewards, "several_rewards"),
        (StopOrContinue, "stop_or_continue"),
    ],
)
def test_a_task_of_python_has_the_defaults_of_the_task_of_the_command(kind, task):
    given = configure("config", "task=certify").certify.tasks[task]
    for name, value in vars(kind()).items():
        if value is not None and given.get(name) is not None:
            assert OmegaConf.create([value]) == [given[name]], name


class Unknown(BatchTransform):
    """A stage whose advantage is NaN."""

    def __init__(self):
        super().__init__([], ["advantage"])

    def apply(self, batch):
        return batch.set("advantage", torch.full((len(batch), 1, 1), float("nan")))


def test_a_nan_advantage_gets_no_certificate(tmp_path):
    words = ["+pipeline.stages.advantage={_target_: test_certify_task.Unknown}", "pipeline=mt_grpo"]
    words += ["pipeline.stages.turns=null", "pipeline.order=[gate,collapse,advantage,split,weight]", ONLY]
    with pytest.raises(ConfigError, match="every token in the loss must be finite; found NaN"):
        certified(tmp_path, *words)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OneTurn(theta=[0.0], fails=[0.5, 1.0]), r"got \(1, 1\), \[0\.5, 1\.0\] and 0\.0"),
        (lambda: OneTurn(theta=[0.0], fails=[-0.5, 0.5]), r"fails and dies in \[0, 1\)"),
        (lambda: OneTurn(theta=[0.0], dies=1.0), r"and 1\.0$"),
        (lambda: OneTurn(theta=[0.0], lengths=[0, 1]), "lengths must be ≥ 1"),
        (lambda: OneTurn(theta=[0.0], rewards=[1.0]), r"rewards must have 2 entries; got \[1\.0\]"),
        (lambda: OneTurn(theta=[0.0, 0.0], shares=[1.0]), "shares must have 2 entries"),
        (
            lambda: OneTurn(theta=[0.0, 0.0], shares=[0.5, 0.4]),
            r"shares must have the sum 1; got \[0\.5, 0\.4\]",
        ),
        (lambda: StopOrContinue(ends=[0.0]), "ends must have 4 entries"),
        (lambda: StopOrContinue(teacher=[0.0]), "teacher must have 3 entries"),
        (lambda: FanOut(theta=[0.0]), "theta must have 2 entries"),
        (lambda: Forks(rewards=[1.0]), "rewards must have 4 entries"),
        (lambda: SeveralRewards(rewards=[[0.0, 1.0]]), "rewards must have 3 entries"),
        (lambda: OneTurn(theta=[0.0] * 2, shares=[1.5, -0.5]).outcomes(2), "≥ 0 with the sum 1; found 1$"),
    ],
)
def test_options_of_a_task_that_cannot_be_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_terminal_shows_a_bar_that_is_erased_at_the_end(tmp_path):
    text, looks = io.StringIO(), {"force_terminal": True, "color_system": None, "_environ": {"TERM": "xterm"}}
    words = [ONLY, "certify.group_sizes=2", "pipeline=rloo", "report.html=false"]
    certify(
        configure("config", "task=certify", *words), tmp_path, words, Console(file=text, width=80, **looks)
    )
    assert "certifying" in text.getvalue()
    shown = text.getvalue().rpartition("certifying")[2]
    assert shown.index("\x1b[2K") < shown.index("stop_or_continue, groups of 2")  # it erases the line


def test_certify_most_is_the_greatest_number_of_outcomes(tmp_path):
    task = StopOrContinue()  # four trajectories, so 4ⁿ outcomes of n rollouts
    assert (count_outcomes(task, "mine", 4, 256), task.outcomes(1)) == (256, 4)
    assert OneTurn(theta=[0.0] * 2, shares=[1.0, 0.0]).outcomes(2) == 8  # a prompt may have the probability 0
    for size, most, said in (
        (4, 255, "a group of 4 of task 'mine' has 256 outcomes, and certify.most is 255"),
        (24, 255, "has 281,474,976,710,656 outcomes"),
        (25, 10**6, r"has more than 10\^15 outcomes, and certify.most is 1,000,000"),
    ):
        with pytest.raises(ConfigError, match=said):
            count_outcomes(task, "mine", size, most)
    with pytest.raises(ConfigError, match=r"certify\.most must be an integer ≥ 1; got 0"):
        certified(tmp_path, ONLY, "certify.most=0")


def test_a_number_without_a_value_is_a_dash_and_no_zero_is_negative(tmp_path):
    assert [number(value) for value in (None, -0.00001, 0.12345)] == ["–", "0.0000", "0.1235"]
    ends = "certify.tasks.stop_or_continue.ends=[0.5,0.0,-0.5,-1.0]"  # the return is always 1/2
    value, text, _ = certified(tmp_path, ONLY, ends, "certify.group_sizes=2", "pipeline=rloo")
    assert value == 0
    assert "– – –" in text


def test_probabilities_that_do_not_sum_to_1_are_refused():
    class Half(OneTurn):
        def prompts(self):
            return [prompt._replace(trajectories=prompt.trajectories[:1]) for prompt in super().prompts()]

    half = Half(theta=[0.0])
    with pytest.raises(ValueError, match=r"probabilities of sum 1; found 0\.5"):
        half.sampled_families(half.prompts()[0])

"""``task=certify`` prints a table, writes the numbers, and names the tasks that a recipe refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import headrace_here, told
from composed import configure

from headrace.pipeline import ConfigError
from headrace.pipeline.tools.certify import OneTurn, certify
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
    return value, text, json.loads((folder / "certificate.json").read_text())["certificates"]


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


def test_probabilities_that_do_not_sum_to_1_are_refused():
    class Half(OneTurn):
        def prompts(self):
            return [prompt._replace(trajectories=prompt.trajectories[:1]) for prompt in super().prompts()]

    half = Half(theta=[0.0])
    with pytest.raises(ValueError, match=r"probabilities of sum 1; found 0\.5"):
        half.sampled_families(half.prompts()[0])

"""The command over dumps: replay, compare, plan."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from busy import busy_batch, stages
from command import headrace_here, refused
from composed import configure
from dumps import slime_dump, slime_sample
from rich.console import Console

from headrace.pipeline import ConfigError, Pipeline, make_report, write_dump
from headrace.pipeline.report import Comparison
from headrace.pipeline.tasks.compare import compare
from headrace.pipeline.tasks.replay import replay
from headrace.transforms import BatchError, GroupRelativeAdvantage, LossWeight

pytestmark = pytest.mark.slow

BASELINES = ("mean", "leave_one_out")
COUNTED = ("pipeline.stages.gate.group_size=3", "pipeline.stages.gate.on_incomplete=drop")


@pytest.fixture
def dump(make_batch, tmp_path):
    folder = tmp_path / "dump"
    for step in range(3):
        pipeline = Pipeline(stages(weight=LossWeight()))
        pipeline(busy_batch(make_batch))
        write_dump(make_report(pipeline, step=step), folder)
    return folder


def configured(task, dump, *words):
    return configure("config", f"task={task}", f"source.path={dump}", *words)


def told(function, config, folder, *arguments) -> tuple[float, str]:
    console = Console(width=100, record=True, file=io.StringIO())
    return function(config, folder, *arguments, console), console.export_text()


def test_a_replay_prints_and_writes_its_report(dump, tmp_path):
    out = tmp_path / "out"
    trained, text = told(replay, configured("replay", dump, *COUNTED, "pipeline=dapo"), out)
    assert trained == 3 * 3
    assert "gate: incomplete" in text
    assert "−6" in text
    assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "report.html", "rollouts"]
    again, _ = told(
        replay, configured("replay", out / "rollouts", *COUNTED, "pipeline=dapo"), tmp_path / "two"
    )
    assert again == trained


def test_a_comparison_shows_the_users_turn_of_a_prompt(tmp_path):
    chat = "<|im_start|>system\nReason step by step.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    path = slime_dump(
        tmp_path / "data_5.pt", samples=[slime_sample(0, i, float(i), prompt=chat) for i in range(2)]
    )
    config = configured(
        "compare", path, "source.format=slime", "pipelines=[grpo,dr_grpo]", "report.html=false"
    )
    _, text = told(compare, config, tmp_path / "out", ("pipeline.stages.gate.group_size=2",))
    assert "2+2?" in text
    assert "im_start" not in text


def test_a_refused_step_is_named(dump, tmp_path):
    config = configured("replay", dump, "pipeline.stages.gate.group_size=3")
    with pytest.raises(BatchError, match=r"step 0: stage 'gate'.*group 1 has 2 of 3"):
        told(replay, config, tmp_path / "out")


def test_two_recipes_are_compared_on_the_same_rollouts(dump, tmp_path):
    config = configured("compare", dump, "pipelines=[grpo,dr_grpo]")
    correlation, text = told(compare, config, tmp_path / "out", COUNTED)
    assert 0 < correlation <= 1
    assert "advantages that differ" in text
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert found["numbers"]["rows"] == 27
    assert found["numbers"]["trained_by_both"] == 9
    assert found["numbers"]["gradient_cosine"] == pytest.approx(1)  # one group alone trains
    assert found["movers"] == []
    page = (tmp_path / "out" / "report.html").read_text()
    assert '"versus":["grpo","dr_grpo"]' in page
    with pytest.raises(ConfigError, match=r"must name two recipes.*got \['grpo'\]"):
        told(compare, configured("compare", dump, "pipelines=[grpo]"), tmp_path / "out", COUNTED)


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
def test_the_unit_of_the_reward_changes_no_comparison(unit, make_batch):
    batch = make_batch([0.0, 2, 0, 6, 1, 5], [5, 5, 9, 9, 9, 9])
    batch["next", "reward"] = batch["next", "reward"].double() * unit
    stages = [{"advantage": GroupRelativeAdvantage(scale="none", baseline=name)} for name in BASELINES]
    comparison = Comparison(BASELINES)
    comparison.add(*(make_report(Pipeline(each).run(batch)) for each in stages))
    assert comparison.numbers["differ"] == 6
    comparison = Comparison(("one", "same"))
    comparison.add(*(make_report(Pipeline(each).run(batch)) for each in (stages[0], stages[0])))
    assert comparison.numbers["differ"] == 0


def test_groups_whose_share_moves_most_by_hand(make_batch, tmp_path):
    """Rewards 0, 2 and 0, 6: by their spread each group has a half, without it ¼ and ¾; a cosine of 2/√5."""
    batch = make_batch([0.0, 2, 0, 6], [5, 5, 9, 9])
    batch["masks", "all_assistant_mask"][:] = True
    write_dump(make_report(Pipeline({}).run(batch)), tmp_path / "dump")
    config = configured("compare", tmp_path / "dump", "pipelines=[grpo,dr_grpo]")
    _, text = told(compare, config, tmp_path / "out", ("pipeline.stages.gate.group_size=2",))
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    movers = sorted(found["movers"], key=lambda each: each["group"])
    assert [(each["group"], each["step"]) for each in movers] == [(5, 0), (9, 0)]
    shares = [[each["first"], each["second"]] for each in movers]
    assert np.array(shares) == pytest.approx(np.array([[0.5, 0.25], [0.5, 0.75]]), abs=1e-6)
    assert found["numbers"]["gradient_moved"] == pytest.approx(0.25)
    assert found["numbers"]["gradient_cosine"] == pytest.approx(2 / 5**0.5)
    assert re.search(r"0 +5 +50\.0% +25\.0%", text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=replay"], "source.path=FILE, FOLDER or a glob"),
        (
            ["task=plan", "source.path=nowhere", "source.format=verl"],
            "nowhere: there is no such file or folder",
        ),
        (
            ["task=replay", "source.path=.", "source.format=slimee"],
            "format must be auto or one of headrace, nemo_rl",
        ),
    ],
)
def test_an_error_is_one_paragraph(words, message, tmp_path):
    assert message in refused(tmp_path, *words)


def test_the_command_trains_dumps_and_replays(tmp_path):
    small = ["train.steps=3", "sampler.prompts_per_batch=4", "policy.width=16", "policy.layers=1"]
    headrace_here(tmp_path, *small, "report.dump=parquet", "hydra.run.dir=run")
    page = (tmp_path / "run" / "report.html").read_text()
    step = json.loads(page.split('id="page-data">')[1].split("</script>")[0])["steps"][-1]
    assert all(label.endswith(" backwards?") for label in step["groups"]["label"])
    assert any(text["start"] for text in step["rows"]["response"])
    words = ["pipeline.stages.gate.on_incomplete=drop", "pipeline.stages.collapse.reward=sum"]
    shown = headrace_here(tmp_path, "task=replay", "source.path=run/rollouts", *words, "hydra.run.dir=again")
    assert "where the rows of 3 steps went" in shown.stdout
    again = (tmp_path / "again" / "report.html").read_text()
    assert f'"response":{json.dumps(step["rows"]["response"], separators=(",", ":"))}' in again

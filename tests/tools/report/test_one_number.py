"""The same quantity over the same steps is the same number on the page, in the terminal and in the files."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import subprocess
from importlib.resources import files

import numpy as np
import pytest
from busy import busy_batch, stages
from composed import configure
from dumps import verl_row, write_lines
from hypothesis import given
from hypothesis import strategies as st
from pages import data_of
from rich.console import Console

from headrace.pipeline import Pipeline, load_pipeline, make_report, write_dump
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.pipeline.tools.replay import compare_recipes, replay_dump
from headrace.pipeline.tools.report import advise, percent, verdict
from headrace.transforms import LossWeight

pytestmark = pytest.mark.slow

STEPS, GROUPS, SIZE = 14, 6, 4
NUMBER = r"(-?[\d.]+(?:e-?\d+)?)"
WINDOW = r"steps (\d+) to (\d+)"


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """A dump of fourteen steps of six groups of four. In half of the groups all rewards are 0."""
    folder, chance = tmp_path_factory.mktemp("verl"), random.Random(0)
    for step in range(STEPS):
        rows = []
        for group in range(GROUPS):
            for k in range(SIZE):
                score = float(chance.random() < 0.3) if group % 2 else 0.0
                row = verl_row(f"g{group}_{k}_0", score, step=step, prompt=f"{group}?")
                rows.append(row | {"acc": bool(score), "pred": f"answer {k}"})
        write_lines(folder / f"{step}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def replayed(dump, tmp_path_factory):
    """The data of the page and the text of the terminal after a replay."""
    out, console = tmp_path_factory.mktemp("out"), Console(width=600, record=True, file=io.StringIO())
    words = ("pipeline=dr_grpo", f"pipeline.stages.gate.group_size={SIZE}", "report.steps=50")
    replay_dump(configure("config", "task=replay", f"source.path={dump}", *words), out, console)
    return data_of(out / "report.html"), console.export_text()


def stated(text: str) -> list[tuple[float, int, int]]:
    """Each number of a sentence that has a window of steps, with the first and the last step."""
    found = re.findall(rf"{NUMBER} (?:\(|in ){WINDOW}", text)
    return [(float(value), int(first), int(last)) for value, first, last in found]


def mean_of(values, first, last):
    return float(np.mean(values[first : last + 1]))


@given(
    st.lists(st.floats(0, 1), min_size=12, max_size=24), st.lists(st.floats(0, 1), min_size=24, max_size=24)
)
def test_a_sentence_has_the_mean_of_the_steps_it_names(rewards, shares):
    """Rewards and lengths are compared by quarters, and a share is the mean of the last five steps."""
    history = [
        (step, {"reward/all/mean": reward, "reward/all/min": 0.0, "reward/all/max": 1.0}
         | {"rows/trained": 1.0, "rollouts/truncated": shares[step], "response_length/mean": 1 + reward})
        for step, reward in enumerate(rewards)
    ]  # fmt: skip
    said = verdict(history[-1][1], history).partition(". ")[0]
    windows = stated(said)
    assert len(windows) >= 2
    for value, first, last in windows:
        assert value == pytest.approx(mean_of(rewards, first, last), rel=6e-3, abs=1e-12)
    last_five = mean_of(shares[: len(rewards)], len(rewards) - 5, len(rewards) - 1)
    texts = {each.name: each.text for each in advise(history[-1][1], history)}
    assert ("rollouts-truncated" in texts) == (last_five > 0.25)
    if text := texts.get("rollouts-truncated"):
        window = f"mean of steps {len(rewards) - 5} to {len(rewards) - 1}"
        assert text.startswith(f"{percent(last_five)} of the rollouts were truncated ({window}).")
    if text := texts.get("lengths-explode"):
        for value, first, last in stated(text):
            assert value == pytest.approx(1 + mean_of(rewards, first, last), rel=6e-3)


def test_page_and_terminal_have_the_same_totals(replayed):
    data, text = replayed
    rows = STEPS * GROUPS * SIZE
    trained = sum(step["funnel"][-1]["rows"] for step in data["steps"])
    assert data["recorded"] == len(data["steps"]) == STEPS
    assert (data["totals"]["rows/in"], data["totals"]["rows/trained"]) == (rows, trained)
    assert f"{percent(trained / rows)} of the rows were trained, all {STEPS} steps" in text
    (line,) = (line.split() for line in text.splitlines() if line.startswith("trained"))
    assert line[1].replace(",", "") == str(trained)


def test_page_and_terminal_have_the_same_verdict_and_advisories(replayed):
    data, text = replayed
    last = data["steps"][-1]
    assert all(sentence in text for sentence in last["verdict"].removesuffix(".").split(". "))
    assert last["advisories"]
    for at, each in enumerate(last["advisories"][:3]):  # advisories do not repeat the verdict
        assert each["text"].removesuffix(".") in text
        assert f"\n{'first, ' * (at == 0)}{each['name']}: " in text


def test_a_number_of_a_step_is_equal_in_tile_curve_funnel_and_verdict(replayed):
    data, _ = replayed
    for at, step in enumerate(data["steps"]):
        for name, value in step["numbers"].items():
            assert data["curves"][name][at] == value, name
        first, last = step["funnel"][0], step["funnel"][-1]
        for unit in ("rows", "rollouts", "groups"):
            ends = (step["numbers"][f"{unit}/in"], step["numbers"][f"{unit}/trained"])
            assert ends == (first[unit], last[unit])
        equal = sum(step["groups"]["zero_variance"]) / len(step["groups"]["id"])
        assert step["numbers"]["frac_reward_zero_std"] == pytest.approx(equal)
    for value, first, last in stated(data["steps"][-1]["verdict"]):
        assert value == pytest.approx(mean_of(data["curves"]["reward/all/mean"], first, last), rel=6e-3)


def test_a_response_has_its_ground_truth_and_other_columns(replayed):
    for step in replayed[0]["steps"]:
        for reward, beside in zip(step["rows"]["reward"], step["rows"]["beside"], strict=True):
            assert beside["acc"] is (reward == 1.0)
            assert beside["pred"].startswith("answer ")
            assert "ground truth" in beside
            assert not {"score", "input", "output", "uid", "step", "gts"} & set(beside)


def test_a_comparison_has_the_mean_over_the_steps_of_its_page(make_batch, tmp_path):
    for step in range(4):
        batch = busy_batch(make_batch)
        batch["next", "reward"][-1] += step % 2  # at every second step, the stds of the trained groups differ
        run = Pipeline(stages(weight=LossWeight())).run(batch)
        write_dump(make_report(run, step=step), tmp_path / "dump")
    console = Console(width=600, record=True, file=io.StringIO())
    gate = ("pipeline.stages.gate.group_size=3", "pipeline.stages.gate.on_incomplete=drop")
    words = ("pipelines=[grpo,dr_grpo]", "report.steps=50", *gate)
    config = configure("config", "task=compare", f"source.path={tmp_path / 'dump'}", *words)
    compare_recipes(config, tmp_path, list(words[2:]), console)
    found = json.loads((tmp_path / "compare.json").read_text())
    numbers = found["numbers"]
    data = data_of(tmp_path / "report.html")
    text = console.export_text()
    for name, shown in (("gradient_moved", ".1%"), ("gradient_cosine", ".4f")):
        of_steps = [value for value in data["curves"][f"versus/{name}"] if value is not None]
        assert numbers[name] == pytest.approx(np.mean(of_steps))
        of = f"{len(of_steps)} of 4 steps at which both have a gradient"
        over = "all 4 steps" if name == "gradient_moved" else f"the {of}"
        assert f"mean over {over}{format(numbers[name], shown)}" in re.sub(r"  +", "", text)
        assert found["steps_averaged"][name] == len(of_steps)
    assert "all 4 steps" in text
    other = load_pipeline("pipeline=dr_grpo", *gate)
    reports = [make_report(other.run(batch)) for _, batch in open_dump(tmp_path / "dump")]
    for name in ("rows/trained", "advantages/all/std"):
        of_steps = [report.numbers[name] for report in reports]
        assert data["curves"][f"second/{name}"] == pytest.approx(of_steps)


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_page_writes_a_share_as_the_terminal_does():
    shares = [0.0, 0.004, 0.0099, 0.01, 0.0149, 0.5, 0.714, 0.985, 0.99, 0.9901, 0.9996, 1.0]
    module = files("headrace.pipeline.tools.report") / "page" / "numbers.js"
    script = f"""
        import {{ shareInWords }} from "{module.as_uri()}";
        console.log(JSON.stringify({shares}.map(shareInWords)));
    """
    command = ["node", "--input-type=module", "--no-warnings", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [percent(share) for share in shares]

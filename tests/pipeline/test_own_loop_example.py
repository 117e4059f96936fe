"""The example of a complete loop learns. After it was killed, it continues."""

from __future__ import annotations

import json
import runpy
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from command import Started
from pages import data_of

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "own_loop.py")

pytestmark = pytest.mark.slow


def program() -> None:
    runpy.run_path(EXAMPLE, run_name="__main__")


def test_a_killed_loop_goes_on_and_trains_each_group_once(tmp_path):
    words, saved = ("run", "--steps", "12"), tmp_path / "run" / "saved"
    first = Started(program, tmp_path, *words)
    for _ in range(600):
        if saved.exists() and max((each.name for each in saved.iterdir()), default="") >= "step_0000000005":
            break
        assert first.process.is_alive(), first.ends()
        time.sleep(0.05)
    first.process.kill()
    first.ends()
    last = int(max(each.name for each in saved.iterdir() if each.name.endswith(".pt"))[5:15])
    assert Started(program, tmp_path, *words).ends().returncode == 0
    page = data_of(tmp_path / "run" / "report.html")
    assert page["curve_steps"] == list(range(1, 13))
    assert page["run"]["restarts"] == [last + 1]
    steps = [pq.read_table(path) for path in sorted((tmp_path / "run" / "rollouts").glob("*.parquet"))]
    trained = [group for step in steps for group in sorted(set(step["group_id"].to_pylist()))]
    assert len(set(trained)) == len(trained) == 12 * 8  # 12 steps of 8 groups
    lines = [json.loads(line) for line in (tmp_path / "run" / "numbers.jsonl").read_text().splitlines()]
    assert {each["step"] for each in lines if "rows/in" in each} == {*range(1, 13)}


def test_the_loop_learns_on_informative_groups_and_corrects_for_the_older_copy(tmp_path):
    steps = list(runpy.run_path(EXAMPLE)["train"](tmp_path, 40))
    rewards = [float(batch["next", "reward"].mean()) for _, batch, _ in steps]
    assert sum(rewards[-10:]) > 1.5 * sum(rewards[:10])
    for _, batch, run in steps:
        rows = batch["next", "reward"].reshape(8, 8)  # eight groups of eight rollouts
        assert bool((rows.amax(1) > rows.amin(1)).all())
        assert run.metrics["groups/trained"] == 8
    weights = torch.tensor([run.metrics["correction/weight_max_token"] for _, _, run in steps])
    assert weights[0] == 1  # in the first step, the copy equals the policy
    assert weights[5:].max() > 1.01

"""``task=plan``: its share of uninformative groups is that of a replay; its chances are enumerated."""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch
from composed import configure
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.pipeline import ConfigError, Pipeline, build_pipeline, make_report, write_dump
from headrace.pipeline.sources import open_source
from headrace.pipeline.tasks.group_sizes import chance_of_equal, different_values, tabulate_group_sizes
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow


def told(config, folder):
    console = Console(width=120, record=True, file=io.StringIO())
    return tabulate_group_sizes(config, folder, console), console.export_text()


def configured(dump, *words):
    gate = ("pipeline.stages.gate.group_size=2", "pipeline.stages.gate.on_incomplete=drop")
    return configure("config", "task=plan", f"source.path={dump}", *gate, *words)


# -- chances -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(1, 9))
def test_the_chance_equals_that_over_all_draws(rewards, size):
    counts = Counter(rewards)
    [chance] = chance_of_equal(np.array([*counts.values()]), np.zeros(len(counts), int), size)
    if size <= len(rewards):
        draws = list(itertools.combinations(rewards, size))
    else:
        draws = list(itertools.product(rewards, repeat=min(size, 4)))
        size = min(size, 4)
        [chance] = [sum((n / len(rewards)) ** size for n in counts.values())]
    assert chance == pytest.approx(np.mean([len(set(draw)) == 1 for draw in draws]))


def test_groups_of_two_sizes_are_separate():
    count, group = np.array([2, 2, 1, 3]), np.array([0, 1, 1, 2])
    assert chance_of_equal(count, group, 3).tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert chance_of_equal(count, group, 2).tolist() == pytest.approx([1.0, 1 / 3, 1.0])


def test_a_constant_reward_that_some_lack_is_uninformative():
    values = np.array([[1.0, np.nan], [1.0, 0.0], [1.0, 2.0], [1.0, np.nan]])
    group, count = different_values(values, np.array([0, 0, 1, 1]))
    assert (group.tolist(), count.tolist()) == ([0, 1], [2, 2])
    group, count = different_values(values, np.zeros(4, int))
    assert sorted(count.tolist()) == [1, 1, 2]


# -- the same as a replay ----------------------------------------------------------------------------

RECIPES = {
    "grpo": (),
    "dapo": (
        "pipeline.stages.overlong.max_length=4",
        "pipeline.stages.overlong.cache=3",
        "pipeline.stages.filter.action=drop",
    ),
    "gdpo": ("pipeline.stages.collapse.columns=2",),
    "grpo weighted": ("pipeline.stages.collapse.columns=2", "pipeline.stages.collapse.weights=[1,0.5]"),
    "grpo missing": ("pipeline.stages.collapse.missing=skip",),
}


def dumped(make_batch, folder, several):
    """Groups that are equal, differ, fan out, differ in length alone, by a part alone, and lost a rollout."""
    reward = torch.tensor([1.0, 1, 0, 1, 1, 0, 0, 0.25, 0.75, 0.5, 0.5, 3])
    batch = make_batch(reward.tolist(), [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5], [0, 1, 2, 3, 3, *range(4, 11)])
    batch["status"] = torch.tensor([0] * 10 + [3, 0])
    mask = batch["masks", "all_assistant_mask"]
    mask[5, :2] = False
    if several:
        other = torch.tensor([0.0, 1, 2, 0, 0, 1, 1, 1, 0, 0, 0, 0])
        batch["next", "reward"] = torch.stack([reward, other], 1)
    for step in range(2):
        write_dump(make_report(Pipeline({}).run(batch[: 12 - 5 * step]), step=step), folder)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_share_equals_frac_reward_zero_std_of_a_replay(recipe, make_batch, tmp_path):
    words = (f"pipeline={recipe.split()[0]}", *RECIPES[recipe])
    dumped(make_batch, tmp_path, several="columns=2" in str(words))
    config = configured(tmp_path, *words)
    share, text = told(config, tmp_path)
    reports = [make_report(build_pipeline(config.pipeline).run(batch)) for _, batch in open_source(tmp_path)]
    compared = np.array([(report.groups["rollouts"] > 1).sum() for report in reports])
    zero = np.array([report.numbers["frac_reward_zero_std"] for report in reports])
    assert share == pytest.approx((zero * compared).sum() / compared.sum())
    assert f"{share:.0%} of the groups in the dump are uninformative" in text
    assert 0 < share < 1


# -- the table ---------------------------------------------------------------------------------------


def test_the_plan_by_hand(make_batch, tmp_path):
    """Solve rates 0, ½ and 1 in groups of two; of four, half of 2⁻³ by the shares seen."""
    write_dump(make_report(Pipeline({}).run(make_batch([0.0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]))), tmp_path)
    share, text = told(configured(tmp_path, "plan.group_sizes=[2,4]"), tmp_path)
    assert share == pytest.approx(2 / 3)
    assert re.search(r"solve rate, at 1 +groups +G=2 +G=4\*", text)
    assert re.search(r"0\.25 to 0\.5 +1 +0% +12%", text)
    assert re.search(r"all +3 +67% +71%", text)
    assert re.search(r"rollouts per informative group +6 +14", text)


def test_rounding_of_a_mean_moves_no_group_across_a_bound(make_batch, tmp_path):
    """0.1 + 0.1 + 0.1 is above 0.3: all three are as bad as can be, and no quarter of them is solved."""
    batch = make_batch([0.1] * 3 + [0.7] * 3 + [0.1, 0.1, 0.7], [0] * 3 + [1] * 3 + [2] * 3)
    batch["next", "reward"] = batch["next", "reward"].double().round(decimals=1)
    write_dump(make_report(Pipeline({}).run(batch)), tmp_path)
    gate = "pipeline.stages.gate.group_size=3"
    _, text = told(configured(tmp_path, gate, "plan.group_sizes=[2]"), tmp_path)
    lines = [line.split()[:-1] for line in text.splitlines() if line.endswith("%")]
    assert lines == [["0", "1"], ["0.25", "to", "0.5", "1"], ["1", "1"], ["all", "3"]]


@given(st.integers(1, 60))
def test_a_group_of_one_is_never_informative(rollouts):
    """Otherwise an informative group would take quadrillions of rollouts."""
    different = np.ones(rollouts, int), np.zeros(rollouts, int)
    assert chance_of_equal(*different, 1).tolist() == [1.0]


def test_solved_is_the_greater_of_two_rewards_or_above_the_option(make_batch, tmp_path):
    write_dump(make_report(Pipeline({}).run(make_batch([-1.0, -1, -1, 0.5], [0, 0, 1, 1]))), tmp_path / "two")
    _, text = told(configured(tmp_path / "two", "plan.group_sizes=[2]"), tmp_path)
    assert "solve rate, at 0.5" in text
    assert re.search(r"\n *0 +1 +100%", text)
    batch = make_batch([0.1, 0.2, 0.6, 0.7], [0, 0, 1, 1])
    write_dump(make_report(Pipeline({}).run(batch)), tmp_path / "many")
    _, text = told(configured(tmp_path / "many", "report.solved=0.5"), tmp_path)
    assert "solve rate, at 0.5" in text
    assert re.search(r"\n *0 +1 +0% .*\n *1 +1 +0% ", text)


def test_a_dump_that_cannot_be_planned_is_refused(make_batch, tmp_path):
    write_dump(make_report(Pipeline({}).run(make_batch([0.0, 1.0], [0, 1]))), tmp_path)
    with pytest.raises(ConfigError, match="needs groups with at least two rollouts with rewards"):
        told(configured(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="group_sizes must be integers ≥ 1"):
        told(configured(tmp_path, "plan.group_sizes=[0]"), tmp_path)
    wrong = configured(tmp_path, "pipeline.stages.gate.on_incomplete=raise")
    with pytest.raises(BatchError, match="step 0: stage 'gate'"):
        told(wrong, tmp_path)

"""A running baseline over several batches equals that of a loop."""

from __future__ import annotations

import statistics

import pytest
import torch
from batches import batch_of
from drawn_rollouts import REWARDS
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import alone

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    RunningBaseline,
    SampleFilter,
    ShuffleSplit,
)
from headrace.transforms.table.schema import COUNTED, REWARD

NAN = float("nan")


def groups_of_one(rewards, keys, start):
    """Rows with their reward as advantage, or 0 without a reward. Ids begin at `start`."""
    ids = list(range(start, start + len(rewards)))
    batch = batch_of(rewards, ids, ids, task=keys)
    batch[REWARD] = batch["next", "reward"].flatten()
    return batch.set("advantage", batch[REWARD].nan_to_num(0.0).view(-1, 1, 1))


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=6), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.randoms(),
)
def test_a_running_mean_equals_that_of_a_loop(steps, decay, random):
    """Row order, segments and a state between two batches change no bit."""
    options = {"decay": decay, "start": 0.5, "start_weight": 2.0, "baseline_key": "task"}
    stage, other = RunningBaseline(**options), RunningBaseline(**options)
    known: dict[int, tuple[float, float]] = {}
    for step, rows in enumerate(steps):
        batch = groups_of_one([r for r, _ in rows], [k for _, k in rows], 100 * step)
        batch["advantage"] = batch["advantage"].double()
        said = alone(stage, batch)
        found, rewards = said.batch["advantage"].flatten(), batch[REWARD].tolist()
        assert said.metrics["keys"] == len(known)
        levels = [known.get(key, (0.5, 2.0))[0] for _, key in rows]
        assert said.metrics["mean"] == pytest.approx(statistics.fmean(levels), abs=1e-9)
        expected = [
            reward - known.get(key, (0.5, 2.0))[0] for reward, (_, key) in zip(rewards, rows, strict=True)
        ]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)
        for key in {key for _, key in rows}:
            own = [reward for reward, (_, k) in zip(rewards, rows, strict=True) if k == key]
            mean, weight = known.get(key, (0.5, 2.0))
            for _ in own:
                weight = decay * weight + 1
                mean += (statistics.fmean(own) - mean) / weight
            known[key] = mean, weight
        order = [*range(len(rows)), random.randrange(len(rows))]
        random.shuffle(order)
        shuffled = other(batch[order])["advantage"].flatten()
        assert torch.equal(shuffled, found[order])
        state, other = other.state_dict(), RunningBaseline(**options)
        other.load_state_dict(state)


def test_a_repeated_batch_counts_once():
    """After a restart, an interrupted batch is repeated."""
    stage = RunningBaseline(decay=0.5)
    first, second = (groups_of_one(rewards, [0, 0], 10 * i) for i, rewards in enumerate([[1.0, 3], [5.0, 7]]))
    stage(first)
    before = stage(second)["advantage"]
    restored = RunningBaseline(decay=0.5)
    restored.load_state_dict(stage.state_dict())
    assert torch.equal(restored(second)["advantage"], before)
    assert torch.equal(restored(second[torch.tensor([1, 0])])["advantage"].flip(0), before)
    third = groups_of_one([2.0], [0], 50)
    assert torch.equal(restored(third)["advantage"], stage(third)["advantage"])


def test_rows_of_a_rollout_must_have_one_baseline_key():
    wrong = batch_of([1.0, 1.0], [0, 0], [3, 3], task=[1, 2])
    wrong["advantage"] = torch.zeros(2, 1, 1)
    with pytest.raises(BatchError, match=r"have the same baseline_key; found 2 at row 1 \(rollout 3\)"):
        RunningBaseline(baseline_key="task")(FanOutCollapse()(wrong))


@pytest.mark.parametrize("other", [-1.0, 1.0])
def test_rows_of_a_rollout_have_one_reward_or_all_lack_it(other):
    batch = batch_of([NAN, other], [0, 0], [3, 3], task=[1, 1])
    batch["advantage"], batch[REWARD] = torch.zeros(2, 1, 1), torch.tensor([NAN, other])
    with pytest.raises(BatchError, match="must have the same reward; found rollout 3"):
        RunningBaseline(baseline_key="task")(batch)


def test_a_batch_refused_by_a_later_stage_does_not_count():
    """The stage may be before or after the split. The refused batch changes no later baseline."""
    running = RunningBaseline(decay=0.5)
    stages = {
        "collapse": FanOutCollapse(),
        "advantage": GroupRelativeAdvantage(baseline="none", scale="none"),
        "running": running,
    }

    def refuse(_):
        raise BatchError("not these")

    without_tokens = {"split": ShuffleSplit(minibatch_size=2), "weight": LossWeight(loss_mask_key="none")}
    for later in ({"filter": SampleFilter(criterion=refuse)}, without_tokens):
        with pytest.raises(BatchError, match=r"not these|'none' \(loss_mask_key\)"):
            Pipeline(stages | later)(batch_of([8.0, 8.0], [0, 1]))
        assert len(running.memory.after.keys) == 0
    found = Pipeline(stages)(batch_of([4.0, 2.0], [0, 1]))
    assert found["advantage"].flatten().tolist() == [4, 2]
    assert running.memory.after.mean.tolist() == [2.25]  # two rewards halve the distance to 3: 1.5, then 2.25


def test_rollouts_without_a_reward_or_excluded_are_not_counted():
    stage = RunningBaseline(decay=0.0, start=1.0)
    batch = groups_of_one([5.0, NAN, 9.0], [0, 0, 0], 0)
    batch[COUNTED] = torch.tensor([True, True, False])
    assert stage(batch)["advantage"].flatten().tolist() == [4, 0, 9]
    assert stage(groups_of_one([6.0], [0], 10))["advantage"].flatten().tolist() == [1]


def test_the_default_weight_of_the_start_gives_an_exponential_moving_average():
    """With ρ = 0.95 the start 0 has the weight 20, and each reward moves the mean by a 20th."""
    stage, mean = RunningBaseline(), 0.0
    for step, reward in enumerate([1.0, 5.0, -2.0]):
        found = float(stage(groups_of_one([reward], [0], step))["advantage"])
        assert found == pytest.approx(reward - mean, rel=1e-6)
        mean += (reward - mean) / 20
    assert float(stage.memory.after.weight) == pytest.approx(20)


def test_a_batch_is_recognised_by_its_rollouts_not_by_row_numbers():
    """By row numbers, equal rewards in every batch would look like a repeated batch."""
    with pytest.raises(ValueError, match="needs rollout_key, with ids that are unique across batches"):
        RunningBaseline(rollout_key=None)
    stage = RunningBaseline(decay=0.5)
    found = [float(stage(groups_of_one([1.0], [0], start))["advantage"]) for start in range(3)]
    assert found == [1, 0.5, 0.25]

"""Filters, shaping, metrics and the report use the weighted sum of several rewards, as the loss does."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from alone import said_by
from batches import batch_of
from dumps import trl_dump
from hypothesis import given
from hypothesis import strategies as st
from recipes import of, pipeline_of
from test_recipes_of_the_field import NO_LONE, columns_for, ragged_batch, run

from headrace.pipeline import Pipeline
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.pipeline.tools.report import page_data, report_table
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LengthPenalty,
    OverlongPunishment,
    RewardScale,
    RewardsVary,
    SampleFilter,
)
from headrace.transforms.table.schema import REWARD, REWARDS

NAN = float("nan")
REWARDED = ("advantage", "turns", "tree")  # further stages with the option `missing`
NUMBERS = st.integers(-8, 8).map(lambda x: x / 4)


def table(make_batch, rewards, groups=None, rollouts=None):
    """A batch whose rows have K rewards each. NaN means that a reward is missing."""
    batch = make_batch([0.0] * len(rewards), groups or [0] * len(rewards), rollouts)
    batch["next", "reward"] = torch.tensor(rewards)
    return batch


def by_hand(rewards, weights):
    known = [w * r for w, r in zip(weights, rewards, strict=True) if not math.isnan(r)]
    return sum(known) if known else NAN


@given(
    st.lists(st.lists(st.one_of(st.just(NAN), NUMBERS), min_size=3, max_size=3), min_size=1, max_size=6),
    st.lists(NUMBERS, min_size=3, max_size=3),
)
def test_the_reward_is_the_weighted_sum_of_the_rewards_that_are_present(rewards, weights):
    out = said_by(FanOutCollapse(columns=3, weights=weights, missing="skip"), table(batch_of, rewards))
    expected = [by_hand(each, weights) for each in rewards]
    assert out.batch[REWARD].tolist() == pytest.approx(expected, nan_ok=True)
    assert torch.equal(out.batch[REWARDS].nan_to_num(9.0), torch.tensor(rewards).nan_to_num(9.0))
    known = [reward for reward in expected if not math.isnan(reward)]
    assert out.metrics["reward_mean"] == pytest.approx(statistics.fmean(known) if known else 0.0)


def test_several_rewards_train_as_their_weighted_sum(make_batch, recipes):
    """In every recipe, several rewards are filtered, shaped and compared like their sum."""
    for name in (name for name in recipes if name not in ("gdpo", "gigpo")):  # these do not train the sum
        batch = columns_for(name, ragged_batch(make_batch, "grid", 3, lone=name not in NO_LONE))
        reward = batch["next", "reward"].view(-1).abs() / 2  # the weighted sum must be in [0, 1]
        batch["next", "reward"] = torch.stack([reward, reward.flip(0)], -1)
        with of(name):
            found = run(name, batch, collapse={"columns": 2, "weights": [1, 0.5]})
            batch["next", "reward"] = reward + 0.5 * reward.flip(0)
            torch.testing.assert_close(found, run(name, batch), equal_nan=True)


@pytest.mark.parametrize("several", ["sum", "decoupled"])
def test_metric_and_report_have_the_trained_reward(make_batch, several):
    """Rewards (1, 1) and (0, 1) with weights 0.2 and 0.6 sum to 0.8 and 0.6. Only the first row is solved."""
    batch = table(make_batch, [[1.0, 1.0], [0.0, 1.0]])
    pipeline = Pipeline(
        {
            "collapse": FanOutCollapse(columns=2, weights=[0.2, 0.6]),
            "advantage": GroupRelativeAdvantage(
                several=several, weights=[0.2, 0.6] if several == "decoupled" else None
            ),
        }
    )
    report = pipeline.run(batch).report(step=0, solved=0.7)
    assert report.metrics["collapse/reward_mean"] == pytest.approx(0.7)
    assert report.numbers["reward/all/mean"] == pytest.approx(0.7)
    assert report.columns["reward"].tolist() == pytest.approx([0.8, 0.6])
    assert report.columns["collected_reward"].tolist() == pytest.approx([0.8, 0.6])
    assert report.numbers["solve_partial"] == 1


def test_page_and_dump_show_the_terms_of_the_reward(make_batch):
    batch = table(make_batch, [[1.0, 1.0], [0.0, NAN]])
    stages = {"collapse": FanOutCollapse(columns=2, weights=[0.25, 0.5], missing="skip")}
    report = Pipeline(stages).run(batch).report(step=0)
    rows = page_data([report], title="")["steps"][0]["rows"]
    assert rows["rewards"] == [[1, 1], [0, None]]
    assert rows["reward"] == [0.75, 0]
    dump = report_table(report).to_pydict()
    assert dump["rewards"][0] == [1, 1]
    assert dump["reward"] == dump["rollout_reward"] == [0.75, 0]
    report = Pipeline({}).run(make_batch([1.0], [0])).report(step=0)
    assert page_data([report], title="")["steps"][0]["rows"]["rewards"] == [None]


def test_a_row_dropped_before_the_collapse_is_reported_with_the_same_weights(make_batch):
    batch = table(make_batch, [[1.0, 1.0], [0.0, NAN], [NAN, NAN]])
    first = SampleFilter(criterion=lambda batch: batch["rollout_id"] == 9, action="drop")
    pipeline = Pipeline({"first": first, "collapse": FanOutCollapse(columns=2, weights=[0.2, 0.6])})
    found = pipeline.run(batch).report(step=0).columns["reward"].tolist()
    assert found == pytest.approx([0.8, 0, NAN], nan_ok=True)


@pytest.mark.parametrize("several", ["sum", "decoupled"])
def test_a_group_with_equal_compared_rewards_has_zero_variance(make_batch, several):
    """In group 0, both weighted sums are 2. In group 1, the present values of each reward are equal."""
    rewards = [[0.0, 1.0], [2.0, 0.0], [1.0, 2.0], [NAN, 2.0], [NAN, NAN]]
    batch = table(make_batch, rewards, [0, 0, 1, 1, 1])
    collapse = FanOutCollapse(columns=2, missing="skip", weights=[1, 2])
    weights = [1, 2] if several == "decoupled" else None
    advantage = GroupRelativeAdvantage(several=several, weights=weights, missing="skip")
    run = Pipeline({"collapse": collapse, "advantage": advantage}).run(batch)
    flat = run.report(step=0).groups["zero_variance"].tolist()
    assert flat == ([True, False] if several == "sum" else [False, True])
    credit = run.batch["advantage"].flatten().tolist()
    assert [credit[:2] == [0, 0], credit[2:] == [0, 0, 0]] == flat


def test_a_trl_table_of_two_rewards_is_read(tmp_path):
    """The rewards are 3 and 0, and their deviations are divided by 3/√2 + 1e-4."""
    trl_dump(tmp_path / "completions_00004.parquet", length=[2.0, None])
    ((_, batch),) = open_dump(tmp_path, group_by="prompt", group_size=2)
    out = pipeline_of("as/trl", collapse={"columns": 2})(batch)
    assert sorted(out["advantage"].flatten().tolist()) == pytest.approx([-0.70707, 0.70707], abs=1e-5)
    with pytest.raises(BatchError, match=r"found \(2, 2\)\. If these are several rewards, .*columns"):
        pipeline_of("as/trl")(batch)


def std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def normalize_then_sum(rewards, groups, weights):
    """``normalize_then_sum`` of trl/trainer/grpo_trainer.py, one number after another."""
    total = []
    for row, each in enumerate(rewards):
        parts = []
        for k, weight in enumerate(weights):
            column = [r[k] for r, g in zip(rewards, groups, strict=True) if g == groups[row]]
            known = [r for r in column if not math.isnan(r)]
            if not math.isnan(each[k]):
                parts.append(weight * (each[k] - statistics.fmean(known)) / (std(known) + 1e-4))
        total.append(sum(parts) if parts else NAN)
    known = [r for r in total if not math.isnan(r)]
    return [0.0 if math.isnan(r) else (r - statistics.fmean(known)) / (std(known) + 1e-4) for r in total]


@pytest.mark.parametrize("seed", range(4))
def test_whitening_excludes_rollouts_without_a_reward(make_batch, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 4, (8, 2), generator=generator).float()
    drawn[torch.rand(8, 2, generator=generator) < 0.3] = NAN
    drawn[5] = NAN
    batch = table(make_batch, drawn.tolist(), [0] * 4 + [1] * 4)
    batch["expected_rollouts"] = torch.full((8,), 4)
    found = run(
        "gdpo",
        batch,
        collapse={"missing": "skip", "weights": [1, 0.5]},
        advantage={"missing": "skip", "eps": 1e-4, "weights": [1, 0.5]},
        whitening={"per": "sample", "eps": 1e-4, "eps_mode": "add"},
    )
    expected = normalize_then_sum(drawn.tolist(), batch["group_id"].tolist(), [1, 0.5])
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert found[5] == 0


def test_a_rollout_without_a_reward_changes_no_other_rollout_and_has_advantage_0(make_batch, recipes):
    """Recipes with returns are left out, because returns need every reward."""
    for name in (name for name in recipes if name not in ("gigpo", "ppo")):
        batch = columns_for(name, ragged_batch(make_batch, "grid", 5, lone=name not in NO_LONE))
        batch["next", "reward"] = batch["next", "reward"].abs()
        more = batch[::3].clone()
        more["rollout_id"] += 1000
        more["next", "reward"][:] = NAN
        both = torch.cat([batch, more])
        groups = both["group_id"].tolist()
        both["expected_rollouts"] = torch.tensor([groups.count(group) for group in groups])
        with of(name):
            takes = [stage for stage in ("collapse", *REWARDED) if stage in pipeline_of(name).order]
            found = run(name, both, **{stage: {"missing": "skip"} for stage in takes})
            alone = run(name, batch)
            torch.testing.assert_close(found[: len(batch)], alone, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert (found[len(batch) :].nan_to_num(0.0) == 0).all()


@pytest.mark.parametrize("rewards", [[1.0, 1.0, NAN], [NAN, 1.0, 1.0], [NAN, NAN, NAN], [NAN, 1.0, NAN]])
def test_a_missing_reward_does_not_make_rewards_vary(make_batch, rewards):
    batch = make_batch([*rewards, 0.0, NAN, 1.0], [0] * 3 + [1] * 3)
    for before in (batch, FanOutCollapse(missing="skip")(batch)):
        assert RewardsVary()(before).tolist() == [False] * 3 + [True] * 3


def test_shaping_keeps_a_missing_reward_missing(make_batch):
    batch = FanOutCollapse(missing="skip")(make_batch([1.0, NAN, 2.0], [0] * 3))
    batch["masks", "all_assistant_mask"] = torch.ones(3, 4, dtype=torch.bool)
    for stage in (
        RewardScale(scale=2.0, low=-1.0, high=3.0),
        LengthPenalty(coefficient=0.25),
        OverlongPunishment(max_length=4, cache=4),
    ):
        outcome = said_by(stage, batch)
        assert outcome.batch[REWARD].isnan().tolist() == [False, True, False]
        change = (outcome.batch[REWARD] - batch[REWARD])[[0, 2]]
        free = {"unpunished": 0} if isinstance(stage, OverlongPunishment) else {}
        assert outcome.metrics == {"reward_changed": 1, "mean": pytest.approx(float(change.mean()))} | free


# -- weights of rewards -----------------------------------------------------------------------------------


def pair(collapse, **advantage):
    return Pipeline(
        {
            "collapse": FanOutCollapse(columns=2, weights=collapse),
            "advantage": GroupRelativeAdvantage(scale="none", **advantage),
        }
    )


@pytest.mark.parametrize("several", ["sum", "decoupled"])
@pytest.mark.parametrize(
    ("collapse", "advantage"), [(None, [1.0, 0.5]), ([1.0, 0.5], [1.0, 2.0]), ([2.0, 1.0], [1.0, 1.0])]
)
def test_weights_that_the_collapse_does_not_use_are_refused(make_batch, collapse, advantage, several):
    batch = table(make_batch, [[0.0, 0.0], [3.0, 2.0]], rollouts=[4, 7])
    with pytest.raises(BatchError, match=r"found \d in place of \d for rollout 7\. .*FanOutCollapse"):
        pair(collapse, weights=advantage, several=several)(batch)


def test_shaping_before_rewards_are_compared_separately_is_refused(make_batch):
    batch = table(make_batch, [[1.0, 4.0], [3.0, 0.0]])
    stages = {
        "collapse": FanOutCollapse(columns=2),
        "shape": RewardScale(high=4.0),
        "advantage": GroupRelativeAdvantage(several="decoupled"),
    }
    with pytest.raises(
        BatchError, match=r"found 4 in place of 5 for rollout 0\..*no stage that changes the reward"
    ):
        Pipeline(stages)(batch)
    stages["advantage"] = GroupRelativeAdvantage(scale="none")
    # The sum 5 is clipped to 4, and the sum 3 stays.
    assert Pipeline(stages)(batch)["advantage"].flatten().tolist() == [0.5, -0.5]


def test_weights_must_be_finite_and_one_per_reward(make_batch):
    with pytest.raises(ValueError, match="needs a weight; got 1 for 2 columns"):
        FanOutCollapse(columns=2, weights=[1.0])
    with pytest.raises(ValueError, match=r"weights must be a list \(each a finite number"):
        FanOutCollapse(columns=2, weights=[1.0, NAN])
    with pytest.raises(ValueError, match="needs a weight; got 1 for 2 columns"):
        pair(None, weights=[1.0])(table(make_batch, [[1.0, 4.0], [3.0, 0.0]]))


def test_rewards_that_are_text_are_refused_with_their_ids():
    batch = batch_of([0.0, 0.0], [3, 3], [70, 71])
    batch["next", "reward"] = ["right", "1.0"]
    told = r"must be a number; .* has texts: 'right' at row 0, rollout 70, '1.0' at row 1, rollout 71"
    with pytest.raises(BatchError, match=told):
        FanOutCollapse()(batch)
    batch["next", "reward"] = ["", ""]  # an empty text is no number, either
    with pytest.raises(BatchError, match="has texts: '' at row 0, rollout 70"):
        FanOutCollapse()(batch)

"""Criteria that compare the rollouts of a group keep the rows that loops and all subsets give."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from batches import batch_of
from drawn_rollouts import batch_of_rollouts, per_rollout, rollouts
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    BestOf,
    FanOutCollapse,
    GroupMeanWithin,
    GroupRelativeAdvantage,
    MissingKeyError,
    SampleFilter,
)
from headrace.transforms.stages.filter.group_criteria import best_of
from headrace.transforms.table import Ids
from headrace.transforms.table.schema import REWARD


def kept_by_loops(members, k, by):
    """The labels of the rollouts (label, reward, length) that are kept, by a loop."""
    keys = {
        "reward": lambda each: (-each[1], each[0]),
        "length": lambda each: (each[2], each[0]),
        "efficiency": lambda each: (-each[1] / each[2], each[0]),
    }
    return {each[0] for each in sorted(members, key=keys[by])[:k]}


@given(rollouts(), st.integers(1, 5), st.sampled_from(["reward", "length", "efficiency"]))
def test_the_best_k_of_each_group_are_kept(drawn, k, by):
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    keep = BestOf(k=k, by=by)(batch)
    stay = {label for label, flag in zip(batch["rollout_id"].tolist(), keep.tolist(), strict=True) if flag}
    expected = set()
    for group in {each[0] for each in found}:
        members = [(each[1], each[2], sum(each[3])) for each in found if each[0] == group]
        expected |= kept_by_loops(members, k, by)
    assert stay == expected
    assert keep.tolist() == [label in stay for label in batch["rollout_id"].tolist()]


def test_a_rollout_without_tokens_is_as_efficient_as_with_one():
    reward, ids, groups = torch.tensor([2.0, 3, 4, 1]).double(), torch.arange(4), Ids(torch.zeros(4).long())
    for k, expected in ((1, [1]), (2, [0, 1]), (3, [0, 1, 2])):  # R/L is 2, 3, 2 and 1/4
        kept = best_of(reward, groups, ids, k, "efficiency", torch.tensor([0, 1, 2, 4]))
        assert kept.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("by", ["reward", "length", "efficiency", "variance"])
def test_a_rollout_without_a_reward_stays(by):
    batch = FanOutCollapse(missing="skip")(batch_of([math.nan, math.nan, 1.0, 2.0], [0, 0, 1, 1]))
    batch["masks", "all_assistant_mask"] = torch.ones(4, 4, dtype=torch.bool)
    one_of_two = [True, False] if by == "length" else [False, True]  # of equal lengths, the smaller id
    assert BestOf(k=1, by=by)(batch).tolist() == [True, True, *one_of_two]
    assert BestOf(k=1, by=by)(batch[:2]).tolist() == [True, True]


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        *(([most, 0, 0, 0, 0], [True] * 4 + [False]) for most in (0.1, 0.3, 0.7)),
        ([0, 3, 5, 6], [True, False, True, True]),  # three times the variance: 62/3 of 0, 5, 6; 18 of 0, 3, 6
        ([0, 1, 3, 6], [True, True, False, True]),  # 62/3 of 0, 1, 6; 18 of 0, 3, 6
    ],
)
def test_the_variance_decides_and_rounding_does_not(rewards, kept):
    """Sets with the largest reward and any three zeros have equal variances. The smaller ids are kept."""
    batch = FanOutCollapse()(batch_of(rewards, [0] * len(rewards)))
    assert BestOf(k=sum(kept), by="variance")(batch).tolist() == kept


def test_a_group_mean_equal_to_the_bound_is_within_it():
    kinds = itertools.product((torch.float32, torch.float64), (0.1, 0.2, 0.7, 0.8), (3, 6, 7))
    for dtype, value, rows in kinds:
        batch = batch_of([0.0] * rows, [0] * rows)
        batch[REWARD] = torch.full((rows,), value, dtype=dtype)
        assert GroupMeanWithin(low=value, high=value)(batch).all(), (dtype, value, rows)


@settings(max_examples=20)
@given(rollouts(), st.integers(1, 5))
def test_the_k_rollouts_with_the_largest_variance_are_kept(drawn, k):
    """No set of k rollouts has a larger variance (PODS, arXiv:2504.13818)."""
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    keep = per_rollout(batch, BestOf(k=k, by="variance")(batch))
    again = batch_of_rollouts(found, range(len(order)))
    assert per_rollout(again, BestOf(k=k, by="variance")(again)) == keep
    for group in {each[0] for each in found}:
        members = [each for each in found if each[0] == group]
        chosen = [each[2] for each in members if keep[each[1]]]
        assert len(chosen) == min(k, len(members))
        sets = itertools.combinations([each[2] for each in members], len(chosen))
        assert statistics.pvariance(chosen) == pytest.approx(max(map(statistics.pvariance, sets)), abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7), st.integers(1, 5), st.randoms())
def test_of_rollouts_with_equal_rewards_the_smaller_ids_are_kept(rewards, k, random):
    ids = random.sample(range(20), len(rewards))
    batch = FanOutCollapse()(batch_of(rewards, [0] * len(rewards), ids))
    keep = BestOf(k=k, by="variance")(batch).tolist()
    assert sum(keep) == min(k, len(keep))
    found = list(zip(rewards, ids, keep, strict=True))
    for reward, label, kept in found:
        assert not kept or all(stays for equal, less, stays in found if equal == reward and less < label)


def test_rollouts_that_are_not_best_leave_the_baseline_if_excluded():
    batch = batch_of([0.0, 1, 5, 6], [0] * 4)
    stages = {
        "collapse": FanOutCollapse(),
        "filter": SampleFilter(criterion=BestOf(k=2), action="exclude"),
        "advantage": GroupRelativeAdvantage(scale="none"),
    }
    run = Pipeline(stages).run(batch)
    assert run.batch["advantage"].flatten().tolist() == [0, 0, -0.5, 0.5]
    assert run.ledger.counts()["filter/not_best"] == 2
    stages["filter"] = SampleFilter(criterion=BestOf(k=2))
    assert Pipeline(stages)(batch)["advantage"].flatten().tolist() == [-3, -2, 2, 3]


def test_criteria_of_groups_must_come_after_the_collapse():
    for criterion in (BestOf(k=1), GroupMeanWithin(low=0.5)):
        with pytest.raises(MissingKeyError, match="put FanOutCollapse before it"):
            criterion(batch_of([1.0, 2], [0, 0]))
        stage = SampleFilter(criterion=criterion)
        with pytest.raises(BatchError, match="needs a group_id ≥ 0; found -1 at row 1"):
            stage(FanOutCollapse(group_key=None)(batch_of([1.0, 2], [0, -1])))
    for wrong in (0, True, None):
        with pytest.raises(ValueError, match="k must be an integer"):
            BestOf(k=wrong)


@given(rollouts(), st.sampled_from([(0.25, 0.75), (0.5, 1.0), (-math.inf, 0.5)]))
def test_the_mean_of_a_group_decides_for_all_its_rows(drawn, bounds):
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    low, high = bounds
    keep = GroupMeanWithin(low=low, high=high)(batch)
    for row, group in enumerate(batch["group_id"].tolist()):
        mean = math.fsum(each[2] for each in found if each[0] == group) / sum(
            each[0] == group for each in found
        )
        assert bool(keep[row]) == (low <= mean <= high)

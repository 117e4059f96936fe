"""Rewards shaped by length equal loops over the rollouts of a group."""

from __future__ import annotations

import statistics

import pytest
import torch
from batches import batch_of
from drawn_rollouts import batch_of_rollouts, per_rollout, rollouts
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms import BatchError, FanOutCollapse, RelativeLength, SampleFilter
from headrace.transforms.table.schema import REWARD

MASK = ("masks", "all_assistant_mask")


@given(rollouts(), st.sampled_from([0.0, 0.5, 1.0]))
def test_length_penalties_apply_among_successful_rollouts(drawn, coefficient):
    """prime-rl's shaping, orchestrator/algo/advantage.py, one rollout after another."""
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    shaped = RelativeLength(coefficient=coefficient)(batch)
    for label, reward in per_rollout(shaped, shaped[REWARD]).items():
        group, _, own, lengths = next(each for each in found if each[1] == label)
        members = [each for each in found if each[0] == group]
        best = max(each[2] for each in members)
        good = [each for each in members if each[2] == best > 0]
        expected = own
        if any(each[1] == label for each in good):
            mean = statistics.fmean(sum(each[3]) for each in good)
            expected = own * (1 + coefficient * min(max(1 - sum(lengths) / mean, 0), 1))
        assert reward == pytest.approx(expected, rel=1e-12)


@given(rollouts())
def test_a_rescaled_reward_is_divided_by_its_relative_length(drawn):
    """GR³, arXiv:2603.10535."""
    found, order = drawn
    shaped = RelativeLength(form="rescale", coefficient=0.5)(batch_of_rollouts(found, order))
    for label, reward in per_rollout(shaped, shaped[REWARD]).items():
        group, _, own, lengths = next(each for each in found if each[1] == label)
        mean = statistics.fmean(sum(each[3]) for each in found if each[0] == group)
        assert reward == pytest.approx(own / (1 + 0.5 * sum(lengths) / mean), rel=1e-12)


def test_a_negative_reward_is_not_rescaled():
    batch = FanOutCollapse()(batch_of([1.0, -0.5], [0, 0]))
    with pytest.raises(BatchError, match=r"needs rewards ≥ 0.*found -0.5 at row 1"):
        RelativeLength(form="rescale", coefficient=1.0)(batch)
    assert RelativeLength(coefficient=1.0)(batch)[REWARD][1] == -0.5


def test_without_success_no_length_is_penalized():
    batch = FanOutCollapse()(batch_of([-1.0, -1, -2], [0, 0, 0]))
    batch[MASK] = torch.arange(4) < torch.tensor([1, 4, 1])[:, None]
    assert RelativeLength(coefficient=1.0)(batch)[REWARD].tolist() == [-1, -1, -2]


def test_excluded_rollouts_are_not_in_length_statistics():
    batch = batch_of([1.0, 1, 1], [0, 0, 0])
    batch[MASK] = torch.arange(4) < torch.tensor([2, 4, 1])[:, None]
    out = SampleFilter(criterion=lambda batch: batch["rollout_id"] < 2, action="exclude")
    shaped = RelativeLength(coefficient=1.0)(FanOutCollapse()(out(batch)))[REWARD].tolist()
    assert shaped[:2] == pytest.approx([1 + 1 / 3, 1.0])

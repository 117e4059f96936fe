"""The segments of one rollout count as one rollout."""

from __future__ import annotations

import re

import pytest
import torch
from alone import said_by
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    collapse_fan_out,
)
from headrace.transforms.table.schema import COUNTED, IS_FIRST_SEGMENT, REWARD, REWARDS


def test_segment_rewards_must_agree_unless_a_reduction_is_set(make_batch):
    batch = make_batch([1.0, 2.0, 5.0], [0, 0, 0], [7, 7, 8])
    with pytest.raises(BatchError, match=r"rollout 7 \(rows \[0, 1\]: \[1.0, 2.0\]\).*reward='sum'"):
        FanOutCollapse()(batch)
    assert FanOutCollapse(reward="sum")(batch)[REWARD].tolist() == [3, 3, 5]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=20, unique=True),
    st.sampled_from(["first", "last"]),
    st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_first_and_last_may_follow_a_turn_column(segments, how, counted):
    """A loop finds the reward of the segment with the lowest or highest turn.

    If this segment is excluded and others are not, the rollout is refused.
    """
    rollouts, turns = [rollout for rollout, _ in segments], [turn for _, turn in segments]
    rewards = [float(row) for row in range(len(segments))]
    batch = batch_of(rewards, rollouts, rollouts, turn=turns)
    batch[COUNTED] = torch.tensor(counted[: len(segments)])
    inside = [row for row in range(len(segments)) if counted[row]]

    def expected(row: int, rows: list[int]) -> float:
        segments_of = [other for other in rows if rollouts[other] == rollouts[row]]
        pick = min if how == "first" else max
        return rewards[pick(segments_of, key=lambda other: turns[other])]

    everybody = list(range(len(segments)))
    without = {rollouts[row] for row in inside if expected(row, everybody) != expected(row, inside)}
    if without:
        with pytest.raises(
            BatchError, match=f"its {how} segment, but this segment was taken out of rollout"
        ) as refused:
            FanOutCollapse(reward=how, turn_key="turn")(batch)
        assert set(map(int, re.findall(r"rollout (\d+)", str(refused.value)))) == without
        batch[COUNTED] = torch.tensor([rollout not in without for rollout in rollouts]) & batch[COUNTED]
        inside = [row for row in inside if rollouts[row] not in without]
    found = FanOutCollapse(reward=how, turn_key="turn")(batch)[REWARD].tolist()
    assert found == [expected(row, inside) if row in inside else 0.0 for row in range(len(segments))]
    alone = collapse_fan_out(rewards, rollouts, reduce=how, turn=turns).reward.tolist()
    assert alone == [expected(row, everybody) for row in everybody]


def test_a_repeated_turn_of_a_rollout_is_refused(make_batch):
    batch = make_batch([1.0, 2.0, 3.0], [0, 0, 0], [7, 8, 7], turn=[4, 4, 4])
    message = r"must have different turns; found rollout 7 \(rows \[0, 2\]: \[4, 4\]\)"
    with pytest.raises(BatchError, match=message):
        FanOutCollapse(reward="last", turn_key="turn")(batch)
    with pytest.raises(BatchError, match=message):
        collapse_fan_out([1.0, 2, 3], [7, 8, 7], reduce="first", turn=[4, 4, 4])
    with pytest.raises(ValueError, match=r"turn_key is only read with .*; got it with reward='sum'"):
        FanOutCollapse(reward="sum", turn_key="turn")


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_rewards_may_have_any_shape_that_collectors_write(make_batch, shape):
    batch = make_batch([1.0, 3, 3], [0, 0, 0], [0, 1, 1])
    batch["next", "reward"] = batch["next", "reward"].view(shape)
    assert FanOutCollapse()(batch)[REWARD].tolist() == [1, 3, 3]


def test_a_reward_per_token_is_refused(make_batch):
    batch = make_batch([1.0, 3], [0, 0])
    batch["next", "reward"] = torch.zeros(2, 4)
    with pytest.raises(
        BatchError, match=r"one number per row in \('next', 'reward'\).*2 rows; found \(2, 4\)"
    ):
        FanOutCollapse()(batch)


def test_excluded_rows_are_not_used_or_checked(make_batch):
    batch = make_batch([float("nan"), 1.0, 3.0], [0, 0, 0], [0, 1, 2])
    batch[COUNTED] = torch.tensor([False, True, True])
    out = FanOutCollapse()(batch)
    assert out[REWARD].tolist() == [0, 1, 3]
    assert out[IS_FIRST_SEGMENT].tolist() == [False, True, True]
    assert GroupRelativeAdvantage(scale="none")(out)["advantage"].flatten().tolist() == [0, -1, 1]


def test_without_the_collapse_a_repeated_rollout_raises(make_batch):
    batch = make_batch([1.0, 3, 3], [0, 0, 0], [4, 5, 5])
    with pytest.raises(BatchError, match=r"one row; found rollout 5 in 2 rows.*put FanOutCollapse before"):
        GroupRelativeAdvantage()(batch)


def test_a_rollout_counts_once_if_its_first_row_leaves(make_batch):
    out = FanOutCollapse()(make_batch([1.0, 3, 3], [0, 0, 0], [0, 1, 1]))[torch.tensor([0, 2])]
    assert GroupRelativeAdvantage(scale="none")(out)["advantage"].flatten().tolist() == [-1, 1]


NAN = float("nan")


@pytest.mark.parametrize("rewards", [[NAN, 1.0], [1.0, NAN], [NAN, 0.0], [0.0, NAN]])
def test_segments_that_disagree_on_a_missing_reward_are_refused(make_batch, rewards):
    batch = make_batch([5.0, *rewards], [0, 0, 0], [8, 7, 7])
    found = re.escape(f"rollout 7 (rows [1, 2]: {[[value] for value in rewards]})")
    with pytest.raises(BatchError, match=rf"missing on all segments of its rollout; found {found}$"):
        FanOutCollapse(missing="skip")(batch)
    batch[COUNTED] = torch.tensor([True, True, False])  # an excluded segment is not compared
    assert FanOutCollapse(missing="skip")(batch)[IS_FIRST_SEGMENT].tolist() == [True, True, False]


def test_each_of_several_rewards_may_be_missing(make_batch):
    batch = make_batch([0.0] * 3, [0] * 3, [7, 7, 8])
    rewards = [[NAN, 2.0], [NAN, 2.0], [4.0, NAN]]
    batch["next", "reward"] = torch.tensor(rewards)
    outcome = said_by(FanOutCollapse(columns=2, missing="skip"), batch)
    assert torch.equal(outcome.batch[REWARDS].nan_to_num(-1), torch.tensor(rewards).nan_to_num(-1))
    assert outcome.batch[REWARD].tolist() == [2, 2, 4]
    assert outcome.metrics["reward_mean"] == 3
    for wrong in ([2.0, NAN], [NAN, NAN], [2.0, 2.0]):  # the segments disagree on both columns, or on one
        batch["next", "reward"][1] = torch.tensor(wrong)
        found = re.escape(f"rollout 7 (rows [0, 1]: [[nan, 2.0], {wrong}])")
        with pytest.raises(BatchError, match=f"missing on all segments of its rollout; found {found}"):
            FanOutCollapse(columns=2, missing="skip")(batch)


def test_a_missing_reward_is_refused_unless_skipped(make_batch):
    batch = make_batch([1.0, NAN], [0, 0])
    with pytest.raises(BatchError, match="must be finite; found nan at row 1"):
        FanOutCollapse()(batch)
    batch["next", "reward"][0] = float("inf")
    with pytest.raises(BatchError, match="must be finite; found inf at row 0"):
        FanOutCollapse(missing="skip")(batch)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("shared", None), ("first", 2.0), ("last", 3.0), ("sum", 6.0), ("mean", 2.0), ("max", 3.0)],
)
def test_reductions_equal_the_values_by_hand(reduce, expected):
    """A rollout has the rewards 2, 1 and 3, or 2 on all segments if they are shared."""
    rewards = [2.0, 7.0, 1.0, 3.0] if expected else [2.0, 7.0, 2.0, 2.0]
    found = collapse_fan_out(rewards, [5, 6, 5, 5], reduce=reduce)
    assert found.reward.tolist() == [expected or 2, 7, expected or 2, expected or 2]
    assert found.is_first_segment.tolist() == [True, True, False, False]


@pytest.mark.parametrize("how", ["first", "last"])
def test_a_rollout_of_one_row_keeps_its_reward_beside_others(how):
    """The first row and the last row of the batch may each be a whole rollout."""
    found = collapse_fan_out([1.0, 2, 3, 4], [9, 5, 5, 0], reduce=how).reward.tolist()
    assert found == [1, *[2.0 if how == "first" else 3.0] * 2, 4]


@pytest.mark.parametrize(("how", "expected"), [("first", 1.0), ("last", 2.0)])
def test_a_rollout_that_is_out_of_the_statistics_has_no_segment_to_choose(make_batch, how, expected):
    batch = make_batch([9.0, 1, 2, 9], [0] * 4, [8, 7, 7, 6])
    batch[COUNTED] = torch.tensor([False, True, True, False])
    assert FanOutCollapse(reward=how)(batch)[REWARD].tolist() == [0, expected, expected, 0]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float64),
    ],
)
def test_a_reward_has_at_least_the_precision_of_float32(make_batch, given, written):
    batch = make_batch([1.0, 3.0], [0, 0])
    batch["next", "reward"] = torch.tensor([[1], [3]], dtype=given)
    out = FanOutCollapse(weights=[2.0])(batch)
    assert (out[REWARD].dtype, out[REWARDS].dtype) == (written, written)
    assert (out[REWARD].tolist(), out[REWARDS].tolist()) == ([2, 6], [[1], [3]])


def test_a_sum_may_be_as_large_as_its_dtype_allows_and_no_larger(make_batch):
    most = torch.finfo(torch.float32).max
    batch = make_batch([most, 0.0, 1.0], [0, 0, 0], [7, 7, 8])
    assert FanOutCollapse(reward="sum")(batch)[REWARD].tolist() == [most, most, 1]
    batch["next", "reward"][1] = most
    assert FanOutCollapse(reward="max")(batch)[REWARD].tolist() == [most, most, 1]
    with pytest.raises(BatchError) as refused:
        FanOutCollapse(reward="sum")(batch)
    assert str(refused.value) == (
        f"the sum of a rollout's rewards must be finite in torch.float32; found [{2 * most}] for rollout 7. "
        "Give rewards of a larger dtype"
    )


@pytest.mark.parametrize(
    ("columns", "shape", "needed"),
    [(1, (2, 2), "one number"), (2, (2,), "2 numbers"), (3, (2, 2), "3 numbers")],
)
def test_another_number_of_rewards_than_columns_is_refused(make_batch, columns, shape, needed):
    batch = make_batch([1.0, 3], [0, 0]).set(("next", "reward"), torch.zeros(shape))
    with pytest.raises(BatchError) as refused:
        FanOutCollapse(columns=columns)(batch)
    assert str(refused.value) == (
        f"FanOutCollapse needs {needed} per row in ('next', 'reward') (reward_key), for 2 rows; found "
        f"{shape}. If these are several rewards, set columns to their number"
    )


@pytest.mark.parametrize("missing", ["skip", "mask"])
def test_excluded_and_missing_rewards_are_in_no_number(make_batch, missing):
    """Row 0 was excluded before; rollout 8 has no reward, and rollout 9 lacks one of two."""
    batch = make_batch([0.0] * 5, [0] * 5, [6, 7, 7, 8, 9])
    rewards = [[NAN, 5.0], [1.0, 2.0], [1.0, 2.0], [NAN, NAN], [4.0, NAN]]
    batch["next", "reward"] = torch.tensor(rewards)
    batch[COUNTED] = torch.arange(5) > 0
    said = said_by(FanOutCollapse(columns=2, weights=[3.0, 1.0], missing=missing), batch)
    out = said.batch
    none = -1.0 if missing == "skip" else 0.0  # NaN or, if the rollout is excluded, 0
    assert out[REWARDS].nan_to_num(-1).tolist() == [[0, 0], [1, 2], [1, 2], [none, none], [4, -1]]
    assert out[REWARD].nan_to_num(-1).tolist() == [0, 5, 5, none, 12]
    assert out[IS_FIRST_SEGMENT].tolist() == [False, True, False, missing == "skip", True]
    assert said.metrics == {"rollouts": 3 if missing == "skip" else 2, "reward_mean": 8.5}
    masked = ["trained"] * 3 + ["no_reward" if missing == "mask" else "trained", "trained"]
    assert said.reasons == masked
    assert out[COUNTED].tolist() == [False, True, True, missing == "skip", True]


def test_sums_and_means_are_exact_beside_a_large_segment():
    rewards = [2.0**25, 1.0, -(2.0**25)]  # in float32 1 + 2²⁵ is 2²⁵
    assert collapse_fan_out(rewards, [0, 0, 0], reduce="sum").reward.tolist() == [1] * 3
    assert collapse_fan_out(rewards, [0, 0, 0], reduce="mean").reward.tolist() == pytest.approx([1 / 3] * 3)


def test_a_long_list_of_rows_is_cut_and_the_rest_is_counted():
    with pytest.raises(BatchError, match=r"found -1 at row 0, .*-1 at row 7 and 12 more"):
        collapse_fan_out([1.0] * 20, [-1] * 20)

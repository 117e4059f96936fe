"""The segments of one rollout count as one rollout."""

from __future__ import annotations

import re
import statistics

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

OF_SEGMENTS = {
    "first": lambda own: own[0],
    "last": lambda own: own[-1],
    "sum": sum,
    "mean": statistics.fmean,
    "max": max,
}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=20, unique=True),
    st.sampled_from([*OF_SEGMENTS]),
    st.lists(st.booleans(), min_size=20, max_size=20),
    st.booleans(),
)
def test_reductions_equal_loops_over_the_segments_that_count(segments, how, counted, by_turn):
    """The segments of a rollout are in the order of the rows, or in that of a column.

    If its first or last segment is excluded and others are not, a rollout is refused under this reduction.
    """
    by_turn = by_turn and how in ("first", "last")
    rollouts, turns = [rollout for rollout, _ in segments], [turn for _, turn in segments]
    order = turns if by_turn else list(range(len(segments)))
    rewards = [float(number * (-1) ** number) for number in range(len(segments))]
    batch = batch_of(rewards, rollouts, rollouts, turn=turns)
    inside = [row for row in range(len(segments)) if counted[row]]

    def expected(rows: list[int]) -> list[float]:
        of = {}
        for row in sorted(rows, key=lambda row: order[row]):
            of.setdefault(rollouts[row], []).append(rewards[row])
        return [OF_SEGMENTS[how](of[rollouts[row]]) if row in rows else 0.0 for row in range(len(segments))]

    everybody = expected(list(range(len(segments))))
    function = collapse_fan_out(rewards, rollouts, reduce=how, turn=turns if by_turn else None)
    assert function.reward.tolist() == pytest.approx(everybody, rel=1e-6)
    assert function.is_first_segment.tolist() == [rollouts.index(own) == n for n, own in enumerate(rollouts)]
    stage = FanOutCollapse(reward=how, turn_key="turn" if by_turn else None)
    batch[COUNTED] = torch.tensor(counted[: len(segments)])
    without = {rollouts[row] for row in inside if expected(inside)[row] != everybody[row]}
    if without and how in ("first", "last"):
        said = f"its {how} segment, but this segment was taken out of rollout"
        with pytest.raises(BatchError, match=said) as refused:
            stage(batch)
        assert set(map(int, re.findall(r"rollout (\d+)", str(refused.value)))) == without
        batch[COUNTED] &= torch.tensor([rollout not in without for rollout in rollouts])
        inside = [row for row in inside if rollouts[row] not in without]
    assert stage(batch)[REWARD].tolist() == pytest.approx(expected(inside), rel=1e-6)


def test_segment_rewards_must_agree_if_they_are_shared(make_batch):
    batch = make_batch([1.0, 2.0, 5.0], [0, 0, 0], [7, 7, 8])
    with pytest.raises(BatchError, match=r"rollout 7 \(rows \[0, 1\]: \[1.0, 2.0\]\).*reward='sum'"):
        FanOutCollapse()(batch)
    for shape in ((3,), (3, 1), (3, 1, 1)):  # as collectors write them
        batch["next", "reward"] = torch.tensor([1.0, 1.0, 5.0]).view(shape)
        out = FanOutCollapse()(batch)
        assert out[REWARD].tolist() == [1, 1, 5]
        assert out[IS_FIRST_SEGMENT].tolist() == [True, False, True]


def test_a_repeated_turn_of_a_rollout_is_refused(make_batch):
    batch = make_batch([1.0, 2.0, 3.0], [0, 0, 0], [7, 8, 7], turn=[4, 4, 4])
    message = r"must have different turns; found rollout 7 \(rows \[0, 2\]: \[4, 4\]\)"
    with pytest.raises(BatchError, match=message):
        FanOutCollapse(reward="last", turn_key="turn")(batch)
    with pytest.raises(BatchError, match=message):
        collapse_fan_out([1.0, 2, 3], [7, 8, 7], reduce="first", turn=[4, 4, 4])
    with pytest.raises(ValueError, match=r"turn_key is only read with .*; got it with reward='sum'"):
        FanOutCollapse(reward="sum", turn_key="turn")


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


NAN = float("nan")


@pytest.mark.parametrize(
    "rewards",
    [[[NAN], [1.0]], [[0.0], [NAN]], [[NAN, 2.0], [2.0, NAN]], [[NAN, 2.0], [NAN, NAN]], [[NAN, 2], [2, 2]]],
)
def test_segments_that_disagree_on_a_missing_reward_are_refused(make_batch, rewards):
    """They disagree on the only reward, on both, or on one of two."""
    stage = FanOutCollapse(missing="skip", columns=len(rewards[0]))
    batch = make_batch([0.0] * 3, [0, 0, 0], [8, 7, 7])
    batch["next", "reward"] = torch.tensor([rewards[0], *rewards])
    found = re.escape(f"rollout 7 (rows [1, 2]: {batch['next', 'reward'][1:].tolist()})")
    with pytest.raises(BatchError, match=rf"missing on all segments of its rollout; found {found}$"):
        stage(batch)
    batch[COUNTED] = torch.tensor([True, True, False])  # an excluded segment is not compared
    assert stage(batch)[IS_FIRST_SEGMENT].tolist() == [True, True, False]


def test_a_missing_reward_is_refused_unless_skipped(make_batch):
    batch = make_batch([1.0, NAN], [0, 0])
    with pytest.raises(BatchError, match="must be finite; found nan at row 1"):
        FanOutCollapse()(batch)
    batch["next", "reward"][0] = float("inf")
    with pytest.raises(BatchError, match="must be finite; found inf at row 0"):
        FanOutCollapse(missing="skip")(batch)


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
    stage = FanOutCollapse(columns=2, weights=[3.0, 1.0], missing=missing)
    said = said_by(stage, batch)
    out = said.batch
    assert {*out.keys(True, True)} == {*batch.keys(True, True), *stage.out_keys}
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

"""Shaping changes the reward of each rollout once. Shaping by length equals loops over a group."""

from __future__ import annotations

import statistics

import pytest
import torch
from alone import said_by
from batches import batch_of
from drawn_rollouts import batch_of_rollouts, rollouts
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    FanOutCollapse,
    GroupRelativeAdvantage,
    OverlongPunishment,
    RelativeLength,
    RewardShaping,
    RewardWithin,
    SampleFilter,
)
from headrace.transforms.stages.shaping import relative_length
from headrace.transforms.table.schema import REWARD

MASK = ("masks", "all_assistant_mask")


class Bonus(RewardShaping):
    """R + `by` for every rollout."""

    def __init__(self, *, by: float = 1.0, **names):
        super().__init__(**names)
        self.by = by

    def shape(self, reward, rollouts):
        return reward + self.by


class Seen(RewardShaping, columns=("group", "loss_mask")):
    """A shaping that adds the tone, and keeps the arguments of `shape`."""

    reads = ("tone",)

    def shape(self, reward, rollouts):
        columns = reward, rollouts.lengths, rollouts.groups.labels, rollouts["tone"], rollouts["rollout"]
        self.seen = [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return reward + rollouts["tone"]


@settings(max_examples=20)
@given(rollouts(), st.sampled_from(["none", "group"]), st.sampled_from(["mean", "leave_one_out", "median"]))
def test_a_bonus_for_every_rollout_changes_no_advantage(drawn, scale, baseline):
    found, order = drawn
    found = [(group, label, round(8 * reward), lengths) for group, label, reward, lengths in found]
    advantage = GroupRelativeAdvantage(scale=scale, baseline=baseline)
    batch = batch_of_rollouts(found, order)
    given, plain = advantage(Bonus()(batch))["advantage"], advantage(batch)["advantage"]
    torch.testing.assert_close(given, plain, rtol=1e-6, atol=1e-6)


@settings(max_examples=20)
@given(rollouts())
def test_shape_gets_each_rollout_once_with_its_reward_length_and_group(drawn):
    """Metrics count a rollout once, too."""
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    batch["tone"] = (batch["rollout_id"] % 2).double()
    said = said_by(stage := Seen(), batch)
    assert torch.equal(said.batch[REWARD], batch[REWARD] + batch["tone"])
    expected = [(own, sum(lengths), group, label % 2, label) for group, label, own, lengths in found]
    assert sorted(stage.seen) == sorted(expected)
    odd = statistics.fmean(label % 2 for _, label, _, _ in found)
    assert said.metrics == {"reward_changed": pytest.approx(odd), "mean": pytest.approx(odd, abs=1e-6)}


def test_an_excluded_rollout_keeps_its_reward_and_a_missing_reward_stays_missing():
    batch = batch_of([1.0, 9.0, float("nan"), 2.0], [0, 0, 0, 0])
    out = SampleFilter(criterion=RewardWithin(high=5.0), action="exclude")
    kept = Pipeline({"collapse": FanOutCollapse(missing="skip"), "out": out, "bonus": Bonus()})(batch)
    assert kept[REWARD].tolist() == [2.0, 9.0, pytest.approx(float("nan"), nan_ok=True), 3.0]
    none = batch.set(REWARD, torch.full((4,), torch.nan))
    assert said_by(Bonus(), none).metrics == {"reward_changed": 0.0, "mean": 0.0}

    class Filled(RewardShaping):
        def shape(self, reward, rollouts):
            return torch.zeros_like(reward)

    assert Filled()(FanOutCollapse(missing="skip")(batch))[REWARD].isnan().tolist() == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("returned", [torch.ones(3), 1.0, None])
def test_shape_must_return_one_reward_for_each_rollout(returned):
    class Odd(RewardShaping):
        def shape(self, reward, rollouts):
            return returned

    batch = FanOutCollapse()(batch_of([1.0, 1.0, 0.0], [0, 0, 0], [4, 4, 5]))
    with pytest.raises(BatchError, match=r"Odd.shape must return one reward for each of 2 rollouts; it retu"):
        Odd()(batch)


def test_a_reward_that_becomes_nan_is_refused_with_its_stage_and_rollout():
    class Odd(RewardShaping):
        def shape(self, reward, rollouts):
            return torch.where(rollouts["rollout"] == 5, reward.log(), reward)

    chain = Pipeline({"collapse": FanOutCollapse(), "odd": Odd()})
    said = r"^stage 'odd', Odd\(\).*returned {} for rollout_id 5, whose reward was {}$"
    for reward, returned in ((0.0, "-inf"), (-1.0, "nan")):
        with pytest.raises(BatchError, match=said.format(returned, reward)):
            chain(batch_of([1.0, 1.0, reward], [0, 0, 0], [4, 4, 5]))


class Misspelt(RewardShaping):
    def shap(self, reward, rollouts):
        return reward


class Alone(RewardShaping):
    def shape(self, reward):
        return reward


def doubled(reward, rollouts):
    return 2 * reward


TO_WRITE = """a RewardShaping needs a method shape(self, reward, rollouts). Give an object of a subclass:

class Mine(RewardShaping):
    def shape(self, reward, rollouts):  # (V,) float64: a reward for each rollout
        return 2 * reward"""


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: RewardShaping(), ""),
        (lambda: RewardShaping(doubled), ""),
        (lambda: RewardShaping(shape=doubled), ""),
        (lambda: Misspelt(), "Misspelt defines shap(self, reward, rollouts); "),
        (lambda: Alone(), "Alone defines shape(self, reward); "),
        (lambda: Pipeline({"mine": doubled}), "takes (reward, rollouts). If it changes rewards: "),
    ],
)
def test_a_shaping_without_a_fitting_method_is_answered_with_the_class_to_write(make, found):
    with pytest.raises((TypeError, ValueError)) as refused:
        make()
    said = str(refused.value)
    assert said.endswith(found + TO_WRITE)
    assert found or said == TO_WRITE


def test_the_class_to_write_doubles_the_rewards():
    written = {"RewardShaping": RewardShaping}
    exec(TO_WRITE.partition("\n\n")[2], written)
    assert written["Mine"]()(FanOutCollapse()(batch_of([1.0, 0.5], [0, 0])))[REWARD].tolist() == [2.0, 1.0]


def test_a_shaping_that_is_given_an_option_by_place_is_told_its_name():
    """It has a method `shape`, so it needs no class to write."""
    with pytest.raises(TypeError, match=r"^Bonus takes its options by name: Bonus\(by=2.0\)$"):
        Bonus(2.0)
    with pytest.raises(TypeError, match=r"^RewardShaping takes its options by name: RewardShaping\("):
        Seen("uid")


def test_a_class_adds_its_columns_to_those_of_the_base_class():
    assert Bonus().in_keys == [REWARD, "rollout_id"]
    assert Seen(group_key="uid").in_keys == [REWARD, "rollout_id", "uid", MASK, "tone"]
    assert repr(Bonus(by=2.0)) == "Bonus(by=2.0)"


class OfRows(BatchTransform, columns=("reward",)):
    """A stage that adds 1 to the reward of each row, and is not a RewardShaping."""

    def __init__(self, **names):
        self.name_columns(names)
        super().__init__([self.reward_key], [self.reward_key])

    def decide(self, rows):
        rows.put("reward", rows["reward"] + 1)


def test_a_stage_that_changes_rewards_after_the_collapse_must_be_a_shaping():
    message = (
        r"stage 'collapse' reads \('next', 'reward'\), which 'bonus' writes later.* make 'bonus' a "
        r"headrace.RewardShaping, and put it between 'collapse' and the advantage.* put 'bonus' before"
    )
    with pytest.raises(ValueError, match=message):
        Pipeline({"collapse": FanOutCollapse(), "bonus": OfRows(), "advantage": GroupRelativeAdvantage()})
    with pytest.raises(ValueError, match=r"reads .*'headrace', 'reward'.*Put 'collapse' before 'bonus'"):
        Pipeline({"bonus": Bonus(), "collapse": FanOutCollapse(), "advantage": GroupRelativeAdvantage()})


def test_a_function_that_changes_rewards_after_the_collapse_is_refused():
    def bonus(batch):
        return batch.set(("next", "reward"), batch["next", "reward"] + 1)

    batch, advantage = batch_of([1.0, float("nan"), 0.0], [0, 0, 0]), GroupRelativeAdvantage(missing="skip")
    collapse = FanOutCollapse(missing="skip")
    with pytest.raises(
        BatchError, match=r"stage 'bonus'.* the change would have no effect. Change .*RewardShaping"
    ):
        Pipeline({"collapse": collapse, "bonus": bonus, "advantage": advantage})(batch)
    out = Pipeline({"collapse": collapse, "same": lambda batch: batch, "advantage": advantage})(batch)
    assert out["advantage"].flatten().tolist() == pytest.approx([0.7071, 0.0, -0.7071], abs=1e-4)


@settings(max_examples=20)
@given(rollouts(), st.sampled_from([0.0, 0.5, 1.0]))
def test_lengths_are_compared_with_the_mean_of_the_group_or_of_its_successes(drawn, coefficient):
    """A loop computes the bonus of prime-rl (orchestrator/algo/advantage.py) and GR³ (arXiv:2603.10535).

    Rollouts whose id is divisible by 4 have no reward. The function gets all rows of a rollout.
    """
    found, order = drawn
    batch, expected, length = batch_of_rollouts(found, order), {}, {}
    batch[REWARD][batch["rollout_id"] % 4 == 0] = torch.nan
    for group, label, own, lengths in found:
        members = [each for each in found if each[0] == group and each[1] % 4]
        best = max((each[2] for each in members), default=0.0)
        of_all, of_best = (
            statistics.fmean(sum(each[3]) for each in some) if some else 1.0
            for some in (members, [each for each in members if each[2] == best > 0])
        )
        length[label], own = sum(lengths), own if label % 4 else float("nan")
        bonus = min(max(1 - length[label] / of_best, 0), 1) if own == best > 0 else 0
        expected[label] = own * (1 + coefficient * bonus), own / (1 + coefficient * length[label] / of_all)
    lengths = torch.tensor([length[label] for label in batch["rollout_id"].tolist()])
    for number, form in enumerate(("bonus", "rescale")):
        options = {"form": form, "coefficient": coefficient}
        shaped = RelativeLength(**options)(batch)[REWARD]
        assert shaped.tolist() == pytest.approx(
            [expected[label][number] for label in batch["rollout_id"].tolist()], rel=1e-12, nan_ok=True
        )
        factor = relative_length(batch[REWARD], lengths, batch["group_id"], batch["rollout_id"], **options)
        torch.testing.assert_close(batch[REWARD] * factor, shaped, equal_nan=True)


def test_only_rescale_refuses_a_negative_reward():
    batch = FanOutCollapse()(batch_of([1.0, -0.5], [0, 0]))
    with pytest.raises(BatchError, match=r"needs rewards ≥ 0.*found -0.5 at row 1"):
        RelativeLength(form="rescale", coefficient=1.0)(batch)
    assert RelativeLength(coefficient=1.0)(batch)[REWARD][1] == -0.5


def test_without_success_no_length_is_penalized():
    batch = FanOutCollapse()(batch_of([-0.5, -0.5, -2], [0, 0, 0]))
    batch[MASK] = torch.arange(4) < torch.tensor([1, 4, 1])[:, None]
    assert RelativeLength(coefficient=1.0)(batch)[REWARD].tolist() == [-0.5, -0.5, -2]
    lengths, group = torch.tensor([1, 4, 1]), torch.zeros(3, dtype=torch.int64)
    assert relative_length(torch.tensor([0.0, 0, -2]), lengths, group).tolist() == [1, 1, 1]


def test_a_rollout_alone_is_as_long_as_the_mean_unless_it_is_empty():
    for length, factor in ((0, 1.0), (1, 0.5), (2, 0.5)):
        one = torch.ones(1), torch.tensor([length]), torch.zeros(1, dtype=torch.int64)
        assert relative_length(*one, form="rescale").tolist() == [factor]
        assert relative_length(*one).tolist() == [1.0]


def test_excluded_rollouts_are_not_in_length_statistics():
    batch = batch_of([1.0, 1, 1], [0, 0, 0])
    batch[MASK] = torch.arange(4) < torch.tensor([2, 4, 1])[:, None]
    out = SampleFilter(criterion=lambda batch: batch["rollout_id"] < 2, action="exclude")
    shaped = RelativeLength(coefficient=1.0)(FanOutCollapse()(out(batch)))[REWARD].tolist()
    assert shaped[:2] == pytest.approx([1 + 1 / 3, 1.0])  # lengths 2 and 4, with mean 3


@pytest.mark.parametrize("cache", [-1, 0, 11])
def test_the_cache_of_an_overlong_punishment_is_above_0_and_at_most_the_length(cache):
    for fits in (1, 10):
        OverlongPunishment(max_length=10, cache=fits)
    with pytest.raises(ValueError, match=rf"cache must be in \(0, max_length\]; got {cache} and 10$"):
        OverlongPunishment(max_length=10, cache=cache)

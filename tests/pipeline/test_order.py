"""Orders that cannot work are refused before any rollout."""

from __future__ import annotations

import pytest
from busy import stages
from composed import composed
from tensordict.nn import TensorDictModule

from headrace.pipeline import Pipeline
from headrace.transforms import (
    FanOutCollapse,
    Finite,
    GroupRelativeAdvantage,
    LengthWithin,
    RewardsVary,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
)


def ten_times() -> TensorDictModule:
    """A stage that is not of headrace, and says what it reads and writes."""
    keys = [("next", "reward")]
    return TensorDictModule(lambda reward: 10 * reward, in_keys=keys, out_keys=keys)


def test_order_inserts_a_stage_in_the_middle(make_batch):
    late = {"advantage": GroupRelativeAdvantage(scale="none"), "collapse": FanOutCollapse()}
    pipeline = Pipeline(late, order=["collapse", "advantage"])
    assert list(pipeline.stages) == pipeline.order == ["collapse", "advantage"]
    assert pipeline(make_batch([1.0, 3, 3], [0, 0, 0], [0, 1, 1]))["advantage"].flatten().tolist() == [
        -1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["collapse"], "order must name each stage once"),
        (["collapse", "collapse", "advantage"], "order must name each stage once"),
        (["colapse", "advantage"], r"'colapse' \(did you mean 'collapse'\?\).*The stages are \['advantage'"),
        (
            ["advantage", "collapse"],
            r"stage 'advantage' reads \('headrace', 'reward'\), which 'collapse' writes",
        ),
    ],
)
def test_an_order_that_cannot_work_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        Pipeline({"advantage": GroupRelativeAdvantage(), "collapse": FanOutCollapse()}, order=order)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["split", "gate"], "'gate' comes after 'split'.*in its in_keys"),
        (["advantage", "exclude"], r"'advantage' reads \('headrace', 'counted'\), which 'exclude' writes"),
        (["vary", "collapse"], "'vary' reads .*which 'collapse' writes"),
        (["advantage", "scale"], r"'advantage' reads \('next', 'reward'\), which 'scale' writes"),
    ],
)
def test_stages_without_effect_are_refused(names, message):
    possible = stages(
        exclude=SampleFilter(criterion=RewardWithin(), action="exclude"),
        vary=SampleFilter(criterion=RewardsVary()),
        scale=ten_times(),
    )
    with pytest.raises(ValueError, match=message):
        Pipeline({name: possible[name] for name in names})


def test_stages_that_change_a_column_in_sequence_are_accepted(make_batch):
    twice = {f"scale{i}": ten_times() for i in range(2)}
    pipeline = Pipeline(twice | {"advantage": GroupRelativeAdvantage(scale="none")})
    assert pipeline(make_batch([1.0, 3], [0, 0]))["advantage"].flatten().tolist() == [-100, 100]


def test_stages_with_an_effect_are_accepted():
    pipeline = Pipeline(
        {
            "finite": SampleFilter(criterion=Finite(), action="exclude"),
            **stages(),
            "split": None,
            "empty": SampleFilter(criterion=LengthWithin(low=1), action="drop"),
            "cut": ShuffleSplit(minibatches=1),
        }
    )
    assert pipeline.order == ["finite", "gate", "collapse", "filter", "advantage", "empty", "cut"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": 3}, "stage 'x' must be a transform or a callable"),
        ({"x": FanOutCollapse}, "stage 'x' must be a transform or a callable; got <class"),
        ({"x": Pipeline({})}, "stage 'x' is a pipeline"),
    ],
)
def test_an_object_that_is_no_stage_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(given)


@pytest.mark.slow
def test_one_override_removes_a_stage_also_from_an_order():
    for word in ("overlong", "split"):
        expected = composed("pipeline=dapo").order
        expected.remove(word)
        assert composed("pipeline=dapo", f"~pipeline.stages.{word}").order == expected

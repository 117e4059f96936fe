"""Orders that cannot work are refused before any rollout."""

from __future__ import annotations

import pytest
import torch
from busy import stages
from composed import composed
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from headrace.pipeline import ConfigError, Pipeline, load_pipeline
from headrace.pipeline.order import arrange, with_places
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
    """A stage from outside of headrace that declares the columns it reads and writes."""
    keys = [("next", "reward")]
    return TensorDictModule(lambda reward: 10 * reward, in_keys=keys, out_keys=keys)


def test_order_decides_the_order_of_the_stages(make_batch):
    late = {"advantage": GroupRelativeAdvantage(scale="none"), "collapse": FanOutCollapse()}
    pipeline = Pipeline(late, order=["collapse", "advantage"])
    assert list(pipeline.stages) == pipeline.order == ["collapse", "advantage"]
    assert pipeline(make_batch([1.0, 3, 3], [0, 0, 0], [0, 1, 1]))["advantage"].flatten().tolist() == [
        -1,
        1,
        1,
    ]


BASE = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("after", "before", "found"),
    [
        ({"x": "a"}, None, "axbc"),
        (None, {"x": "a"}, "xabc"),
        ({"x": "c"}, None, "abcx"),
        ({"x": "b", "y": "b"}, None, "abxyc"),  # in the order of the mapping
        ({"y": "b", "x": "b"}, None, "abyxc"),
        (None, {"x": "b", "y": "b"}, "axybc"),
        ({"x": "a"}, {"y": "b"}, "axybc"),
        ({"y": "x", "x": "a"}, None, "axybc"),  # next to a stage that is itself placed
        ({"x": "a"}, {"y": "x"}, "ayxbc"),
        ({"x": "a", "y": None}, {"y": "c"}, "axbyc"),  # None: not placed here
        ({"x": None}, {"y": None}, "abc"),
    ],
)
def test_a_new_stage_is_directly_after_or_before_another(after, before, found):
    assert "".join(with_places([*"abcxy"], BASE, after, before)) == found
    if "".join(sorted(found)) == "abcxy":  # without `order` the other stages keep the order of the mapping
        assert "".join(with_places([*"yaxbc"], None, after, before)) == found


@pytest.mark.parametrize(
    ("after", "before", "message"),
    [
        ({"x": "bb"}, None, r"^after.x=bb names the unknown stage 'bb' .*The stages are a, b, c, x, y$"),
        (None, {"z": "b"}, r"^before.z=b names the unknown stage 'z'. The stages are"),
        (
            {"b": "c"},
            None,
            r"^after.b=c places a stage that pipeline.order names, too. .*pipeline.after.b=null",
        ),
        (None, {"b": "a"}, r"^before.b=a places a stage that pipeline.order names, too"),
        # two places are refused even if they are the same place
        ({"x": "a"}, {"x": "c"}, r"^'x' has two places, after.x=a and before.x=c. Keep .*pipeline.after.x=n"),
        ({"x": "a"}, {"x": "b"}, "^'x' has two places, after.x=a and before.x=b"),
        ({"x": "y"}, {"y": "x"}, r"^after and before give 'y', 'x' no place: each is next to another"),
        ({"x": "x"}, None, "give 'x' no place"),
        ({"x": "y", "y": "x"}, None, "give 'x', 'y' no place"),
        ({"x": ["b"]}, None, r"^after.x=\['b'\] names the unknown stage \['b'\]"),
        ({"x": 1}, None, "^after.x=1 names the unknown stage 1"),
    ],
)
def test_an_impossible_place_is_refused(after, before, message):
    with pytest.raises(ValueError, match=message):
        with_places([*"abcxy"], BASE, after, before)


def test_a_stage_that_is_removed_still_places_others():
    """A recipe may place a stage next to a stage that the caller removes, or place the removed stage."""
    given = {"a": print, "b": None, "x": print, "y": None}
    assert list(arrange(given, ["a", "b"], after={"x": "b", "y": "a"})) == ["a", "x"]


def test_a_pipeline_inserts_a_stage_before_another():
    made = stages(mine=ten_times())
    pipeline = Pipeline(made, before={"mine": "gate"})
    assert pipeline.order == ["mine", *(name for name in made if name != "mine")]


def test_a_stage_without_a_place_is_refused_with_the_options_that_place_it():
    """Of several stages, all are listed, and a place is advised for the first. The other one fits nowhere."""
    given = {
        "collapse": FanOutCollapse(),
        "advantage": GroupRelativeAdvantage(),
        "b": print,
        "a": ten_times(),
    }
    with pytest.raises(ValueError) as refused:
        arrange(given, ["collapse", "advantage"])
    assert str(refused.value) == (
        "order must name each stage once; it lacks 'b', 'a'. Place it, as in pipeline.after.b=advantage (in "
        "Python after={'b': 'advantage'}), or add it to pipeline.order=[collapse,advantage]"
    )
    with pytest.raises(ValueError) as refused:
        arrange(given, ["colapse", "advantage", "d"])
    assert str(refused.value) == (
        "order names unknown stages: 'colapse' (did you mean 'collapse'?); 'd'. The stages are ['collapse', "
        "'advantage', 'b', 'a']. To remove a stage that a recipe's order names, set "
        "pipeline.stages.NAME=null (in Python None)"
    )
    with pytest.raises(ValueError, match=r"it lacks 'advntage', 'x' \(did you mean 'advantage'\?\)"):
        arrange({"advantage": print, "advntage": print, "x": print}, ["advantage"])
    with pytest.raises(ValueError, match=r"^order must name each stage once; it names a, b more than once$"):
        arrange({"a": print, "b": print, "c": print}, [*"bbcaa"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["advantage", "collapse"], r"'advantage' reads \('headrace', 'reward'\), which 'collapse' writes"),
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
        ({"x": 3}, "stage 'x': a stage must be a transform or a callable; got 3"),
        ({"x": FanOutCollapse}, r"stage 'x': a stage is an object; got the class FanOutCollapse: give Fan"),
        ({"x": Pipeline({})}, "stage 'x' is a pipeline"),
    ],
)
def test_an_object_that_is_not_a_stage_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(given)


@pytest.mark.slow
def test_one_override_removes_a_stage_and_its_place_in_the_order():
    for word in ("overlong", "split"):
        expected = composed("pipeline=dapo").order
        expected.remove(word)
        assert composed("pipeline=dapo", f"~pipeline.stages.{word}").order == expected


def test_the_error_for_excluding_after_the_advantage_names_the_accepted_actions():
    def pipeline(action):
        late = SampleFilter(criterion=RewardWithin(), action=action)
        return Pipeline({"collapse": FanOutCollapse(), "advantage": GroupRelativeAdvantage(), "late": late})

    with pytest.raises(ValueError, match=r"after 'advantage', use action='mask' or 'drop'$"):
        pipeline("exclude")
    for action in ("mask", "drop"):
        assert pipeline(action).order[-1] == "late"


# -- the advantage that the loss reads ---------------------------------------------------------------------


class Declares(torch.nn.Module):
    """A stage that declares what it writes."""

    def __init__(self, *columns):
        super().__init__()
        self.in_keys, self.out_keys = [("next", "reward")], [*columns]

    def forward(self, batch):
        return batch.copy().update({key: torch.ones(len(batch), 1, 1) for key in self.out_keys})


def four():
    rows = {("next", "reward"): torch.tensor([0.0, 1, 0, 1]), "expected_rollouts": torch.full((4,), 4)}
    rows["masks", "all_assistant_mask"] = torch.ones(4, 2).bool()
    return TensorDict(
        rows | {"group_id": torch.zeros(4).int(), "rollout_id": torch.arange(4)}, batch_size=[4]
    )


def test_a_stage_in_place_of_the_advantage_must_write_it():
    said = (
        r"must write the column 'advantage', which the loss reads; its out_keys are \['mine'\]. If the batch"
    )
    with pytest.raises(ConfigError, match=said):
        load_pipeline("grpo", stages={"advantage": Declares("mine")})


@pytest.mark.parametrize(
    "stage",
    [Declares("advantage"), lambda batch: batch.copy().set("advantage", torch.ones(len(batch), 1, 1))],
)
def test_a_stage_of_yours_may_write_the_advantage(stage):
    run = load_pipeline("grpo", stages={"advantage": stage}).run(four())
    assert run.batch["advantage"].flatten().tolist() == [1.0] * 4


def test_a_stage_named_advantage_may_change_that_of_an_earlier_stage():
    twice = {"first": GroupRelativeAdvantage(scale="none"), "advantage": lambda batch: doubled(batch.copy())}
    assert Pipeline(twice).run(four()).batch["advantage"].flatten().tolist() == [-1.0, 1.0, -1.0, 1.0]
    same = {"first": GroupRelativeAdvantage(scale="none"), "advantage": lambda batch: batch}
    assert Pipeline(same).run(four()).batch["advantage"].flatten().tolist() == [-0.5, 0.5, -0.5, 0.5]


def doubled(batch):
    return batch.set("advantage", 2 * batch["advantage"])


def test_a_pipeline_without_a_stage_for_the_advantage_is_allowed():
    """The rows may bring their advantages, or the loss may read none."""
    pipeline = load_pipeline("grpo", stages={"advantage": None})
    assert "advantage" not in pipeline.run(four()).batch.keys()
    brought = four().set("advantage", torch.full((4, 1, 1), 2.0))
    assert pipeline.run(brought).batch["advantage"].flatten().tolist() == [2.0] * 4

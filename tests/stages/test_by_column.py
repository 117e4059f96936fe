"""A batch of several environments is decided as if each environment had a batch of its own."""

from __future__ import annotations

import random

import pytest
import torch
from batches import batch_of
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline, make_report
from headrace.transforms import (
    BatchError,
    ByColumn,
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LengthPenalty,
    LossWeight,
    NotTruncated,
    RewardScale,
    RewardsVary,
    RewardWithin,
    RolloutCorrection,
    RunningBaseline,
    SampleFilter,
    SignFactors,
    TokenFilter,
    TrainSharedOnce,
    TurnAdvantage,
)
from headrace.transforms.table.schema import REWARD

ENVIRONMENTS = ("math", "code", "games")
ADVANTAGES = [
    {"baseline": "mean", "scale": "group"},
    {"baseline": "leave_one_out", "scale": "none"},
    {"baseline": "median", "scale": "none", "shift": 0.25},
    {"baseline": "mean", "scale": "batch"},
    {"baseline": "batch", "scale": "none"},
]
FILTERS = [
    {"criterion": RewardsVary(), "action": "exclude"},
    {"criterion": RewardWithin(high=0.8), "action": "exclude"},
]


def drawn(seed: int) -> tuple[TensorDict, dict[str, dict]]:
    """Groups with fan-out from several environments, and the options of each environment."""
    rng = random.Random(seed)
    rewards, groups, rollouts, homes = [], [], [], []
    for group in range(rng.randint(3, 9)):
        home = rng.choice(ENVIRONMENTS)
        for number in range(rng.randint(1, 5)):
            reward = rng.choice([0.0, 1.0, rng.random()])
            for _ in range(rng.choice([1, 1, 2, 3])):
                rewards.append(reward)
                groups.append(group)
                rollouts.append(10 * group + number)
                homes.append(home)
    order = rng.sample(range(len(rewards)), len(rewards))
    rewards, groups, rollouts, homes = (
        [column[at] for at in order] for column in (rewards, groups, rollouts, homes)
    )
    batch = batch_of(rewards, groups, rollouts, tokens=4)
    batch["next", "reward"] = batch["next", "reward"].double()
    batch["environment"] = homes if seed % 2 else torch.tensor([ENVIRONMENTS.index(home) for home in homes])
    options = {
        home: {
            "penalty": {"coefficient": rng.choice([0.0, 0.1])},
            "filter": rng.choice(FILTERS),
            "advantage": rng.choice(ADVANTAGES),
        }
        for home in ENVIRONMENTS
    }
    return batch, options


def of_one(options: dict) -> dict:
    return {
        "penalty": LengthPenalty(**options["penalty"]),
        "filter": SampleFilter(**options["filter"]),
        "advantage": GroupRelativeAdvantage(**options["advantage"]),
    }


def test_each_environment_is_decided_as_if_alone():
    excluded = 0
    for seed in range(12):
        batch, options = drawn(seed)
        names = {home: home if seed % 2 else number for number, home in enumerate(ENVIRONMENTS)}
        stages = {
            stage: ByColumn(
                column="environment", stages={names[home]: of_one(options[home])[stage] for home in names}
            )
            for stage in ("penalty", "filter", "advantage")
        }
        run = Pipeline({"collapse": FanOutCollapse(), **stages}).run(batch)
        column, said = batch["environment"], make_report(run).columns
        for home, value in names.items():
            rows = torch.tensor([each == value for each in column]).nonzero().flatten()
            if not len(rows):
                continue
            alone = Pipeline({"collapse": FanOutCollapse(), **of_one(options[home])}).run(batch[rows])
            assert torch.equal(run.batch["advantage"][rows], alone.batch["advantage"])
            reasons = [run.ledger.names[code] for code in run.ledger.reason[rows].tolist()]
            assert reasons == [alone.ledger.names[code] for code in alone.ledger.reason.tolist()]
            for name in ("advantage/abs_mean", "filter/kept"):
                stage, _, number = name.partition("/")
                assert run.metrics[f"{stage}/{value}/{number}"] == alone.metrics[name]
            excluded += len(reasons) - reasons.count("")
            own = make_report(alone).columns
            for name in ("compared", "baseline"):
                assert said[name][rows] == pytest.approx(own[name], nan_ok=True)
    assert excluded > 12


def test_yaml_sets_the_baseline_and_criterion_of_each_environment():
    """The baselines are ¼ for math; 0, ½ and ½ for code; and ½ for games, where the reward 9 is excluded."""
    batch = batch_of([1.0, 0, 0, 0, 1, 0, 0, 9, 1, 0], [0] * 4 + [1] * 3 + [2] * 3)
    batch["environment"] = ["math"] * 4 + ["code"] * 3 + ["games"] * 3
    advantage = {"math": {}, "code": {"baseline": "leave_one_out"}, "games": {}}
    bounds = {"_target_": "headrace.transforms.RewardWithin", "high": 5.0}
    filters = {"math": {}, "code": {}, "games": {"criterion": bounds, "also": "rewards_vary"}}
    stages = {
        "gate": None,
        "advantage": {"by_column": "environment", "values": advantage, "scale": "none"},
        "filter": {"by_column": "environment", "values": filters, "action": "exclude"},
    }
    out = load_pipeline("grpo", shuffle=False, stages=stages)(batch)["advantage"].flatten()
    assert out.tolist() == [0.75, -0.25, -0.25, -0.25, 1.0, -0.5, -0.5, 0.0, 0.5, -0.5]


def test_wrong_values_of_the_column_are_refused_by_name():
    batch = batch_of([1.0, 0, 1, 0], [0, 0, 1, 1])
    stage = ByColumn(
        column=("x", "env"), stages={"a{b}": GroupRelativeAdvantage(), "b": GroupRelativeAdvantage()}
    )
    for column, message in (
        (
            ["b", "b", "c", "d"],
            "each value of ('x', 'env') needs an entry; 'c', 'd' has none. Add one, which may be empty; the "
            "entries are 'a{b}', 'b'",
        ),
        (
            ["b", "a{b}", "b", "b"],
            "all rows of a group need the same value of ('x', 'env'); it differs in group 0",
        ),
        (["b", "b", "", ""], "env: every row needs a label; found empty ones at rows 2, 3"),
        (
            torch.tensor([3, 3, -1, -1]),
            "every row needs a env ≥ 0; found -1 at row 2, -1 at row 3: rows without a value would have no "
            "options",
        ),
        (None, "ByColumn needs the key ('x', 'env') (column); the batch has "),
    ):
        rows = batch.clone()
        if column is not None:
            rows["x", "env"] = column
        with pytest.raises(BatchError) as refused:
            stage(rows)
        assert str(refused.value)[: len(message) if column is None else None] == message
        with pytest.raises(BatchError, match=r"^stage 'advantage', "):
            Pipeline({"advantage": stage})(rows)


OF_TABLE = "stages must decide on the table of one batch; "


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({}, "stages must be of one class, with other options; got none"),
        (
            {"a": RewardScale(), "b": LengthPenalty(coefficient=0.1)},
            "stages must be of one class, with other options; got LengthPenalty, RewardScale",
        ),
        ({"a": RunningBaseline(baseline_key="x")}, f"{OF_TABLE}RunningBaseline keeps a state"),
        (
            {"a": TokenFilter(criterion=RewardsVary())},
            f"{OF_TABLE}TokenFilter gives each token its own number",
        ),
        (
            {"a": RewardScale(), True: RewardScale(), 1.5: RewardScale()},
            "values must be whole numbers or texts; got True",
        ),
        ({"a": LossWeight()}, f"{OF_TABLE}LossWeight needs all rows of an optimiser step"),
        (
            {"a": CompletenessGate(), "b": CompletenessGate(expected_groups=[1])},
            f"{OF_TABLE}CompletenessGate has expected_groups, which are those of the whole batch",
        ),
        (
            {"a": FanOutCollapse(columns=2), "b": FanOutCollapse(columns=2, weights=[1, 0])},
            f"{OF_TABLE}FanOutCollapse weighs several rewards, and a report has one weighted sum: give all "
            "values the same weights",
        ),
        (
            {"a": GroupRelativeAdvantage(), "b": GroupRelativeAdvantage(group_key="g", advantage_key="x")},
            "stages must name the same columns; they differ in group_key",
        ),
        (
            {
                action: SampleFilter(criterion=RewardsVary(), also=NotTruncated(), action=action)
                for action in ("mask", "exclude")
            },
            "rows must leave for 'truncated' in one way, and the stages differ in action. Use the same "
            "action, or another criterion",
        ),
    ],
)
def test_stages_that_cannot_decide_by_column_are_refused(stages, message):
    with pytest.raises(ValueError) as refused:
        ByColumn(column="environment", stages=stages)
    assert str(refused.value) == message


def test_stages_with_equal_weights_may_weigh_rewards_by_column():
    own = {value: FanOutCollapse(columns=2, weights=[1, 0]) for value in range(3)}
    batch = batch_of([0.0, 0, 0], [0, 1, 2])
    batch["next", "reward"], batch["env"] = torch.tensor([[1.0, 9], [2, 9], [3, 9]]), torch.arange(3)
    assert ByColumn(column="env", stages=own)(batch)[REWARD].tolist() == [1, 2, 3]


def test_an_attribute_that_all_stages_share_is_that_of_the_whole():
    own = [GroupRelativeAdvantage(eps=0.5), GroupRelativeAdvantage(eps=0.5, baseline="median", scale="none")]
    own += [GroupRelativeAdvantage(eps=0.5)]
    stage = ByColumn(column=("x", "env"), stages=dict(zip((3, "b", "c"), own, strict=True)))
    assert (stage.eps, stage.missing, stage.group_key, stage.within_groups) == (
        0.5,
        "raise",
        "group_id",
        True,
    )
    assert stage.in_keys == [("x", "env"), *own[0].in_keys]
    assert stage.out_keys == own[0].out_keys == ["advantage"]
    assert stage.final_keys == own[0].final_keys
    for name in ("baseline", "scale"):
        with pytest.raises(AttributeError, match=rf"^the stages of 3, b, c differ in {name}$"):
            getattr(stage, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        stage.nothing  # noqa: B018
    judged = [
        SampleFilter(criterion=each, unit="sample", action="drop") for each in (RewardsVary(), Ranked())
    ]
    for order in (judged, judged[::-1]):  # the order of the values does not matter
        filters = ByColumn(column="env", stages=dict(enumerate(order)))
        assert filters.before_baseline is True
        assert filters.within_groups is False


class Ranked(RewardWithin):
    """A criterion that a pipeline takes for one over the whole batch, before the baseline."""

    before_baseline, within_groups = True, False


def test_an_excluded_row_needs_an_entry_too():
    """Without an entry no stage would see the row, and its advantage would be unknown instead of 0."""
    batch = batch_of([1.0, 0, 9], [0, 0, 1])
    batch["environment"] = torch.tensor([0, 0, 7])
    out = SampleFilter(criterion=RewardWithin(high=5.0), action="exclude")
    advantage = ByColumn(column="environment", stages={0: GroupRelativeAdvantage()})
    with pytest.raises(BatchError, match="needs an entry; 7 has none"):
        Pipeline({"collapse": FanOutCollapse(), "filter": out, "advantage": advantage})(batch)


def test_a_gate_by_column_uses_the_option_empty_of_each_value():
    batch = batch_of([1.0, 0, 1, 0], [0, 0, 1, 1])
    batch["environment"] = torch.tensor([0, 0, 1, 1])
    batch["masks", "all_assistant_mask"][[1, 3]] = False
    gates = {0: CompletenessGate(group_size=2), 1: CompletenessGate(group_size=2, empty="count")}
    stages = {"gate": ByColumn(column="environment", stages=gates), "collapse": FanOutCollapse()}
    run = Pipeline(stages | {"advantage": GroupRelativeAdvantage(scale="none")}).run(batch)
    assert run.batch["advantage"].flatten().tolist() == [0.0, 0.0, 0.5, -0.5]
    assert {"gate/0/missing_groups", "gate/1/missing_groups"} <= run.metrics.keys()


def test_orders_are_checked_for_each_value():
    """The options of one value are enough to make the order wrong."""
    by_row = SampleFilter(criterion=RewardWithin(high=5.0), action="drop", unit="sample")
    both = {0: by_row, 1: SampleFilter(criterion=RewardsVary(), action="drop")}
    filters = ByColumn(column="environment", stages=both)
    for stage in (by_row, filters):
        with pytest.raises(ValueError, match="rejects single rows of rollouts"):
            Pipeline({"filter": stage, "turns": TurnAdvantage(turn_index_key=None)})
    for late in (by_row, filters):
        with pytest.raises(ValueError, match="trains tokens that several rows share"):
            Pipeline({"once": TrainSharedOnce(), "filter": late})
    corrects = RolloutCorrection(level="sequence", bound="zero")
    with pytest.raises(ValueError, match="trains tokens that several rows share"):
        Pipeline({"once": TrainSharedOnce(), "correction": corrects})


def test_filter_and_advantage_of_a_value_need_the_same_several():
    several = {"a": GroupRelativeAdvantage(), "b": GroupRelativeAdvantage(several="decoupled")}
    for judged, wrong in ((("sum", "decoupled"), False), (("sum", "sum"), True)):
        filters = {
            name: SampleFilter(criterion=RewardsVary(several=by))
            for name, by in zip("ab", judged, strict=True)
        }
        stages = {
            "filter": ByColumn(column="env", stages=filters),
            "advantage": ByColumn(column="env", stages=several),
        }
        if wrong:
            with pytest.raises(ValueError, match="judges groups by several='sum'"):
                Pipeline(stages)
        else:
            Pipeline(stages)


def test_an_advantage_per_token_cannot_be_changed_by_column():
    rows = batch_of([1.0, 0], [0, 1], tokens=3)
    rows["advantage"], rows["environment"] = torch.ones(2, 3, 1), torch.tensor([0, 1])
    stage = ByColumn(column="environment", stages={0: SignFactors(positive=0.5), 1: SignFactors()})
    with pytest.raises(TypeError, match="put this stage before those that give each token"):
        stage(rows)

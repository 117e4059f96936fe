"""An object, a name or a node can replace a criterion or token term of a recipe."""

from __future__ import annotations

import pytest

import headrace
from headrace.pipeline import ConfigError, Pipeline, load_pipeline
from headrace.transforms import NotTruncated, RewardsVary, SampleFilter

NODE = {"_target_": "headrace.transforms.NotTruncated"}
# Rollouts 1, 4 and 6 were truncated, one of each group. Group 1 has equal rewards.
COLUMNS = {
    "group_id": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "rollout_id": list(range(9)),
    "reward": [1.0, 0, 0, 1, 1, 1, 0, 1, 1],
    "tokens": [4] * 9,
    "status": ["truncated" if row in (1, 4, 6) else "completed" for row in range(9)],
}
BOTH = ["", "filter/truncated", "", *["filter/zero_variance"] * 3, "filter/truncated", "", ""]


@pytest.mark.parametrize("option", ["criterion", "also"])
@pytest.mark.parametrize("given", [NotTruncated(), "not_truncated", NODE])
def test_an_object_a_name_and_a_node_are_the_same_criterion(option, given):
    """No old option remains: NotTruncated would refuse the option `tol` of RewardsVary."""
    made = load_pipeline("grpo", stages={"filter": {option: given}}).stages["filter"]
    assert type(getattr(made, option)) is NotTruncated
    assert made.action == "mask", "the other options of the stage stay"
    if isinstance(given, NotTruncated):
        assert getattr(made, option) is given


@pytest.mark.parametrize("value", ["not_truncated", "{_target_: headrace.transforms.NotTruncated}"])
def test_names_and_nodes_replace_a_criterion_in_an_override(value):
    by_word = load_pipeline("grpo", f"pipeline.stages.filter.criterion={value}")
    assert repr(by_word) == repr(load_pipeline("grpo", stages={"filter": {"criterion": NotTruncated()}}))


def test_a_name_has_the_columns_of_the_pipeline():
    made = load_pipeline("grpo", columns={"status": "how"}, stages={"filter": {"also": "not_truncated"}})
    assert made.stages["filter"].also.status_key == "how"


def test_a_term_and_a_stage_are_replaced_in_the_same_way():
    term = load_pipeline("gtpo", stages={"entropy": {"term": "log_ratio"}}).stages["entropy"].term
    assert type(term).__name__ == "LogRatio"
    stage = SampleFilter(criterion=NotTruncated(), action="drop")
    pipeline = load_pipeline("grpo", stages={"filter": stage})
    assert pipeline.stages["filter"] is stage
    assert pipeline.order == load_pipeline("grpo").order


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (NotTruncated, r"filter.criterion: NotTruncated is a class; give NotTruncated\(...\)"),
        ("NotTruncated", r"unknown criterion 'NotTruncated' .*'not_truncated'.* Or give an object"),
        (object(), "must be a value that YAML has, or a callable; got <object"),
        (5, "filter.criterion must be a callable; got 5"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_a_criterion_is_refused_with_the_right_form(criterion, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline("grpo", stages={"filter": {"criterion": criterion}})


@pytest.mark.parametrize("action", ["mask", "drop", "exclude"])
def test_rows_leave_if_either_of_two_criteria_removes_them(action):
    options = {"also": "not_truncated", "action": action}
    found = headrace.decide(COLUMNS, "grpo", group_size=3, minibatches=1, stages={"filter": options})
    assert found.reason == BOTH
    assert found.loss_weight[found.keep].tolist() == [pytest.approx(1 / 16)] * 4  # 16 tokens train
    alone = headrace.decide(COLUMNS, "grpo", group_size=3, minibatches=1, stages={"filter": None})
    if action == "mask":  # the truncated rewards still count in the means
        assert found.advantage[found.keep].tolist() == alone.advantage[found.keep].tolist()


def test_a_second_criterion_equals_a_second_filter(make_batch):
    batch = make_batch([1.0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1])
    batch["status"] = [0, 1, 0, 0, 1, 0]
    one = Pipeline({"filter": SampleFilter(criterion=RewardsVary(), also=NotTruncated())})
    two = Pipeline(
        {"filter": SampleFilter(criterion=RewardsVary()), "cut": SampleFilter(criterion=NotTruncated())}
    )
    kept = [run.ledger.reason == 0 for run in (one.run(batch.clone()), two.run(batch.clone()))]
    assert kept[0].tolist() == kept[1].tolist() == [True, False, True, False, False, False]


def test_two_criteria_with_the_same_repr_are_not_confused():
    class Keep:
        def __init__(self, number):
            self.number = number

        def __call__(self, batch):
            return batch["rollout_id"] != self.number

        def __repr__(self):
            return "Keep()"

    for number in (0, 8):
        found = headrace.decide(COLUMNS | {"reward": list(range(9))}, "rloo", group_size=3, minibatches=1,
                                stages={"filter": {"criterion": Keep(number)}})  # fmt: skip
        assert found.keep.logical_not().nonzero().flatten().tolist() == [number]

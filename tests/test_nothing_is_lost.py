"""Checkpoints, ledgers and errors stay correct where runs, stages and users interact."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    FanOutCollapse,
    LossWeight,
    RewardsVary,
    SampleFilter,
    ShuffleSplit,
)


def four_steps() -> Pipeline:
    return Pipeline({"split": ShuffleSplit(minibatches=4, unit="sample")})


def rows(make_batch, n: int = 8) -> TensorDict:
    return make_batch([float(i) for i in range(n)], [0] * n)


@pytest.mark.parametrize(
    "look",
    [
        lambda run: run.batch,
        lambda run: next(run.minibatches()),
        lambda run: list(run.minibatches()),
        lambda run: None,
    ],
    ids=["the whole batch", "a peek", "a first full pass", "nothing"],
)
def test_reading_a_run_before_training_leaves_its_checkpoint_unchanged(make_batch, look):
    """After one of four minibatches three are left, whatever was read before."""
    pipeline, batch = four_steps(), rows(make_batch)
    run = pipeline.run(batch)
    orders = [part["rollout_id"].tolist() for part in four_steps().minibatches(batch)]
    look(run)
    taken = run.minibatches()
    assert next(taken)["rollout_id"].tolist() == orders[0]
    restored = four_steps()
    restored.load_state_dict(pipeline.state_dict())
    assert [part["rollout_id"].tolist() for part in restored.minibatches(batch)] == orders[1:]


@pytest.mark.parametrize("name", ["half", "keys", "type"])
def test_stage_names_reserved_by_torch_are_refused(name):
    with pytest.raises(ValueError, match=f"ModuleDict; got {name!r}"):
        Pipeline({name: FanOutCollapse()})


@pytest.mark.parametrize("name", ["loss_weight", "w"])
def test_a_row_of_weight_0_is_not_trained_under_any_name(make_batch, name):
    batch = make_batch([1.0, 2, 3, 4], [0, 0, 1, 1])
    batch["log_probs", "full"][0] = float("nan")
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=1), "weight": LossWeight(weight_key=name)})
    assert pipeline.run(batch).metrics["rows/trained"] == 3
    assert pipeline.weighs
    assert not Pipeline({"weight": LossWeight(weight_key=name, fold="sum")}).weighs


def test_weights_in_the_input_are_ignored(make_batch):
    batch = make_batch([1.0, 2], [0, 0])
    batch["loss_weight"] = torch.zeros(2)
    batch["advantage"] = torch.ones(2, 1, 1)
    assert Pipeline({"weight": LossWeight(fold="sum")}).run(batch).metrics["rows/trained"] == 2
    assert Pipeline({"weight": LossWeight()}).run(batch).metrics["rows/trained"] == 2


def test_loggers_and_hooks_never_get_a_refused_batch(make_batch):
    seen = []
    stages = {
        "collapse": FanOutCollapse(),
        "log": lambda batch: seen.append("log") or batch,
        "filter": SampleFilter(criterion=RewardsVary(), on_batch=lambda *_: seen.append("hook")),
    }
    with pytest.raises(
        BatchError, match=r"^stage 'collapse', FanOutCollapse\(\): every reward must be finite"
    ):
        Pipeline(stages).run(make_batch([1.0, float("nan")], [0, 0]))
    with pytest.raises(BatchError, match=r"^stage 'collapse'"):
        Pipeline(stages | {"log": None}).run(make_batch([1.0, float("nan")], [0, 0]))
    assert seen == []


class Noisy(FanOutCollapse):
    """Has a forward of its own."""

    def forward(self, batch):
        return super().forward(batch)


def test_hooks_that_a_pipeline_would_skip_are_refused():
    with pytest.raises(ValueError, match=r"never its `forward`"):
        Pipeline({"noisy": Noisy()})
    hooked = FanOutCollapse()
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="or of its hooks"):
        Pipeline({"hooked": hooked})


def test_padding_that_would_train_is_refused_before_state_changes(make_batch):
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=2, microbatches=2, remainder="pad")})
    batch = rows(make_batch, 5).exclude("masks", "log_probs")
    with pytest.raises(BatchError, match=r"^stage 'split'.*padding rows are masked in"):
        pipeline.run(batch)
    assert pipeline.stages["split"].state.calls == 0
    assert pipeline.ledger is None


def test_an_empty_result_has_the_same_reasons(make_batch):
    words = ("pipeline.stages.gate.group_size=2", "pipeline.stages.gate.on_incomplete=drop")
    full = load_pipeline(*words).run(make_batch([1.0, 2], [0, 0]))
    nothing = load_pipeline(*words).run(make_batch([1.0], [0]))
    assert set(full.ledger.names) == set(nothing.ledger.names)
    assert len(full.ledger.names) == len(full.ledger.actions)


class Least(BatchTransform):
    """Keeps a key as YAML gives it."""

    def __init__(self, *, reward_key=("next", "reward")):
        super().__init__(in_keys=[reward_key])
        self.reward_key = reward_key

    def decide(self, rows):
        rows.metric("least", rows["reward"].min())


def test_a_nested_key_may_be_a_yaml_list(make_batch):
    pipeline = Pipeline({"least": Least(reward_key=["next", "reward"])})
    assert pipeline.run(make_batch([3.0, 2.0], [0, 0])).metrics["least/least"] == 2
    assert pipeline.stages["least"].in_keys == [("next", "reward")]

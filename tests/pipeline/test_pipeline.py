"""Stages run in order, each row is in the ledger, and errors name the stage."""

from __future__ import annotations

import copy
import pickle
from itertools import count

import numpy as np
import pytest
import torch
from batches import batch_of
from busy import busy_batch, keep_positive, stages
from composed import composed
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, lazy_stack

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    IncompleteGroupsError,
    LossWeight,
    MissingKeyError,
    NotTruncated,
    SampleFilter,
    ShuffleSplit,
)

MASK = ("masks", "all_assistant_mask")


@st.composite
def wild_batches(draw):
    groups = draw(st.lists(st.integers(0, 3), min_size=1, max_size=14))
    rows = len(groups)
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=rows, max_size=rows))
    status = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    segments = draw(st.lists(st.integers(1, 3), min_size=rows, max_size=rows))
    columns = [
        [value for value, n in zip(values, segments, strict=True) for _ in range(n)]
        for values in (rewards, groups, list(range(rows)), status)
    ]
    batch = batch_of(*columns[:3], status=columns[3])
    silent = draw(st.lists(st.integers(0, len(batch) - 1), max_size=3))
    batch[MASK][silent] = False
    return batch


@given(
    wild_batches(),
    st.sampled_from(["mask", "exclude", "drop"]),
    st.sampled_from(["sample", "rollout", "group"]),
    st.sampled_from(["drop", "uneven"]),
)
def test_the_ledger_has_all_rows_and_exactly_the_trained_rows_train(batch, action, unit, remainder):
    pipeline = Pipeline(
        stages(
            gate=CompletenessGate(group_size=14, on_incomplete="keep", min_rollouts=2),
            filter=SampleFilter(criterion=NotTruncated(), action=action, unit=unit),
            split=ShuffleSplit(minibatches=3, remainder=remainder, unit="group"),
        )
    )
    try:
        out = pipeline(batch)
    except BatchError as err:  # fewer groups than minibatches, so all rows would be dropped
        assume("no optimiser step is left" not in str(err))
        raise
    trains = set(out["headrace", "row"][out[MASK].any(-1)].tolist()) if len(out) else set()
    assert trains == set((pipeline.ledger.reason == 0).nonzero().flatten().tolist())
    counts = pipeline.ledger.counts()
    assert sum(counts.values()) == len(batch)
    numbers = pipeline.metrics
    left = sum(value for key, value in numbers.items() if key.startswith("out/"))
    assert numbers["rows/in"] == len(batch) == numbers["rows/trained"] + left
    if len(out):
        assert torch.isfinite(out["advantage"]).all()


def test_minibatches_have_the_processed_rows_in_one_order_per_epoch(make_batch):
    whole = Pipeline(stages())(busy_batch(make_batch))
    parts = list(Pipeline(stages()).minibatches(busy_batch(make_batch)))
    assert torch.equal(torch.cat([part["headrace", "row"] for part in parts]), whole["headrace", "row"])
    assert [part["headrace", "minibatch"].unique().item() for part in parts] == [0, 1]

    pipeline = Pipeline(stages())
    run = pipeline.run(busy_batch(make_batch), epochs=2)
    twice = [part["headrace", "row"].tolist() for part in run.minibatches()]
    assert run.batch["headrace", "row"].tolist() == twice[0] + twice[1]
    assert sorted(twice[0] + twice[1]) == sorted(twice[2] + twice[3]) == [0, 1, 2, 3, 6, 7, 8]
    assert twice[0] + twice[1] != twice[2] + twice[3]
    assert pipeline.metrics["rows/trained"] == 3
    assert pipeline.metrics["out/split/remainder"] == 0


def test_the_time_of_a_stage_is_that_of_all_its_epochs(make_batch, monkeypatch):
    """The clock goes on by a quarter of a second each time that it is read."""
    monkeypatch.setattr("headrace.pipeline.pipeline.perf_counter", count(100, 0.25).__next__)
    pipeline = Pipeline(
        {"collapse": FanOutCollapse(), "split": ShuffleSplit(minibatches=1), "weight": LossWeight()}
    )
    metrics = pipeline.run(make_batch([1.0, 3], [0, 0]), epochs=3).metrics
    assert {name: value for name, value in metrics.items() if name.startswith("time/")} == {
        "time/collapse": 0.25,
        "time/weight": 0.75,
    }


def test_a_processed_row_among_new_rows_is_refused(make_batch):
    done = Pipeline({})(make_batch([1.0], [0]))
    fresh = make_batch([2.0], [1])
    with pytest.raises(BatchError, match=r"got 2 rows, .* already processed at least one of them"):
        Pipeline({})(lazy_stack([done[0], fresh[0]]))


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
def test_writing_to_a_minibatch_changes_no_epoch_run_or_input(make_batch, lazy):
    batch = make_batch([1.0, 3], [0, 0])
    batch = lazy_stack(list(batch.unbind(0))) if lazy else batch
    for split in (None, ShuffleSplit(minibatches=1), ShuffleSplit(minibatches=1, shuffle=False)):
        run = Pipeline({"advantage": GroupRelativeAdvantage(scale="none"), "split": split}).run(
            batch, epochs=2
        )
        for part in run.minibatches():
            assert sorted(part["advantage"].flatten().tolist()) == [-1, 1]
            part["advantage"], part["headrace", "row"] = part["advantage"] * 10, part["headrace", "row"] + 7
        assert sorted(run.batch["advantage"].flatten().tolist()) == [-1, 1]
        assert sorted(run.batch["headrace", "row"].tolist()) == [0, 1]
    assert "advantage" not in batch.keys()


def test_a_failing_stage_is_named_with_its_options(make_batch):
    with pytest.raises(
        IncompleteGroupsError, match=r"stage 'gate', CompletenessGate\(group_size=7\): 3 incomplete"
    ) as info:
        Pipeline(stages(gate=CompletenessGate(group_size=7)))(busy_batch(make_batch))
    assert info.value.stage == "gate"
    with pytest.raises(MissingKeyError, match=r"stage 'collapse', FanOutCollapse\(\).*the key 'rollout_id'"):
        Pipeline(stages(gate=None))(busy_batch(make_batch).exclude("rollout_id"))
    with pytest.raises(BatchError, match=r"stage 'split'.*5 units cannot be cut into 2 equal minibatches"):
        list(Pipeline({"split": ShuffleSplit(minibatches=2)}).minibatches(make_batch([0.0] * 5, [0] * 5)))


def test_minibatches_are_checked_at_once_and_belong_to_their_batch(make_batch):
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=2)})
    with pytest.raises(ValueError, match="epochs must be an integer ≥ 1; got 0"):
        pipeline.minibatches(make_batch([0.0] * 4, [0] * 4), epochs=0)
    with pytest.raises(ValueError, match=r"an integer ≥ 1; got 1\.5"):
        pipeline.minibatches(make_batch([0.0] * 4, [0] * 4), epochs=1.5)
    assert len(list(pipeline.minibatches(make_batch([0.0] * 4, [0] * 4), epochs=np.int64(2)))) == 4
    with pytest.raises(BatchError, match="3 units cannot be cut into 2"):
        pipeline.minibatches(make_batch([0.0] * 3, [0] * 3))
    first = pipeline.minibatches(make_batch([0.0] * 4, [0] * 4))
    second = pipeline.minibatches(make_batch([0.0] * 6, [0] * 6))
    assert [len(part) for part in first] == [2, 2]
    assert [len(part) for part in second] == [3, 3]
    assert pipeline.metrics["rows/in"] == 6


def test_renamed_ids_are_counted_under_the_same_metrics(make_batch):
    batch = make_batch([1.0, 2], [0, 0])
    batch["meta", "gid"] = batch["group_id"]
    pipeline = Pipeline({"keep": keep_positive}, group_key=["meta", "gid"])
    pipeline(batch)
    assert pipeline.metrics["groups/in"] == 1


def test_images_stay_with_their_rows():
    """Images of one size are a column of tensors. Lists of images are a column without tensors."""
    batch = batch_of([1.0, 3, 5, 11], [0, 0, 1, 1], expected_rollouts=[2] * 4)
    batch["pixels"] = torch.arange(4 * 3 * 2 * 2).view(4, 3, 2, 2).to(torch.uint8)
    batch["images"] = NonTensorStack(
        *(NonTensorData([f"{row}-{i}.png" for i in range(row)]) for row in range(4))
    )
    out = composed("pipeline=dr_grpo", "pipeline.stages.split.minibatches=2")(batch)
    rows = out["headrace", "row"].tolist()
    assert sorted(rows) == [0, 1, 2, 3]
    assert torch.equal(out["pixels"], batch["pixels"][rows])
    assert [list(each) for each in out["images"]] == [[f"{r}-{i}.png" for i in range(r)] for r in rows]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, f"ModuleDict; got {name!r}") for name in ("half", "keys", "type")),
        *((name, "must consist of letters") for name in ("a.b", "", "two words", "1st")),
        ("pipeline", r"must not be 'pipeline'; got \['pipeline'\]"),
    ],
)
def test_a_stage_name_that_torch_or_an_override_cannot_have_is_refused(name, said):
    with pytest.raises(ValueError, match=f"^a stage.* {said}"):
        Pipeline({name: FanOutCollapse()})


class Least(BatchTransform):
    """A stage that keeps a key as YAML gives the key."""

    def __init__(self, *, reward_key=("next", "reward")):
        super().__init__(in_keys=[reward_key])
        self.reward_key = reward_key

    def decide(self, rows):
        rows.metric("least", rows["reward"].min())


def test_a_nested_key_may_be_a_yaml_list(make_batch):
    pipeline = Pipeline({"least": Least(reward_key=["next", "reward"])})
    assert pipeline.run(make_batch([3.0, 2.0], [0, 0])).metrics["least/least"] == 2
    assert pipeline.stages["least"].in_keys == [("next", "reward")]


@pytest.mark.slow
def test_without_a_rollout_key_each_row_is_a_rollout_for_every_stage(make_batch):
    batch = make_batch([1.0, 3, 5, 11], [0, 0, 1, 1])
    words = (
        "pipeline.stages.gate.group_size=2",
        "pipeline.stages.split.shuffle=false",
        "pipeline.stages.weight.unit=rollout",
    )
    expected = composed(*words).run(batch)
    run = composed(*words, "pipeline.rollout_key=null").run(batch.exclude("rollout_id"))
    for key in ("advantage", "loss_weight", ("headrace", "minibatch")):
        assert torch.equal(run.batch[key], expected.batch[key])
    assert "rollouts/in" not in run.metrics
    assert run.metrics["groups/trained"] == 2


@pytest.mark.parametrize("remainder", ["raise", "carry", "uneven", "pad", "drop"])
def test_the_ranks_of_a_pipeline_are_checked_like_those_of_its_stages(remainder):
    """`ranks` is for ranks that hold the whole batch. With a budget, each micro-batch needs a row."""
    budget, world = {"minibatches": 1, "max_tokens": 9, "remainder": remainder}, {"process_group": "world"}
    filled = "pad", "carry", "drop"
    for make, options, message in (
        (LossWeight, {"ranks": 2}, "give ranks if each rank holds the whole batch"),
        (ShuffleSplit, {"minibatches": 1, "ranks": 2}, "give ranks if each rank holds the whole batch"),
        (ShuffleSplit, budget, None if remainder in filled else f"got remainder='{remainder}'"),
    ):
        Pipeline({"it": make(**options)})
        for its, own in ((world, {}), ({}, world)):
            if message is None:
                Pipeline({"it": make(**options, **its)}, **own)
                continue
            with pytest.raises(ValueError, match=message):
                Pipeline({"it": make(**options, **its)}, **own)
    with pytest.raises(ValueError, match=r"^stage 'it': give ranks"):
        Pipeline({"it": LossWeight(ranks=2)}, process_group="world")


@pytest.mark.parametrize(
    "change",
    [
        lambda stages: stages.update({"new": FanOutCollapse()}),
        lambda stages: stages.__setitem__("new", FanOutCollapse()),
        lambda stages: stages.__setitem__("advantage", GroupRelativeAdvantage(scale="none")),
        lambda stages: stages.update({"advantage": None}),
        lambda stages: setattr(stages, "advantage", None),
        lambda stages: stages.__delitem__("collapse"),
        lambda stages: stages.pop("collapse"),
        lambda stages: stages.clear(),
    ],
)
def test_the_stages_of_a_pipeline_are_fixed(change, make_batch):
    pipeline = Pipeline({"collapse": FanOutCollapse(), "advantage": GroupRelativeAdvantage()})
    with pytest.raises(ValueError, match=r"are fixed; cannot (set|remove) .*load_pipeline\(\.\.\., stages="):
        change(pipeline.stages)
    assert [*pipeline.stages] == pipeline.order
    with pytest.raises(AttributeError, match="stages of Pipeline is fixed at construction"):
        pipeline.stages = torch.nn.ModuleDict()
    moved = copy.deepcopy(pickle.loads(pickle.dumps(pipeline))).to("cpu").train()
    rows = make_batch([1.0, 3], [0, 0])
    assert torch.equal(moved(rows.clone())["advantage"], pipeline(rows)["advantage"])


def test_the_error_for_a_stage_as_an_item_or_attribute_says_where_it_is():
    pipeline = Pipeline({"advantage": GroupRelativeAdvantage()})
    for item in ("advantage", 0):
        with pytest.raises(TypeError, match=r"a stage is pipeline.stages\[name\]; the stages are advantage$"):
            pipeline[item]
    for name in ("advantages", 0):
        with pytest.raises(KeyError, match=f"no stage has the name {name!r}; the stages are advantage"):
            pipeline.stages[name]
    with pytest.raises(AttributeError, match=r"pipeline.stages\['advantage'\]"):
        pipeline.advantage  # noqa: B018
    assert not hasattr(pipeline, "nothing")

"""Rows that wait for the next batch keep their columns and decisions, and train first."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, LossWeight, SampleFilter, ShuffleSplit
from headrace.transforms.table.schema import COUNTED, IN_LOSS, ROW

LOSS = ("masks", "all_assistant_mask")


def batch_of(number: int, masked: int = 0) -> TensorDict:
    """Five rows of four rollouts in two groups. The first `masked` rows are out of the loss."""
    return TensorDict(
        {
            "name": torch.arange(5) + 100 * number,
            "rollout_id": torch.tensor([0, 0, 1, 2, 3]) + 100 * number,
            "group_id": torch.tensor([0, 0, 0, 1, 1]) + 100 * number,
            "trains": torch.arange(5) >= masked,
            LOSS: torch.ones(5, 3, dtype=torch.bool),
        },
        batch_size=[5],
    )


@pytest.mark.parametrize("unit", ["sample", "rollout", "group"])
def test_the_oldest_units_train_first(unit):
    """A minibatch has more units than a batch, so some rows wait for several batches."""
    pipeline = Pipeline({"split": ShuffleSplit(minibatch_size=7, unit=unit, remainder="carry")})
    trained: list[int] = []
    for number in range(16):
        waiting = pipeline.stages["split"].state.carried
        waits = [] if waiting is None else waiting["name"].tolist()
        assert [name // 100 for name in waits] == sorted(name // 100 for name in waits)
        parts = list(pipeline.minibatches(batch_of(number)))
        names = [name for part in parts for name in part["name"].tolist()]
        assert {*names[: len(waits)]} == {*waits} or not names
        assert pipeline.metrics["split/carried_in"] == len(waits)
        rows = [row for part in parts for row in part[ROW].tolist()]
        left = [row["row"] for row in pipeline.ledger.rows("split/carried")]
        assert sorted(rows + left) == list(range(5 + len(waits)))
        trained += names
    waits = pipeline.stages["split"].state.carried["name"].tolist()
    assert sorted(trained + waits) == [100 * number + row for number in range(16) for row in range(5)]


@pytest.mark.parametrize("action", ["mask", "exclude", "given"])
@pytest.mark.parametrize("masked", [(3, 0, 0, 3, 0), (0, 0, 2, 0, 0, 2, 2)])
def test_carried_rows_stay_in_the_loss_or_out_of_it(action, masked):
    """A filter decides, or a batch with rows out of the loss has columns that say so."""
    stages = {
        "split": ShuffleSplit(minibatch_size=4, unit="sample", remainder="carry"),
        "weight": LossWeight(unit="sample", dtype="float64"),
    }
    if action != "given":
        stages = {"filter": SampleFilter(criterion=lambda batch: batch["trains"], action=action)} | stages
    pipeline = Pipeline(stages)
    for number, count in enumerate(masked):
        batch = batch_of(number, count)
        if action == "given" and count:
            batch[IN_LOSS] = batch[COUNTED] = batch["trains"]
        for part in pipeline.minibatches(batch):
            trains = part["trains"]
            every = torch.ones_like(trains)  # without the columns, no row is out
            assert torch.equal(part[LOSS].any(1), trains)
            assert torch.equal(part.get(IN_LOSS, every), trains)
            assert torch.equal(part.get(COUNTED, every), every if action == "mask" else trains)
            share = 1 / max(int(trains.sum()), 1) / 3
            assert part["loss_weight"].tolist() == pytest.approx((trains * share).tolist())


def test_a_split_with_another_remainder_trains_the_carried_rows():
    first, second = (ShuffleSplit(minibatch_size=3, remainder=each) for each in ("carry", "uneven"))
    first(batch_of(0))
    second.load_state_dict(first.state_dict())
    waits = first.state.carried["name"].tolist()
    assert sorted(second(batch_of(1))["name"].tolist()) == [*waits, *range(100, 105)]


@pytest.mark.parametrize("unit", ["sample", "rollout", "group"])
@pytest.mark.parametrize("again", ["rollout", "group"])
def test_ids_of_carried_rows_must_not_come_again(unit, again):
    """A group may go on in the next batch if the split keeps rollouts together, not groups."""
    split = ShuffleSplit(minibatch_size=9, unit=unit, remainder="carry")
    split(batch_of(0))
    batch = batch_of(1)
    batch[f"{again}_id"] = batch_of(0)[f"{again}_id"]
    compared = "group" if unit == "group" else "rollout"
    if again != compared:
        assert len(split(batch)) in (0, 9)
        return
    ids = {"rollout": r"\[0, 1, 2, 3\]", "group": r"\[0, 1\]"}[again]
    with pytest.raises(BatchError, match=rf"rows of {again}s {ids} were carried over"):
        split(batch)

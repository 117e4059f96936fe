"""Rows that wait for the next batch keep their columns and decisions, and train first."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, LossWeight, Rows, SampleFilter, ShuffleSplit
from headrace.transforms.carry.carry import join, refuse_again, take, wait_a_step
from headrace.transforms.table import Alone
from headrace.transforms.table.schema import COUNTED, IN_LOSS, REASON, ROW, STEPS_LEFT

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


def numbered(first: int, count: int) -> TensorDict:
    """Rows with the numbers from `first` on, each a rollout and a group of its own."""
    ids = torch.arange(first, first + count)
    given = {
        "rollout_id": ids,
        "group_id": ids,
        "x": ids.float(),
        "pair": torch.stack([ids, -ids], 1),
        LOSS: torch.ones(count, 3, dtype=torch.bool),
    }
    return TensorDict(given, batch_size=[count])


def test_taken_rows_are_joined_with_their_decisions_and_columns():
    """Rows 1 and 2 of four wait. Row 1 was masked, row 2 was excluded, and a column was written for both."""
    rows = Rows.read(numbered(0, 4))
    rows.leave(torch.tensor([False, True, False, False]), "low", "masked")
    rows.leave(torch.tensor([False, False, True, False]), "out", "excluded")
    rows.where(rows["rollout_id"] > 0).put("y", torch.tensor([1.0, 2.0, 3.0]))
    waits = take(rows.table, torch.tensor([1, 2]))
    assert waits[REASON] == ["low", "out"]
    assert (waits["x"].tolist(), waits["y"].tolist()) == ([1.0, 2.0], [1.0, 2.0])

    later = Rows.read(numbered(10, 2), keys=["x", "pair"])
    later["y"] = torch.tensor([7.0, 8.0])
    later.when_gathered(
        lambda some, numbers: some.set("x", some["x"] * numbers["by"]), ["x"], by=torch.ones(2) * 3
    )
    join(later, waits)
    assert (later["x"].tolist(), later.table.carried.tolist()) == ([30.0, 33.0, 1.0, 2.0], [2, 3])
    assert later["y"].tolist() == [7.0, 8.0, 1.0, 2.0]
    assert later["pair"].tolist() == [[10, -10], [11, -11], [1, -1], [2, -2]]
    fates = later.table.fates
    assert fates.reasons_of(torch.arange(4)) == ["trained", "trained", "low", "out"]
    assert (fates.in_loss.tolist(), fates.counts.tolist()) == (
        [True, True, False, False],
        [True] * 3 + [False],
    )
    assert (fates.masks, fates.excludes) == (True, True)
    out = later.write()
    assert out["x"].tolist() == [30.0, 33.0, 1.0, 2.0]
    assert out[IN_LOSS].tolist() == out[LOSS].any(1).tolist() == [True, True, False, False]
    join(later, None)
    assert len(later) == 4


def test_carried_rows_are_refused_by_ranks_that_cannot_use_them():
    rows = Rows.read(numbered(0, 2))
    rows.table.ranks = Alone()
    rows.table.ranks.size = 2
    said = (
        "rows were carried from an earlier batch, and ranks that share a batch can only use them with "
        "remainder='carry': set pipeline.stages.split.remainder=carry, or drop these rows with a new split"
    )
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        join(rows, None, "drop")


class OfTwo(Alone):
    """Rank 0 of two. It knows the columns of the rows, and of the carried rows, of rank 1."""

    size, rank = 2, 0

    def __init__(self, came: dict, carried: dict, reasons: list[str], shared_ids: str = "same"):
        self.came, self.carried, self.reasons, self.shared_ids = came, carried, reasons, shared_ids

    def share(self, table, about=str):
        others, self.came = self.came, self.carried
        own, count = len(table.live), len(next(iter(others.values())))
        for key, column in others.items():
            column = torch.tensor(column)
            table.columns[key] = torch.cat([table.columns.get(key, column[:0]), column])
        table.ranks = self
        table.begin([0, own, own + count])

    def gather_rows(self, values, counts):
        assert len(values) == counts[0]
        return torch.cat([values, values.new_full((counts[1], *values.shape[1:]), 3)])  # numbers of tokens

    def gather_objects(self, told):
        in_loss, counted = self.carried.get(IN_LOSS, [True]), self.carried.get(COUNTED, [True])
        return [told, (self.reasons, not all(in_loss), not all(counted))]


def test_rows_that_wait_on_another_rank_are_in_the_table_of_each_rank():
    ranks = OfTwo(
        {"x": [9.0]}, {"x": [5.0, 6.0], IN_LOSS: [True, False], COUNTED: [True, True]}, ["trained", "old/low"]
    )
    rows = Rows.read(numbered(0, 2), keys=["x"], ranks=ranks)
    join(rows, None)
    table = rows.table
    assert rows["x"].tolist() == [0.0, 1.0, 9.0, 5.0, 6.0]
    assert (table.starts, table.size, table.live.tolist()) == ([[0, 2, 3], [3, 3, 5]], 5, [0, 1])
    assert (table.rank_of_rows().tolist(), table.carried.tolist()) == ([0, 0, 1, 1, 1], [3, 4])
    assert table.fates.reasons_of(torch.arange(5)) == ["trained"] * 4 + ["old/low"]
    assert (table.fates.masks, table.fates.excludes) == (True, False)
    assert table.fates.in_loss.tolist() == [True, True, True, True, False]
    assert len(table.batch) == 2


@pytest.mark.parametrize(("came", "again"), [(4, False), (7, True)])
@pytest.mark.parametrize("shared_ids", ["same", "different"])
def test_if_ids_differ_between_ranks_only_those_of_a_rank_are_compared(shared_ids, came, again):
    """A row of rank 0 waits with the id 7. Another row has the id 7 on rank 1, or on rank 0."""
    waits = take(Rows.read(numbered(7, 1)).table, torch.tensor([0]))
    other = {"rollout_id": [7], "group_id": [7]}
    ranks = OfTwo(other, {"rollout_id": [99], "group_id": [99]}, ["trained"], shared_ids)
    rows = Rows.read(numbered(came, 1), keys=["rollout_id", "group_id"], ranks=ranks)
    join(rows, waits)
    if again or shared_ids == "same":
        with pytest.raises(BatchError, match=r"^rows of rollouts \[7\] were carried over"):
            refuse_again(rows, "rollout")
    else:
        refuse_again(rows, "rollout")


@pytest.mark.parametrize(("unit", "name"), [("group", "group_id"), ("rollout", "rollout_id")])
def test_the_first_ten_ids_that_come_again_are_listed(unit, name):
    def again(count: int) -> Rows:
        earlier = Rows.read(numbered(0, 12))
        rows = Rows.read(numbered(12 - count, 20))
        join(rows, take(earlier.table, torch.arange(12)))
        return rows

    refuse_again(again(0), unit)
    for count, ids in ((1, [11]), (2, [10, 11]), (12, [*range(10)])):
        said = (
            f"rows of {unit}s {ids} were carried over, and the batch has the same {name}s again. "
            "remainder='carry' needs ids that are unique over batches, such as those of RepeatSampler"
        )
        with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
            refuse_again(again(count), unit)
    left = again(1)
    left.leave(left["rollout_id"] == 11, "gone", "dropped")  # the row that came again has left
    refuse_again(left, unit)
    without = Rows.read(numbered(0, 2).exclude(name))
    refuse_again(without, unit)


def test_a_row_waits_as_many_steps_as_it_has_left():
    rows = Rows.read(numbered(0, 3))
    waits = numbered(0, 3)
    assert STEPS_LEFT not in wait_a_step(waits, rows).keys(True)
    waits[STEPS_LEFT] = torch.tensor([2, 1, 3])
    assert wait_a_step(waits, rows)[STEPS_LEFT].tolist() == [1, 0, 2]
    waits["group_id"] = torch.tensor([8, 7, 7])
    waits[STEPS_LEFT] = torch.tensor([0, 0, 0])
    said = (
        "rows of groups 8, 7 would wait for the next step, and are then older than max_staleness allows: set "
        "pipeline.stages.split.remainder=uneven, or minibatches that divide the groups of a step, or a "
        "larger "
        "max_staleness"
    )
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        wait_a_step(waits, rows)


def test_the_state_of_a_split_is_described_for_a_comparison_between_ranks():
    split = ShuffleSplit(minibatches=2, unit="sample")
    nothing = "0 permutations before, 0 minibatches taken, and no batch that is not trained again"
    assert split.memory.same_on_all_ranks() == nothing
    pipeline = Pipeline({"split": split})
    minibatches = pipeline.minibatches(numbered(0, 4))
    next(minibatches)
    restored = ShuffleSplit(minibatches=2, unit="sample")
    restored.load_state_dict(split.state_dict())
    said = "0 permutations before, 1 minibatch taken, and no batch that is not trained again"
    assert restored.memory.same_on_all_ranks() == said
    assert len([*minibatches]) == 1
    restored.load_state_dict(split.state_dict())
    said = "1 permutations before, 0 minibatches taken, and a batch that is not trained again"
    assert restored.memory.same_on_all_ranks() == said

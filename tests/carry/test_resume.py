"""A state that was saved inside a batch resumes the batch with the same split, or discards the batch."""

from __future__ import annotations

import re

import pytest
import torch
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st
from saving import as_saved
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, LossWeight, Rows, ShuffleSplit
from headrace.transforms.carry.resume import (
    BatchProgress,
    InterruptedBatch,
    KnownBatch,
    SplitState,
    identifying_columns,
)

ROWS = 16


def make(**options) -> Pipeline:
    return Pipeline({"split": ShuffleSplit(**({"minibatches": 4} | options)), "weight": LossWeight()})


def sixteen(start: int = 0) -> TensorDict:
    """Eight rollouts of two rows, in four groups."""
    rewards = [float(row % 3) for row in range(ROWS)]
    batch = batch_of(rewards, [row // 4 + start for row in range(ROWS)], tokens=3)
    batch["rollout_id"] = torch.arange(ROWS) // 2 + start
    batch["prompt"] = torch.arange(ROWS) // 4 % 3
    return batch


def rows_of(parts) -> list[list[int]]:
    return [part["headrace", "row"].tolist() for part in parts]


def left_in_the_middle(batch: TensorDict, taken: int = 1, epochs: int = 1, **options) -> tuple[dict, list]:
    """The saved state after `taken` minibatches, and the rows of the remaining minibatches."""
    pipeline = make(**options)
    stream = pipeline.minibatches(batch, epochs=epochs)
    for _ in range(taken):
        next(stream)
    return as_saved(pipeline.state_dict()), rows_of(stream)


CHANGES = [
    ({"seed": 1}, "seed was 0 and is 1"),
    ({"shuffle": False}, "shuffle was True and is False"),
    ({"unit": "sample"}, "unit was 'rollout' and is 'sample'"),
    ({"unit": "group"}, "unit was 'rollout' and is 'group'"),
    ({"ranks": 2, "rank": 0}, "ranks was 1 and is 2, rank was None and is 0"),
    ({"minibatches": 2}, "minibatches was 4 and is 2"),
    ({"minibatches": None, "minibatch_size": 2}, "minibatch_size was None and is 2"),
    ({"remainder": "drop"}, "remainder was 'raise' and is 'drop'"),
    ({"microbatches": 2}, "microbatches was None and is 2"),
    ({"max_tokens": 9}, "max_tokens was None and is 9"),
    ({"balance": "tokens"}, "balance was 'none' and is 'tokens'"),
    ({"rollout_key": "group_id"}, "keys was .*rollout_id.* and is .*group_id"),
]


def without(plain: dict, *path: str) -> dict:
    """A copy of nested dicts without one entry."""
    first, *rest = path
    return {
        key: without(value, *rest) if key == first else value
        for key, value in plain.items()
        if key != first or rest
    }


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("trained",), "found calls, carried, interrupted"),
        (("interrupted", "after", "calls"), "found carried, interrupted, trained"),
        (
            ("carried", "columns", "headrace", "columns", "reason"),
            "found calls, carried rows without reasons",
        ),
    ],
)
def test_a_state_of_another_version_is_refused_with_advice(path, found):
    split = {"minibatches": None, "minibatch_size": 3, "remainder": "carry"}
    pipeline, restored = make(**split), make(**split)
    list(pipeline.minibatches(sixteen()))
    next(pipeline.minibatches(sixteen(100)))
    state = pipeline.state_dict()
    (key,) = (key for key in state if key.startswith("stages.split"))
    with pytest.raises(ValueError, match=rf"{found}.*delete the split's _extra_state"):
        restored.load_state_dict(state | {key: without(state[key], *path)})
    restored.load_state_dict(without(state, key), strict=False)
    assert len(list(restored.minibatches(sixteen(200)))) == 2


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[str(change) for change, _ in CHANGES])
def test_a_state_resumes_only_with_the_same_split(change, message):
    state, _ = left_in_the_middle(sixteen())
    restored = make(**change)
    restored.load_state_dict(state)
    with pytest.raises(BatchError, match=rf"interrupted after 1 minibatch.*{message}"):
        restored.minibatches(sixteen())


def test_epochs_and_rank_are_part_of_the_split():
    state, _ = left_in_the_middle(sixteen(), ranks=2, rank=0)
    restored = make(ranks=2, rank=1)
    restored.load_state_dict(state)
    with pytest.raises(BatchError, match="rank was 0 and is 1, epochs was 1 and is 2"):
        restored.minibatches(sixteen(), epochs=2)


@pytest.mark.parametrize("place", [0, 5, ROWS - 1])
def test_a_column_of_one_row_that_no_stage_reads_does_not_stop_the_run(place):
    """Such a column is not used to recognise the batch, whichever row has it."""
    rows = [*sixteen().unbind(0)]
    rows[place]["tool_calls"] = torch.tensor(2)
    state, rest = left_in_the_middle(lazy_stack(rows))
    again = make()
    again.load_state_dict(state)
    assert rows_of(again.minibatches(lazy_stack(rows))) == rest


@pytest.mark.parametrize(("before", "by"), [(0.0, 1e-4), (1000.0, 0.1)])
def test_recomputed_rewards_may_differ_by_1e_4_of_their_value_or_of_1(before, by):
    batch = sixteen()
    batch["next", "reward"][3], batch["next", "reward"][4] = before, torch.nan
    state, rest = left_in_the_middle(batch)
    for share in (0.9, 1.2):
        restored, again = make(), batch.clone()
        again["next", "reward"][3] += share * by
        restored.load_state_dict(state)
        if share < 1:
            assert rows_of(restored.minibatches(again)) == rest
            continue
        with pytest.raises(BatchError, match=r"at rows \[3\]"):
            restored.minibatches(again)


@pytest.mark.parametrize(("epochs", "begun", "taken"), [(1, 0, 4), (1, 1, 1), (2, 0, 0), (2, 3, 3)])
def test_reading_the_whole_batch_takes_it_if_it_is_one_pass_that_was_not_begun(epochs, begun, taken):
    pipeline, restored = make(), make()
    run = pipeline.run(sixteen(), epochs=epochs)
    stream = run.minibatches()
    for _ in range(begun):
        next(stream)
    assert len(run.batch) == ROWS
    restored.load_state_dict(pipeline.state_dict())
    assert len(list(restored.minibatches(sixteen(), epochs=epochs))) == 4 * epochs - taken


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("read", [(), ("id", "reward", "flag", "advantage", "wide")])
def test_a_batch_is_known_by_its_rewards_and_by_one_integer_per_row(ragged, read):
    columns = {"id": torch.tensor([7, 8, 9]), ("a", "uid"): torch.tensor([[4], [5], [6]], dtype=torch.int32)}
    columns |= {"flag": torch.tensor([True, False, True]), "reward": torch.tensor([0.5, 1.5, 2.5])}
    columns |= {
        "advantage": torch.ones(3),
        "wide": torch.ones(3, 2).long(),
        ("headrace", "x"): torch.ones(3).long(),
    }
    batch = TensorDict(columns | {"text": ["a", "b", "c"]}, batch_size=[3])
    rows = Rows.read(lazy_stack([*batch.unbind(0)]) if ragged else batch, keys=read)
    rows["seen"], rows["score"] = torch.tensor([1, 2, 3]), torch.ones(3)
    expected = {"id": [9, 7], "('a', 'uid')": [6, 4], "flag": [1, 1], "reward": [2.5, 0.5], "seen": [3, 1]}
    found = identifying_columns(rows.table, torch.tensor([2, 0]), "reward")
    assert {name: column.flatten().tolist() for name, column in found.items()} == expected
    assert {column.dtype for name, column in found.items() if name != "reward"} == {torch.int64}
    assert found["reward"].dtype is torch.float64
    assert {tuple(column.shape) for column in found.values()} == {(2,)}
    every = identifying_columns(rows.table, torch.arange(3), "reward")
    assert every["id"].tolist() == [7, 8, 9]
    batch["id"] += 1  # a collector writes its next batch into the same memory
    assert every["id"].tolist() == [7, 8, 9]
    if ragged:  # a column of one row is left out; a stack without rows has no columns
        first, *others = batch.unbind(0)
        first = TensorDict({"calls": torch.tensor(2)}, batch_size=[]).update(first)
        some = Rows.read(lazy_stack([first, *others]))
        found = identifying_columns(some.table, torch.arange(3), "reward")
        assert found.keys() == {"id", "('a', 'uid')", "flag", "reward"}
        nothing = Rows.read(lazy_stack([*batch.unbind(0)])[:0])
        assert identifying_columns(nothing.table, torch.arange(0), "reward") == {}


KNOWN = {
    "id": torch.tensor([4, 5, 6, 7]),
    "reward": torch.tensor([1.0, 2.0, 3.0, torch.nan]),
    "x": torch.ones(4),
}
OTHERS = [  # what differs in the batch that comes, and the differences that are listed
    ({}, ""),
    ({"rows": 5}, "this one has 5 rows"),
    ({"options": {"seed": 1, "b": 2}}, "the split has other options: seed was 0 and is 1"),
    ({"options": {}}, "the split has other options: seed was 0 and is None, b was 2 and is None"),
    ({"x": None}, "only one of the two batches has column 'x'"),
    ({"y": torch.ones(4), "id": torch.tensor([4, 5, 6, 8])},
     "'id' was [7] and is [8] at rows [3]; only one of the two batches has column 'y'"),
    ({"id": torch.tensor([7, 6, 5, 4])},
     "'id' was [4, 5, 6] and 1 more and is [7, 6, 5] and 1 more at rows [0, 1, 2] and 1 more"),
    ({"id": torch.ones(4, 2).long()}, "'id' was (4,) torch.int64 and is (4, 2) torch.int64"),
    ({"x": torch.ones(4).long()}, "'x' was (4,) torch.float32 and is (4,) torch.int64"),
    ({"reward": torch.tensor([1.0, 2.00005, 3.0, torch.nan])}, ""),
    ({"reward": torch.tensor([1.0, 2.5, torch.nan, 4.0]), "options": {"seed": 0, "b": 3}},
     "the split has other options: b was 2 and is 3; "
     "'reward' was [2.0, 3.0, nan] and is [2.5, nan, 4.0] at rows [1, 2, 3]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "found"), OTHERS)
def test_the_differences_between_a_batch_and_the_interrupted_one_are_listed(change, found):
    options = {"seed": 0, "b": 2}
    last = InterruptedBatch(4, 3, options, KNOWN, SplitState(9))
    columns = {name: each for name, each in (KNOWN | change).items() if name not in ("rows", "options")}
    batch = KnownBatch(
        change.get("rows", 4), {name: each for name, each in columns.items() if each is not None}
    )
    state = SplitState(interrupted=last)
    if not found:
        progress = BatchProgress(state, batch, change.get("options", options))
        assert progress.taken == 3
        return
    said = (
        f"a batch of 4 rows was interrupted after 3 minibatches, and this batch differs from it: {found}. "
        "To train its remaining minibatches, give that batch again, with the same options. To drop them and "
        "start another batch, call discard_batch() of this stage, such as "
        "pipeline.stages['split'].discard_batch()"
    )
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        BatchProgress(state, batch, change.get("options", options))


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({}, True),
        ({"id": torch.tensor([7, 6, 5, 4]), "reward": torch.tensor([torch.nan, 3.0, 2.0, 1.0])}, True),
        ({"id": torch.tensor([7, 6, 5, 4])}, False),
        ({"reward": torch.tensor([1.0, 2.5, 3.0, torch.nan])}, False),
        ({"rows": 3}, False),
        ({"x": None}, False),
    ],
)
def test_a_batch_is_again_if_it_has_the_same_rows_in_any_order(change, again):
    columns = {name: each for name, each in (KNOWN | change).items() if each is not None and name != "rows"}
    known, other = KnownBatch(4, KNOWN), KnownBatch(change.get("rows", 4), columns)
    assert known.is_again(other) == other.is_again(known) == again
    rows = torch.arange(400)  # torch sorts a few numbers in a stable way in any case
    columns = {"pair": torch.stack([rows % 4, rows % 5], 1), "one": rows // 20, "reward": rows.float()}
    shuffled = {name: each[rows * 7 % 400] for name, each in columns.items()}
    assert KnownBatch(400, columns).is_again(KnownBatch(400, shuffled))
    without_ids = KnownBatch(4, {"reward": KNOWN["reward"]})
    assert not without_ids.is_again(without_ids)


# -- discarded batches ------------------------------------------------------------------------------------


@given(
    units=st.integers(4, 9),
    taken=st.integers(1, 5),
    epochs=st.integers(1, 2),
    saved=st.booleans(),
    remainder=st.sampled_from(["carry", "uneven", "drop"]),
)
def test_discarded_batches_are_not_trained_and_nothing_is_trained_twice(
    units, taken, epochs, saved, remainder
):
    """The second of three batches is discarded after some minibatches. Only its other rows do not train."""

    def batch(number):
        return TensorDict(
            {"rollout_id": torch.arange(units) + 100 * number, "name": torch.arange(units) + 100 * number},
            batch_size=[units],
        )

    def make_split():
        return Pipeline({"split": ShuffleSplit(minibatch_size=2, remainder=remainder)})

    pipeline = make_split()
    before = [part["name"].tolist() for part in pipeline.minibatches(batch(1), epochs=epochs)]
    stream = pipeline.minibatches(batch(2), epochs=epochs)
    begun = [part["name"].tolist() for _, part in zip(range(taken), stream, strict=False)]
    if saved:
        restored = make_split()
        restored.load_state_dict(pipeline.state_dict())
        pipeline = restored
    pipeline.stages["split"].discard_batch()
    given_up = pipeline.state_dict()
    lost = [name for part in stream for name in part["name"].tolist()]
    after = [part["name"].tolist() for part in pipeline.minibatches(batch(3), epochs=epochs)]
    passes = [sum(part.count(name) for part in [*before, *begun, *after]) for name in range(400)]
    assert max(passes) <= epochs
    waiting = pipeline.stages["split"].state.carried
    kept = {name for part in [*before, *begun, *after] for name in part}
    kept |= set() if waiting is None else set(waiting["name"].tolist())
    came = {name for number in (1, 2, 3) for name in batch(number)["name"].tolist()}
    if remainder != "drop":
        assert came - kept <= set(lost)
    twin = make_split()
    twin.load_state_dict(given_up)
    assert [part["name"].tolist() for part in twin.minibatches(batch(3), epochs=epochs)] == after


# -- loops that end early ---------------------------------------------------------------------------------


def test_an_unfinished_batch_does_not_block_the_next_batch():
    pipeline = make()
    for _ in pipeline.minibatches(sixteen()):
        break
    list(pipeline.minibatches(sixteen(start=50)))
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    assert restored.stages["split"].state.calls == 2


def test_a_state_inside_two_batches_is_refused():
    """Two pipelines that share one split would save such a state without one of the two batches."""
    split = ShuffleSplit(minibatches=4)
    first, second = (Pipeline({"split": split, "weight": LossWeight()}) for _ in "ab")
    one = first.minibatches(sixteen())
    next(one)
    two = second.minibatches(sixteen(start=50))
    for pipeline in (first, second):
        with pytest.raises(BatchError, match="iterators of several batches are open"):
            pipeline.state_dict()
    next(two)
    list(one)
    state = second.state_dict()
    restored = make()
    restored.load_state_dict(state)
    assert rows_of(restored.minibatches(sixteen(start=50))) == rows_of(two)
    third = first.minibatches(sixteen())
    next(third)
    fourth = second.minibatches(sixteen(start=50))
    next(fourth)
    split.discard_batch()
    restored.load_state_dict(second.state_dict())
    assert restored.stages["split"].state.calls == 4

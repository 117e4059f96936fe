"""Rows that were trained are not trained again, wherever a run is interrupted."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import results_in_threads
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, FanOutCollapse, Rows, ShuffleSplit
from headrace.transforms.carry.resume import KnownBatch, SplitState
from headrace.transforms.table import Alone


def make(remainder: str = "uneven", **options) -> Pipeline:
    return Pipeline({"split": ShuffleSplit(minibatch_size=3, unit="sample", remainder=remainder, **options)})


def numbered(batch: int, rows: int) -> TensorDict:
    """The rows of one batch. No other batch has their ids, and all rewards are 1."""
    ids = torch.arange(rows) + 100 * batch
    return TensorDict({"rollout_id": ids, ("next", "reward"): torch.ones(rows)}, batch_size=[rows])


def trained(minibatches) -> list[list[int]]:
    return [part["rollout_id"].tolist() for part in minibatches]


@given(
    rows=st.lists(st.integers(3, 10), min_size=2, max_size=3),
    epochs=st.integers(1, 2),
    remainder=st.sampled_from(["uneven", "carry", "drop"]),
    again=st.sampled_from(["as it was", "permuted", "not at all"]),
    saved=st.sampled_from(["before the next batch", "when the next batch has begun"]),
    data=st.data(),
)
def test_an_interruption_anywhere_trains_nothing_again(rows, epochs, remainder, again, saved, data):
    """A loop over all minibatches is compared with a loop that is interrupted after any minibatch.

    After the interruption, the source may repeat its last batch, and then gives the other batches.
    """
    batches = [numbered(number, size) for number, size in enumerate(rows)]
    whole = make(remainder)
    of_batch = [trained(whole.minibatches(batch, epochs=epochs)) for batch in batches]
    expected = [part for parts in of_batch for part in parts]
    last = data.draw(st.integers(0, len(batches) - 1))
    taken = data.draw(st.integers(0, len(of_batch[last])))

    pipeline, found = make(remainder), []
    for batch in batches[:last]:
        found += trained(pipeline.minibatches(batch, epochs=epochs))
    stream = pipeline.minibatches(batches[last], epochs=epochs)
    found += [next(stream)["rollout_id"].tolist() for _ in range(taken)]
    finished = taken == len(of_batch[last])
    if finished and saved == "when the next batch has begun" and last + 1 < len(batches):
        pipeline.minibatches(batches[last + 1], epochs=epochs)
    state = pipeline.state_dict()

    restored = make(remainder)
    restored.load_state_dict(state)
    first = batches[last]
    if finished and again == "permuted":
        first = first[torch.randperm(len(first))]
    if not (finished and again == "not at all"):
        run = restored.run(first, epochs=epochs)
        found += trained(run.minibatches())
        if finished:
            assert run.ledger.counts()["split/trained_before"] == len(first)
            assert trained([run.batch]) == [[]]
    for batch in batches[last + 1 :]:
        found += trained(restored.minibatches(batch, epochs=epochs))
    assert found == expected


@pytest.mark.parametrize("how", ["minibatches", "call", "stage alone"])
def test_a_second_pass_in_one_process_trains(how):
    def rows_of(pipeline, batch):
        if how == "minibatches":
            return sorted(row for part in trained(pipeline.minibatches(batch)) for row in part)
        stage = pipeline if how == "call" else pipeline.stages["split"]
        return sorted(stage(batch)["rollout_id"].tolist())

    pipeline, batch = make(), numbered(0, 7)
    for _ in range(3):
        assert rows_of(pipeline, batch) == list(range(7))
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    assert [len(rows_of(restored, batch)) for _ in range(3)] == [0, 7, 7], "only the saved pass is skipped"
    restored.load_state_dict(restored.state_dict())
    assert rows_of(restored, numbered(1, 7)) == list(range(100, 107))
    assert len(rows_of(restored, batch)) == 7, "only the last batch is known"


def test_a_repeated_batch_with_several_integer_rewards_is_recognised():
    def rows_after_a_restart(batch):
        restored = make()
        restored.load_state_dict(state)
        return len([row for part in trained(restored.minibatches(batch)) for row in part])

    pipeline, batch = make(), numbered(0, 30)
    batch["next", "reward"] = torch.arange(60).view(30, 2) % 3
    trained(pipeline.minibatches(batch))
    state = pipeline.state_dict()
    regraded, other = batch.clone(), numbered(1, 30)
    regraded["next", "reward"][-1] += 1
    other["next", "reward"] = batch["next", "reward"]
    again = [rows_after_a_restart(each) for each in (batch, batch[torch.randperm(30)], regraded, other)]
    assert again == [0, 0, 30, 30]


def test_a_batch_whose_rows_all_wait_is_known_when_it_has_run():
    """No minibatch is left to take, so the rows are not carried again after a restart."""
    pipeline, restored = make("carry"), make("carry")
    trained(pipeline.minibatches(numbered(0, 3)))
    pipeline.run(numbered(1, 2))
    restored.load_state_dict(pipeline.state_dict())
    assert trained(restored.minibatches(numbered(1, 2))) == []
    rows = [row for part in trained(restored.minibatches(numbered(2, 4))) for row in part]
    assert sorted(rows) == [100, 101, 200, 201, 202, 203]


def test_a_discarded_batch_is_not_trained_again():
    pipeline, batch = make(), numbered(0, 7)
    next(pipeline.minibatches(batch))
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    restored.stages["split"].discard_batch()
    pipeline.stages["split"].discard_batch()
    for state in (pipeline.state_dict(), restored.state_dict()):
        other = make()
        other.load_state_dict(state)
        assert trained(other.minibatches(batch)) == []
    assert trained(restored.minibatches(batch)) == []
    assert len(trained(restored.minibatches(numbered(1, 7)))) == 3


def test_an_interrupted_second_pass_resumes():
    pipeline, batch = make(), numbered(0, 7)
    list(pipeline.minibatches(batch))
    stream = pipeline.minibatches(batch)
    next(stream)
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    assert trained(restored.minibatches(batch)) == trained(stream)


class OfTwo(Alone):
    """One of two ranks. The other one gives an answer about its rows."""

    def __init__(self, answer: list[bool]):
        self.answer = answer

    def gather_objects(self, value):
        return [value, self.answer]


@pytest.mark.parametrize(
    ("own", "other", "skipped"),
    [
        (7, [True], True),  # all ranks hold their rows again
        (7, [], True),  # the other rank had no rows, and has none
        (0, [False], False),
        (7, [False], None),  # the other rank holds other rows
    ],
)
def test_a_batch_is_skipped_if_all_ranks_with_rows_hold_their_rows_again(own, other, skipped, caplog):
    split = ShuffleSplit(minibatches=1, unit="sample")
    first = ShuffleSplit(minibatches=1, unit="sample")
    first(numbered(0, 7))
    split.load_state_dict(first.state_dict())
    rows = Rows.read(numbered(0 if own else 1, 7))
    rows.table.ranks = OfTwo(other)
    memory = split.memory
    if skipped is None:
        said = (
            "ranks [0] hold rows that were trained before the state was saved, and the other ranks hold "
            "other rows: give all ranks the rows of the same batch"
        )
        with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
            memory.cut(split, rows.seen_by(split, "split"))
        return
    cut = memory.cut(split, rows.seen_by(split, "split"))
    assert (cut.permuted is None) == skipped
    assert (cut.state is None) if skipped else (cut.state.calls == 2)  # one pass of each batch
    if skipped:
        said = (
            "this batch of 7 rows was trained before the state was saved, so it is skipped. Give it once "
            "more to train a second pass over it"
        )
        assert [each.getMessage() for each in caplog.records] == [said]
        assert rows.table.fates.reasons_of(torch.arange(7)) == ["split/trained_before"] * 7
        assert not rows.table.fates.here.any()


def test_a_batch_of_which_no_row_was_left_is_not_one_that_was_trained():
    split = ShuffleSplit(minibatches=1, unit="sample")
    split.memory.state, split.memory.restored = SplitState(trained=KnownBatch(0, {})), True
    rows = Rows.read(numbered(0, 2))
    rows.leave(torch.ones(2, dtype=torch.bool), "gone", "dropped")
    assert split.memory.cut(split, rows.seen_by(split)).permuted is not None
    assert rows.table.fates.reasons_of(torch.arange(2)) == ["gone", "gone"]


def test_the_second_half_trains_rows_that_a_buffer_repeats():
    first, second = Pipeline(
        {"collapse": FanOutCollapse(group_key="rollout_id"), "split": ShuffleSplit(minibatches=2)}
    ).halves()
    rows = first(numbered(0, 6))
    list(second.minibatches(rows))
    second.load_state_dict(second.state_dict())
    assert len(list(second.minibatches(rows))) == 2


def interrupt_on_ranks(rank: int, world: int) -> dict[str, object]:
    """Whether a rank trains the right rows if it is interrupted after any minibatch of the first batch."""

    def shared() -> Pipeline:
        split = ShuffleSplit(minibatches=2, unit="sample", remainder=remainder)
        return Pipeline({"split": split}, process_group="world", shared_ids="different", patience=30)

    found: dict[str, object] = {}
    cases = {"carried": (7, 3), "even": (6, 6), "uneven": (7, 3), "one has none": (6, 0)}
    for name, rows in cases.items():
        remainder = "carry" if name == "carried" else "uneven"
        first, second = (numbered(2 * batch + rank, rows[rank]) for batch in (0, 1))
        whole = trained(shared().minibatches(first))
        for taken in range(len(whole) + 1):
            pipeline, restored = shared(), shared()
            stream = pipeline.minibatches(first)
            parts = [next(stream)["rollout_id"].tolist() for _ in range(taken)]
            restored.load_state_dict(pipeline.state_dict())
            parts += trained(restored.minibatches(first))
            found[f"{name}, {taken} taken"] = parts == whole
            follows = trained(pipeline.minibatches(second)) if taken == len(whole) else None
            found[f"{name}, {taken} taken, next"] = follows in (None, trained(restored.minibatches(second)))
    restored.load_state_dict(pipeline.state_dict())
    try:
        restored.minibatches(numbered(2 + rank if rank == 0 else 9, 6))
    except BatchError as err:
        found["torn"] = str(err)
    return found


def test_ranks_agree_on_what_was_trained():
    for found in results_in_threads(interrupt_on_ranks, 2):
        assert "ranks [0] hold rows that were trained before" in found.pop("torn")
        assert all(found.values()), [name for name, right in found.items() if not right]

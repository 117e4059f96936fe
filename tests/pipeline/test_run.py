"""A run keeps the results of one batch. A pipeline shows the last run of the thread that asks."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from batches import batch_of, no_rows
from busy import busy_batch, stages
from live_bytes import LiveBytes, bytes_of
from tensordict import TensorDict

from headrace.pipeline import Pipeline, Run, StageError
from headrace.pipeline.account_keys import KEYS, Keys
from headrace.transforms import (
    BatchError,
    BatchTransform,
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
)
from headrace.transforms.table import label_key

REWARD = ("next", "reward")
THREADS, BATCHES = 3, 20


def content(run: Run) -> dict:
    """All results of a run as plain values, with NaN replaced so that equal runs compare equal."""
    columns = run.batch.exclude("prompt_text")
    return {
        "batch": {str(key): columns.get(key).nan_to_num(7.0).tolist() for key in columns.keys(True, True)},
        "minibatches": [part["headrace", "row"].tolist() for part in run.minibatches()],
        "reason": run.ledger.reason.tolist(),
        "names": list(run.ledger.names),
        "counts": run.ledger.counts(),
        "metrics": run.metrics,
        "recipe": {name: repr(stage) for name, stage in run.stages.items()},
    }


def numbered(thread: int, step: int):
    """A batch of 8 to 14 rows in groups of two. No other batch has its ids."""
    rows = 8 + 2 * ((step + thread) % 4)
    start = 1000 * (BATCHES * thread + step)
    rewards = [float((start + row) % 3) for row in range(rows)]
    groups, rollouts = [start + row // 2 for row in range(rows)], [start + row for row in range(rows)]
    return batch_of(rewards, groups, rollouts)


def in_threads(work):
    """The results of `work(thread)` in all threads at once. Python switches threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(work, range(THREADS)))
    finally:
        sys.setswitchinterval(interval)


# -- results of one batch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["before", "after"])
@pytest.mark.parametrize("split", [None, "drop", "carry"])
def test_a_run_is_unchanged_by_later_runs(split, asked, make_batch):
    def make():
        cut = split and ShuffleSplit(minibatches=2, unit="rollout", remainder=split)
        return Pipeline(stages(split=cut, weight=LossWeight()))

    expected = content(make().run(busy_batch(make_batch)))
    pipeline = make()
    run = pipeline.run(busy_batch(make_batch))
    if asked == "before":
        assert content(run) == expected
    for start in (100, 200):
        later = busy_batch(make_batch)[:4]
        later["rollout_id"] += start
        later["group_id"] += start
        pipeline(later)
    with pytest.raises(BatchError):
        pipeline.run(busy_batch(make_batch).exclude(REWARD))
    assert content(run) == expected
    assert content(run) == expected  # reading the results changes nothing


def test_a_run_gathers_no_rows_before_they_are_read():
    batch = batch_of([float(i % 5) for i in range(256)], [i // 4 for i in range(256)], tokens=512)
    pipeline = Pipeline(
        {
            "collapse": FanOutCollapse(),
            "advantage": GroupRelativeAdvantage(),
            "split": ShuffleSplit(minibatches=4),
            "weight": LossWeight(),
        }
    )
    pipeline.run(batch_of([1.0] * 4, [0, 0, 1, 1]))  # allocates what is needed only once
    with LiveBytes() as memory:
        run = pipeline.run(batch, epochs=3)
        _ = run.metrics
    # Counting finite log-probabilities takes one byte per token; the batch has 25 bytes per token.
    assert memory.peak < 0.2 * bytes_of(batch)
    with LiveBytes() as memory:
        whole = run.batch
    assert memory.peak >= 0.9 * bytes_of(batch)
    assert run.batch is whole, "the batch is gathered only once"


# -- one stage, several pipelines ------------------------------------------------------------------------


def test_a_gate_in_two_pipelines_has_separate_metrics(make_batch):
    gate = CompletenessGate(group_size=3, on_incomplete="drop", expected_groups=(0, 1, 2, 3))
    alone, first = Pipeline({"gate": gate}), Pipeline({"first": gate, "advantage": GroupRelativeAdvantage()})
    alone(busy_batch(make_batch))
    first(make_batch([1.0, 2, 3], [3, 3, 3], [0, 1, 2]))
    assert alone.metrics["out/gate/incomplete"] == 2
    assert alone.metrics["gate/missing_groups"] == 1
    assert first.metrics["out/first/incomplete"] == 0
    assert first.metrics["first/missing_groups"] == 3
    assert alone.ledger.names[1:3] == ["gate/incomplete", "gate/failed"]
    assert first.ledger.names[1:3] == ["first/incomplete", "first/failed"]
    assert (len(alone.ledger.reason), len(first.ledger.reason)) == (9, 3)


def test_the_columns_of_a_report_are_those_that_a_stage_writes_or_else_the_first_that_a_stage_reads():
    """Two stages compare rollouts, and the first compares other rows than the groups of the pipeline."""
    first = {
        "advantage_key": "read",
        "status_key": "s0",
        "group_key": "a",
        "advantage_by_row": 0,
        "weights": [9],
    }
    second = {"advantage_key": "written", "status_key": "s1", "weight_key": "w", "out_keys": ["written", "w"]}
    third = {
        "group_key": "b",
        "advantage_by_row": 0,
        "weights": [0.5, 2.0],
        "out_keys": [("headrace", "reward")],
    }
    stages = [SimpleNamespace(in_keys=[], **each) for each in (first, second, third)]
    keys = Keys.of(stages, "mask", None, {"rollouts": "rid", "groups": None}, {"prompt": ["next", "p"]})
    assert keys.units == {"rollouts": "rid"}
    assert {name: key for name, key in keys.found.items() if key != KEYS.get(name)} == {
        **{"advantage": ("written",), "status": ("s0",), "loss_weight": ("w",), "peers": ("a",)},
        **{"prompt": (("next", "p"),), "rollout_label": (label_key("rid"),)},
    }
    assert (keys.weight, keys.reward_weights, keys.weight_is_written({"third": stages[2]})) == (
        "w",
        [0.5, 2.0],
        False,
    )
    assert keys.weight_is_written({"third": stages[2], "second": stages[1]})
    assert "peers" not in Keys.of(stages, "mask", None, {"rollouts": None, "groups": "a"}, {}).found
    assert Keys.of(stages[:1], "mask", None, {}, {}).weight == "loss_weight"


def test_each_row_is_shown_at_its_place_in_the_last_epoch_that_trains_it():
    """Row 1 is in no minibatch of the second epoch, row 2 in none of the first, and row 3 in none at all."""
    minibatches, weights = [[0, 1, -1, -1], [1, -1, 0, -1]], [[0.25, 0.5, 0.0, 0.0], [1.0, 0.0, 2.0, 0.0]]
    places = [
        {"minibatch": torch.tensor(numbers), "loss_weight": torch.tensor(of_rows)}
        for numbers, of_rows in zip(minibatches, weights, strict=True)
    ]
    found = Run({}, Pipeline({}).run(numbered(0, 0)).keys, None, places=places).trained_at
    assert found["minibatch"].tolist() == [1, 1, 0, -1]
    assert found["loss_weight"].tolist() == [1.0, 0.5, 2.0, 0.0]


def test_without_a_split_each_epoch_is_the_whole_batch(make_batch):
    run = Pipeline({}).run(make_batch([1.0, 3, 5], [0, 0, 7]), epochs=3)
    assert [part["headrace", "row"].tolist() for part in run.minibatches()] == [[0, 1, 2]] * 3
    assert (run.has_steps, run.has_batch, Pipeline({}).run(no_rows(make_batch([1.0], [0]))).has_batch) == (
        False,
        True,
        True,
    )


# -- several threads -------------------------------------------------------------------------------------


def test_a_run_without_rows_has_all_results_and_all_are_empty():
    """A loop over results needs no special case for a step or a rank without rows."""
    pipeline = Pipeline({"gate": CompletenessGate(group_size=2), "split": ShuffleSplit(minibatches=1)})
    full, empty = pipeline.run(numbered(0, 0)), pipeline.run(no_rows(numbered(0, 0)))
    for name, value in empty.metrics.items():
        assert name in full.metrics
        assert value == 0, name
    assert empty.metrics == pipeline.metrics
    assert empty.ledger.counts() == {"trained": 0}
    assert empty.ledger.rows("trained") == [*empty.minibatches()] == empty.places == []
    assert empty.ledger.ids.keys() == full.ledger.ids.keys()
    assert empty.report().numbers == {**empty.metrics}
    with pytest.raises(RuntimeError, match="the batch of this run had no rows, so there is no table"):
        empty.of_rank(torch.zeros(0))
    assert (len(empty.batch), repr(empty), "</table>" in empty._repr_html_()) == (0, "Run(Ledger())", True)


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, "carry"])
def test_a_thread_sees_the_results_of_its_own_call(split):
    cut = split and ShuffleSplit(minibatch_size=4, unit="rollout", remainder=split)
    pipeline = Pipeline(
        {
            "gate": CompletenessGate(group_size=2),
            "filter": SampleFilter(criterion=RewardWithin(high=1.0)),
            "advantage": GroupRelativeAdvantage(),
            "split": cut,
            "weight": LossWeight(),
        }
    )

    def work(thread):
        for step in range(BATCHES):
            batch = numbered(thread, step)
            out = pipeline(batch)
            ledger, metrics = pipeline.ledger, pipeline.metrics
            assert torch.equal(ledger.ids["rollouts"][: len(batch)], batch["rollout_id"])
            assert torch.equal(ledger.ids["groups"][: len(batch)], batch["group_id"])
            assert metrics["rows/in"] == len(ledger.reason)
            high = int((batch[REWARD] > 1).sum())
            assert metrics["filter/kept"] == len(batch) - high
            assert metrics["split/minibatches" if split else "rows/in"] >= 1
            trained = {row["rollout"] for row in ledger.rows("trained")}
            assert trained == set(out["rollout_id"][out["loss_weight"] > 0].tolist())
            if split != "carry":
                assert len(ledger.reason) == len(batch)

    in_threads(work)


@pytest.mark.slow
def test_carried_rows_train_once_over_all_threads_or_wait_in_the_split():
    split = ShuffleSplit(minibatch_size=5, unit="rollout", remainder="carry")
    pipeline = Pipeline({"advantage": GroupRelativeAdvantage(), "split": split})

    def work(thread):
        came, trained = [], []
        for step in range(BATCHES):
            batch = numbered(thread, step)
            came += batch["rollout_id"].tolist()
            trained += pipeline(batch)["rollout_id"].tolist()
        return came, trained

    results = in_threads(work)
    came = [rollout for ids, _ in results for rollout in ids]
    trained = [rollout for _, ids in results for rollout in ids]
    waiting = [] if split.state.carried is None else split.state.carried["rollout_id"].tolist()
    assert sorted(trained + waiting) == sorted(came)
    assert len(waiting) == len(came) % 5
    assert split.state.calls == THREADS * BATCHES


# -- batches that are refused ----------------------------------------------------------------------------


class Own(BatchTransform):
    """A user's own stage around a function. It may be after a split."""

    def __init__(self, *, function, after=True, out_keys=()):
        super().__init__([("headrace", "minibatch")] if after else [], out_keys)
        self.function, self.after = function, after

    def apply(self, batch):
        return self.function(batch)


def refuse(batch):
    if bool((batch["rollout_id"] < 0).any()):
        raise BatchError("a rollout below 0")
    return batch


def fail(batch):
    if bool((batch["rollout_id"] < 0).any()):
        raise ZeroDivisionError
    return batch


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("function", [refuse, fail])
def test_a_refused_batch_leaves_the_state_of_the_split_unchanged(function, where):
    """Permutations and carried rows are the same as without the batch."""
    split = ShuffleSplit(minibatch_size=4, unit="sample", remainder="carry", seed=3)
    bad = Own(function=function, after=where == "after")
    order = {"bad": bad, "split": split} if where == "before" else {"split": split, "bad": bad}
    pipeline, without = Pipeline(order), copy.deepcopy(Pipeline(order))
    for each in (pipeline, without):
        each(numbered(0, 1))  # 8 of 10 rows train, and 2 are carried
    wrong = numbered(0, 2)
    wrong["rollout_id"] = -wrong["rollout_id"] - 1
    before = pipeline.stages["split"].state
    for call in (pipeline, pipeline.run, pipeline.minibatches):
        with pytest.raises((BatchError, StageError), match="stage 'bad'"):
            call(wrong)
    after = pipeline.stages["split"].state
    assert after.calls == before.calls == 1
    assert after.carried is before.carried
    assert len(after.carried) == 2
    out, expected = pipeline(numbered(0, 3)), without(numbered(0, 3))
    assert torch.equal(out["rollout_id"], expected["rollout_id"])
    assert pipeline.metrics["rows/in"] == len(numbered(0, 3)) + 2


def shout(batch):
    if bool(batch["headrace", "reward"].isnan().any()):
        raise ValueError("math domain error")
    return batch


@pytest.mark.parametrize("split", [None, ShuffleSplit(minibatches=1)])
def test_an_earlier_error_is_reported_before_its_consequences(split, make_batch):
    later = {"split": split, "mine": Own(function=shout, after=split is not None)}
    pipeline = Pipeline({"collapse": FanOutCollapse(), **later})
    with pytest.raises(
        BatchError, match=r"^stage 'collapse'.*every reward must be finite; found nan at row 1"
    ):
        pipeline(make_batch([1.0, float("nan")], [0, 0]))
    fine = Pipeline({"collapse": FanOutCollapse(missing="skip"), **later})
    with pytest.raises(StageError, match=r"^stage 'mine'.*math domain error"):
        fine(make_batch([1.0, float("nan")], [0, 0]))


# -- which rows train ----------------------------------------------------------------------------------------


def weigh(batch, weight):
    return batch.set("loss_weight", torch.full((len(batch),), weight))


@pytest.mark.parametrize("split", [None, ShuffleSplit(minibatches=2)])
def test_rows_to_which_a_user_stage_gives_weight_0_do_not_train(split, make_batch):
    for weight, trained in ((0.0, 0), (0.5, 4)):
        own = Own(function=partial(weigh, weight=weight), after=split is not None, out_keys=["loss_weight"])
        pipeline = Pipeline({"split": split, "own": own if split else own.function})
        out = pipeline(make_batch([1.0, 2, 3, 4], [0, 0, 1, 1]))
        assert len(out) == 4
        assert pipeline.metrics["rows/trained"] == trained
        assert pipeline.metrics["rollouts/trained"] == trained
        assert pipeline.metrics["out/pipeline/no_loss_tokens"] == 4 - trained


# -- what a pipeline keeps -------------------------------------------------------------------------------


def test_the_last_run_has_the_ledger_and_refuses_to_give_rows(make_batch):
    pipeline = Pipeline(stages(weight=LossWeight()))
    run = pipeline.run(busy_batch(make_batch))
    assert (run.ledger.reason > 0).any()
    last = pipeline.last_run
    assert last.metrics == run.metrics
    assert last.ledger.counts() == run.ledger.counts()
    assert last.report().numbers == pipeline.report().numbers
    for ask in (lambda: last.batch, lambda: list(last.minibatches())):
        with pytest.raises(RuntimeError, match=r"holds no rows. To read them, keep .* pipeline.run\(batch\)"):
            ask()


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, ShuffleSplit(minibatches=2, seed=1)])
def test_a_call_keeps_no_reference_to_the_batch(split):
    pipeline = Pipeline(stages(gate=None, split=split, weight=LossWeight()))
    batch = batch_of([float(i % 3) for i in range(12)], [i // 3 for i in range(12)])
    batch["stranger", "large"] = torch.zeros(12, 1000)
    names = [("tokens", "full"), REWARD, ("stranger", "large"), ("masks", "all_assistant_mask")]
    alive = [weakref.ref(batch.get(name).untyped_storage()) for name in names]
    out = pipeline(batch)
    alive += [weakref.ref(out.get(name).untyped_storage()) for name in names]
    del batch, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 8
    assert pipeline.metrics["rows/in"] == 12
    assert len(pipeline.report()) == 12


def four_steps() -> Pipeline:
    return Pipeline({"split": ShuffleSplit(minibatches=4, unit="sample")})


def eight_rows(make_batch, n: int = 8) -> TensorDict:
    return make_batch([float(i) for i in range(n)], [0] * n)


@pytest.mark.parametrize(
    "look",
    [
        lambda run: run.batch,
        lambda run: next(run.minibatches()),
        lambda run: list(run.minibatches()),
        lambda run: None,
    ],
    ids=["the whole batch", "one minibatch", "all minibatches", "nothing"],
)
def test_reading_a_run_before_training_leaves_its_checkpoint_unchanged(make_batch, look):
    """After the first of four minibatches, three are left, even if the run was read before."""
    pipeline, batch = four_steps(), eight_rows(make_batch)
    run = pipeline.run(batch)
    orders = [part["rollout_id"].tolist() for part in four_steps().minibatches(batch)]
    look(run)
    taken = run.minibatches()
    assert next(taken)["rollout_id"].tolist() == orders[0]
    restored = four_steps()
    restored.load_state_dict(pipeline.state_dict())
    assert [part["rollout_id"].tolist() for part in restored.minibatches(batch)] == orders[1:]

"""Rollouts through TransferQueue to an assembler, and optimiser steps to ranks."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from assembly import Line, batch_of_lines, same_rows
from batches import batch_of
from composed import composed
from saving import as_saved
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

from headrace.pipeline import (
    RepeatSampler,
    RolloutQueue,
    RolloutStream,
    StepQueue,
    assembled,
    group_sampler,
)
from headrace.transforms import BatchError, GroupAssembler, MissingKeyError, StalledError

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
transfer_queue = pytest.importorskip("transfer_queue", reason="the extra `tq` is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("queue")]

PATIENCE = 60.0
LINES = [Line(g, 2 * g + r, s, s == 1) for g in range(6) for s in (0, 1) for r in (0, 1)]


@pytest.fixture
def name(request) -> str:
    """The name of a partition that no other test has."""
    return request.node.name


def keys_in(partition: str) -> list[str]:
    return list(transfer_queue.kv_list(partition).get(partition, {}))


def send(queue: RolloutQueue, batches: Sequence[TensorDictBase]) -> None:
    for batch in batches:
        queue.put(batch)
    queue.end()


# -- rollouts ---------------------------------------------------------------------------------------------


def wide_rows() -> TensorDict:
    rows = batch_of_lines(LINES)
    rows["advantage"], rows["half"] = torch.rand(24, 1, 1), torch.rand(24, 3).half()
    return rows.update({"none": torch.zeros(24, 0), "brain": torch.rand(24, 2).bfloat16()})


def ragged_rows() -> TensorDictBase:
    def row(number: int) -> TensorDict:
        tokens = {"full": torch.arange(number + 1), "deep": torch.rand(number + 2, 3)}
        return TensorDict({"tokens": tokens, "text": f"row {number}", "id": torch.tensor(number)})

    return lazy_stack([row(number) for number in range(4)])


@pytest.mark.parametrize(
    "rows",
    [
        wide_rows()[:1],
        wide_rows().view(6, 4),
        lazy_stack(list(wide_rows().unbind(0))),
        ragged_rows(),
    ],
    ids=["one row", "envs and time", "lazy", "ragged"],
)
def test_rows_come_out_unchanged(rows, name):
    send(RolloutQueue(name), [rows])
    (found,) = RolloutQueue(name, producers=1)
    flat = rows.reshape(-1)
    assert type(found) is type(flat)
    lazy = isinstance(found, LazyStackedTensorDict)
    assert lazy or not any(leaf.is_nested for leaf in found.exclude("text").values(True, True))
    same_rows(found, flat)
    assert keys_in(name) == []


@ray.remote(num_cpus=0, max_retries=0)
def produce(queue: RolloutQueue, pieces: Sequence[TensorDict], dies: bool = False) -> None:
    for piece in pieces:
        queue.put(piece)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    queue.end()


def test_a_dead_producer_is_a_stall_in_bounded_time(name):
    rows, handle = batch_of_lines(LINES[:7]), RolloutQueue(name)
    producer = produce.remote(handle, rows.split(3), dies=True)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(producer)
    stream = iter(assembled(RolloutQueue(name, producers=1), GroupAssembler(), patience=0.5))
    assert next(stream)["number"].tolist() == [0, 2, 1, 3]
    with pytest.raises(StalledError, match=r"silent for 0.5 s.*group 1 has 1 of 2.*7 arrived, 3 held"):
        list(stream)


def test_rows_with_other_columns_are_read_separately_and_lose_none(name):
    """For one request, the queue would return only the columns that all rows have."""
    rows = batch_of_lines(LINES)
    send(RolloutQueue(name), [rows[:2], rows[2:4].exclude("text"), rows[4:6].exclude("text")])
    first, second = RolloutQueue(name, producers=1)
    same_rows(first, rows[:2])
    same_rows(second, rows[2:6].exclude("text"))


def test_rows_lost_by_the_queue_are_refused(name, monkeypatch):
    send(RolloutQueue(name), [batch_of_lines(LINES[:4])])
    get = transfer_queue.kv_batch_get
    monkeypatch.setattr(transfer_queue, "kv_batch_get", lambda keys, partition: get(keys[1:], partition))
    with pytest.raises(
        BatchError, match=rf"all rows that were put into partition '{name}'; it returned 3 of 4: \w+/0"
    ):
        next(iter(RolloutQueue(name)))
    monkeypatch.setattr(transfer_queue, "kv_batch_get", lambda *args: get(*args).exclude("group_id"))
    with pytest.raises(
        BatchError, match=r"all columns that were put; it returned only \['expected_rollouts'"
    ):
        next(iter(RolloutQueue(name)))


def test_keys_with_dots_are_refused(name):
    with pytest.raises(BatchError, match=r"keys without dots; found \('next', 'a.b'\)"):
        RolloutQueue(name).put(TensorDict({("next", "a.b"): torch.zeros(2)}, batch_size=[2]))
    RolloutQueue(name).put(None)
    RolloutQueue(name).put(TensorDict({}, batch_size=[0]))
    assert keys_in(name) == []


def test_rows_are_read_in_complete_puts_up_to_a_limit(name):
    source = RolloutQueue(name, producers=1, max_rows=5)
    rows = batch_of_lines(LINES)
    send(RolloutQueue(name), rows[:12].split([3, 2, 4, 3]))
    assert [len(batch) for batch, _ in zip(source, range(2), strict=False)] == [5, 7]


@pytest.mark.parametrize(
    ("at", "after", "groups"),  # `after`: number of states that were saved after the loaded one
    [(1, 0, 1), (2, 1, 1), (1, 1, 4)],  # with four groups per batch the source ends before the last batch
)
def test_a_reader_resumes_from_its_last_state_or_the_one_before(at, after, groups, name):
    def read(state: dict[str, Any] | None = None) -> Any:
        source = RolloutQueue(name, producers=1, clear="saved", max_rows=5)
        stream = assembled(source, GroupAssembler(groups=groups), patience=PATIENCE)
        if state is not None:
            stream.load_state_dict(state)
        return stream

    def numbers(batches) -> list[list[int]]:
        return [batch["number"].tolist() for batch in batches]

    rows = batch_of_lines(LINES)
    expected = numbers(assembled(rows.split(5), GroupAssembler(groups=groups)))
    at = min(at, len(expected) - 1)
    send(RolloutQueue(name), rows.split(7))
    stream, states = read(), []
    batches, begun = iter(stream), []
    for _ in range(at + 1):  # a state is saved after each batch; a batch after the last state comes again
        begun += numbers([next(batches)])
        if len(states) < at + after:
            states.append(as_saved(stream.state_dict()))
    assert begun == expected[: at + 1]
    again = read(states[at - 1])
    assert numbers(again) == expected[at:]
    for _ in range(2):
        again.state_dict()
    assert keys_in(name) == []


# -- optimiser steps --------------------------------------------------------------------------------------


def minibatches(ranks: int, *, groups: int = 4, epochs: int = 1) -> list[TensorDictBase]:
    ids = torch.arange(4 * groups)
    batch = batch_of((ids % 3).float().tolist(), (ids // 4).tolist(), ids.tolist())
    words = ("pipeline=grpo", "pipeline.stages.gate.group_size=4", "pipeline.stages.split.minibatches=2")
    pipeline = composed(
        *words, f"pipeline.stages.split.ranks={ranks}", "pipeline.stages.split.microbatches=2"
    )
    return list(pipeline.run(batch, epochs=epochs).minibatches())


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_gets_exactly_its_rows_of_each_step(ranks, name):
    steps, queue = minibatches(ranks, epochs=2), StepQueue(name, ranks=ranks)
    assert queue.put(iter(steps)) == len(steps) == 4
    queue.end()
    reader = StepQueue(name, ranks=ranks)
    for rank in range(ranks):
        found = list(reader.minibatches(rank, patience=PATIENCE))
        for step, part in zip(steps, found, strict=True):
            mine = step["headrace", "rank"] == rank if ranks > 1 else torch.ones(len(step)).bool()
            same_rows(part, step[mine])
            assert len(part) == len(step) // ranks
        assert keys_in(f"{name}/{rank}") == []


def test_a_rank_without_rows_takes_part_in_each_step(name):
    queue = StepQueue(name, ranks=3)
    queue.put(minibatches(2))
    queue.end()
    assert [len(part) for part in queue.minibatches(2)] == [0, 0]


def test_rows_without_a_rank_are_refused_before_sending(name):
    queue, steps = StepQueue(name, ranks=2), minibatches(3)
    with pytest.raises(BatchError, match="ranks 0 to 1; found rank 2"):
        queue.put(steps)
    with pytest.raises(MissingKeyError, match=r"StepQueue needs the column.*written by ShuffleSplit"):
        queue.put([steps[0].exclude(("headrace", "rank"))])
    assert keys_in(f"{name}/0") == keys_in(f"{name}/1") == []


def test_waiting_for_the_other_side_ends_in_bounded_time(name):
    queue = StepQueue(name, ranks=2, max_steps=1)
    with pytest.raises(StalledError, match=r"rank 1 has waited 0.1 s for optimiser step 0"):
        next(queue.minibatches(1, patience=0.1))
    steps = minibatches(2)
    queue.put(steps[:1])
    with pytest.raises(StalledError, match=r"rank 0 has not taken optimiser step 0 for 0.1 s"):
        queue.put(steps[1:], patience=0.1)
    taken = [len(next(queue.minibatches(rank))) for rank in (0, 1)]
    assert sum(taken) == len(steps[0])
    assert queue.put(steps[1:], patience=PATIENCE) == 1


# -- all of it --------------------------------------------------------------------------------------------


@pytest.mark.torchrl
def test_the_example_trains_two_ranks():
    rewards, ranks = importlib.import_module("transfer_queue_grpo").main(batches=2, producers=1)
    assert len(rewards) == 2
    assert [steps for steps, _ in ranks] == [4, 4]
    assert all(rows > 0 for _, rows in ranks)


def test_a_missing_extra_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    makes = [lambda: RolloutQueue("rollouts"), lambda: StepQueue("steps", ranks=1)]
    for make in (*makes, lambda: group_sampler(GroupAssembler())):
        message = r"(Queue|group_sampler) needs transfer_queue: pip install 'headrace\[tq\]'"
        with pytest.raises(ImportError, match=message):
            make()


def test_a_stream_reads_a_queue_and_waits_for_slow_groups(name):
    """`group_sampler` advises such a stream if policy versions matter. Each group is trained once."""
    sampler = RepeatSampler(12, group_size=2, prompts_per_batch=2, shuffle=False)
    stream = RolloutStream(
        sampler,
        epochs=1,
        max_staleness=4,
        source=RolloutQueue(name, producers=1),
        patience=PATIENCE,
    )

    def dispatch() -> None:
        queue, slow = RolloutQueue(name), list[TensorDictBase]()
        for draws in stream.draws(wait=True, patience=PATIENCE):
            draws["next", "done"] = torch.ones(len(draws), dtype=torch.bool)
            draws["next", "policy_version"] = torch.full((len(draws),), stream.version)
            slow.append(draws)
            if len(slow) > 1:  # groups arrive in reverse order
                queue.put(slow.pop())
        for draws in slow:
            queue.put(draws)
        queue.end()

    with ThreadPoolExecutor(1) as pool:
        done, groups = pool.submit(dispatch), list[int]()
        for batch in stream:
            groups += batch["group_id"].unique().tolist()
            stream.version += 1
        done.result()
    assert sorted(groups) == list(range(12))
    assert stream.counts["stale"] == 0

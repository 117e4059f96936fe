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
from queue_here import QueueHere
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

from headrace.pipeline import (
    RepeatSampler,
    RolloutQueue,
    RolloutStream,
    StepQueue,
    assembled,
    group_sampler,
)
from headrace.transforms import GroupAssembler, StalledError

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


def test_the_queue_of_one_process_answers_as_transfer_queue_does(name):
    """So laws of queues may use it (`queue_here`)."""

    def answers(queue: Any) -> list[Any]:
        found: list[Any] = []

        def look(keys: Sequence[str], **options: Any) -> None:
            rows = queue.kv_batch_get(list(keys), name, **options)
            columns = {key: rows.get(key) for key in sorted(rows.keys())}
            kinds = {key: (type(column), getattr(column, "is_nested", 0)) for key, column in columns.items()}
            values = {
                key: [each.tolist() if isinstance(each, torch.Tensor) else each for each in column.unbind()]
                if isinstance(column, torch.Tensor)
                else column.tolist()
                for key, column in columns.items()
            }
            found.append((len(rows), kinds, values))

        ragged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
        fields = {"wide": torch.rand(2, 3, generator=torch.manual_seed(0)), "one": torch.tensor([4, 5])}
        rows = TensorDict({**fields, "text": ["a", "b"], "ragged": ragged}, batch_size=[2])
        queue.kv_batch_put(["k", "l"], name, fields=rows, tags=[{"n": 1}, {"n": 2}])
        queue.kv_batch_put(["m"], name, fields=rows.select("wide", "one")[:1])
        queue.kv_batch_put(["l", "only"], name, tags=[{"more": 3}, {"n": 4}])
        found.append(queue.kv_list(name))
        look(["k", "l"])
        look(["l", "m", "k"])
        look(["k", "lost"])
        look(["k", "l"], select_fields=["one", "absent"])
        queue.kv_clear(["k", "only"], name)
        found.append(queue.kv_list(name))
        look(["k", "l", "m"])
        queue.kv_clear(["l", "m"], name)
        found.append(queue.kv_list(name).get(name, {}))
        return found

    assert answers(QueueHere()) == answers(transfer_queue)


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

"""A stream on Ray under load: no object of Ray's store is lost, and each row is trained once."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from typing import Any

import pytest
import torch
from faults import LONGEST
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import RayAssembler

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]

WRITERS, TAKERS, SIZE, TOKENS = 3, 2, 4, 2000


@ray.remote(num_cpus=0, max_retries=0)
def write(assembler: RayAssembler, writer: int, ends: float) -> int:
    """Put ragged rows of many groups, a few in each put. Return the number of groups."""
    torch.set_num_threads(1)
    group = writer
    while time.time() < ends:
        groups = range(group, group + 8 * WRITERS, WRITERS)
        for rollout in range(SIZE):
            rows = []
            for each in groups:
                ids = {"group_id": each, "rollout_id": each * SIZE + rollout, "expected_rollouts": SIZE}
                row = TensorDict({name: torch.tensor(number) for name, number in ids.items()})
                row["next", "done"] = torch.tensor([True])
                row["tokens"] = torch.full((TOKENS + each % 7,), each * SIZE + rollout)
                rows.append(row)
            assembler.put(lazy_stack(rows))
        group += 8 * WRITERS
    return group // WRITERS


@ray.remote(num_cpus=0, max_retries=0)
def take(assembler: RayAssembler, writers: list[Any]) -> list[int]:
    """The ids of the rollouts that were taken. A row with the tokens of another rollout raises."""
    torch.set_num_threads(1)
    found: list[int] = []
    for batch in assembler.batches(writers, patience=LONGEST):
        for row in batch.unbind(0):
            rollout = int(row["rollout_id"])
            if not (row["tokens"] == rollout).all():
                raise ValueError(f"rollout {rollout} has tokens of another one")
            found.append(rollout)
    return found


def spin(over: Any) -> None:
    while not over.is_set():
        sum(range(10_000))


def under_load(seconds: float) -> tuple[Counter[int], int]:
    """How often each rollout was taken under load, and the number of rollouts that were written."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    busy = [context.Process(target=spin, args=(over,)) for _ in range(2 * (os.cpu_count() or 1))]
    for process in busy:
        process.start()
    try:
        assembler = RayAssembler(groups=4, max_ready=32)
        writers = [write.remote(assembler, number, time.time() + seconds) for number in range(WRITERS)]
        takers = [take.remote(assembler, writers) for _ in range(TAKERS)]
        found = Counter(rollout for taken in ray.get(takers) for rollout in taken)
        groups = sum(ray.get(writers))
        assembler.shutdown()
    finally:
        over.set()
        for process in busy:
            process.join()
    return found, groups * SIZE


@pytest.mark.long
def test_no_object_is_lost_and_each_row_is_trained_once_under_load():
    found, rollouts = under_load(float(os.environ.get("SOAK", "900")))
    print(f"{rollouts} rollouts of {WRITERS} writers")
    assert len(found) == rollouts
    assert set(found.values()) == {1}

"""Workers of TorchRL lose no row that can be kept. Other losses are counted, and silent workers are named."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time

import pytest
import torch
from processes import quick_starts
from quizzes import quiz_makers
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector, _runner
from turns import hang

from headrace.pipeline import assembled
from headrace.transforms import GroupAssembler, StalledError, StreamWarning

pytestmark = [pytest.mark.torchrl, pytest.mark.slow, pytest.mark.filterwarnings("ignore:rollouts do not end")]

WAIT = 0.5  # seconds that a worker waits for the trainer to take its rows; TorchRL's own value is 1
STEP = 0.8  # seconds of a trainer's step


@pytest.fixture(autouse=True, scope="module")
def workers_start_quickly():
    with quick_starts():
        yield


def made_by_one_that_waits_less(make):
    _runner._TIMEOUT = WAIT  # in the worker's process, before it collects
    return make()


def collector(kind=MultiAsyncCollector, **troubles):
    makers = quiz_makers(2, troubles={int(name[1:]): trouble for name, trouble in troubles.items()})
    makers = [functools.partial(made_by_one_that_waits_less, make) for make in makers]
    return kind(makers, frames_per_batch=12, total_frames=-1)


def close(source) -> None:
    for process in source.procs:
        with contextlib.suppress(ValueError):  # the process is closed
            process.kill()  # TorchRL would wait for a worker that hangs
    source.shutdown(raise_on_error=False)


def check_rollouts(batch) -> None:
    """Check that each rollout has all its rows: rollout n of a worker has 1 + n mod 3 rows."""
    numbers = {}
    for rollout, number, dispatched in zip(
        *(batch[key].flatten().tolist() for key in ("rollout_id", "number")),
        batch["headrace", "origin"][:, 0].tolist(),
        strict=True,
    ):
        numbers.setdefault((rollout, number), []).append(dispatched)
    for (_, number), rows in numbers.items():
        assert sorted(rows) == list(range(1 + number % 3))


def train_alone(source, assembler) -> int:
    trained = 0
    for rows in itertools.islice(source, 5):
        assembler.put(rows)
        if (batch := assembler.take()) is not None:
            check_rollouts(batch)
            trained += len(batch)
        time.sleep(STEP)
    return trained


def test_rows_a_collector_discards_are_counted_and_not_trained():
    source, assembler = collector(), GroupAssembler()
    try:
        with pytest.warns(StreamWarning, match="rollouts? got lost between their worker and the assembler"):
            trained = train_alone(source, assembler)
    finally:
        close(source)
    assert assembler.counts["lost"] > 0
    assert trained + assembler.held + sum(assembler.counts.values()) == 5 * 12


def test_a_hanging_worker_is_named_while_another_continues():
    """This test sets only `patience`; test_fault_table.py tests `worker_patience`."""
    source, begun = collector(w1=functools.partial(hang, at=6)), time.monotonic()
    try:
        with pytest.raises(
            StalledError, match=r"worker 1 .*silent for.*its last was row \d of rollout \d+.*Wait"
        ):
            list(assembled(source, GroupAssembler(max_idle=10**6), patience=1.5))
    finally:
        close(source)
    assert time.monotonic() - begun < 60


def train_slowly(stream) -> None:
    for _ in itertools.islice(stream, 30):
        time.sleep(STEP)


def test_a_hanging_worker_is_named_despite_surplus_rows():
    source = collector(w1=functools.partial(hang, at=12))
    try:
        with pytest.raises(StalledError, match=r"worker 1 .*silent for"):
            train_slowly(assembled(source, GroupAssembler(), worker_patience=1.2))
    finally:
        close(source)


def test_a_hanging_worker_is_named_though_each_batch_has_rows_of_all():
    """`patience` is not set, because the collector is silent as long as the worker is."""
    source = collector(MultiSyncCollector, w0=functools.partial(hang, at=6))
    try:
        with pytest.raises(StalledError, match=r"silent for 1.5 s: no rows of worker 0\..*Waiting: group"):
            list(assembled(source, GroupAssembler(), worker_patience=1.5))
    finally:
        close(source)


def test_a_worker_may_pause_ten_times_as_long_as_before():
    source, groups = collector(w1=slow), set()
    try:
        for batch in assembled(source, GroupAssembler(max_idle=10**6), patience=2):
            groups |= {group for group in batch["group_id"].flatten().tolist() if group % 2}
            if len(groups) > 6:  # the slow worker has sent a row after its long pause
                break
    finally:
        close(source)
    assert len(groups) > 6


def slow(steps: int) -> None:
    time.sleep(0.2 if steps != 16 else 3.0)


def test_a_dead_worker_is_named_though_torchrl_raises_another_error():
    class Ended:
        def __init__(self, code):
            self.exitcode = code

    class Source:
        procs = (Ended(-15), Ended(3))

        def __iter__(self):
            raise ValueError("Cannot close a process while it is still running")
            yield

    with pytest.raises(RuntimeError, match=r"worker 1 \(exit code 3\)"):
        list(assembled(Source(), GroupAssembler()))


def test_a_slow_trainer_loses_no_row_of_asynchronous_workers_in_two_loops():
    source, assembler, batches = collector(), GroupAssembler(), []
    stream = assembled(source, assembler)
    try:
        for _ in range(2):  # the second continues where the first stopped
            for batch in itertools.islice(stream, 2):
                batches.append(batch)
                time.sleep(STEP)
    finally:
        close(source)
    check_rollouts(torch.cat(batches))
    assert not any(assembler.counts.values())

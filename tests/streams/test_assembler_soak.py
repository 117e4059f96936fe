"""A slow trainer runs over asynchronous workers for a long time. Each rollout is trained, counted or held."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections import defaultdict

import pytest
import torch
from processes import quick_starts
from quizzes import quiz_makers
from tensordict import TensorDictBase
from torchrl.collectors import MultiAsyncCollector

from headrace.pipeline import assembled
from headrace.transforms import GroupAssembler

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:rollouts do not end"),
]

SECONDS = float(os.environ.get("SOAK", "900"))
LONGEST = 2.5  # seconds of a trainer's step: after one second the worker's queue drops rows
WORKERS, REPEATS = 2, 2


def now_and_then(steps: int, *, rng: random.Random) -> None:
    """Make a worker slow for a moment in one of a hundred of its environment's steps."""
    if rng.random() < 0.01:
        time.sleep(3 * rng.random())


class CountingAssembler(GroupAssembler):
    """An assembler that counts the rows that arrive, and remembers the newest rollout of each worker."""

    def __init__(self, **options):
        super().__init__(**options)
        self.came, self.begun = 0, defaultdict(set)

    def put(self, batch: TensorDictBase) -> None:
        if len(batch):
            rows = batch.reshape(-1)
            self.came += len(rows)
            for worker, rollout in zip(
                rows["headrace", "origin"][:, 1].tolist(), rows["rollout_id"].flatten().tolist(), strict=True
            ):
                self.begun[worker].add(rollout)
        super().put(batch)


def test_started_rollouts_are_trained_counted_or_held(tmp_path):
    rng, trained, ends = random.Random(0), defaultdict(int), time.monotonic() + SECONDS
    assembler = CountingAssembler(journal=tmp_path / "rows", max_idle=10**6)
    with quick_starts():
        trouble = functools.partial(now_and_then, rng=random.Random(1))
        makers = quiz_makers(WORKERS, troubles={1: trouble})
        source = MultiAsyncCollector(makers, frames_per_batch=12, total_frames=-1)
        try:
            for batch in assembled(source, assembler, patience=60):
                for rollout in batch["rollout_id"].flatten().tolist():
                    trained[rollout] += 1
                time.sleep(LONGEST * rng.random())
                assembler.commit()
                if time.monotonic() > ends:
                    break
        finally:
            for process in source.procs:
                with contextlib.suppress(ValueError):  # the process is closed
                    process.kill()
            source.shutdown(raise_on_error=False)
    counted = sum(assembler.counts.values())
    assert assembler.came == sum(trained.values()) + counted + assembler.held
    assert counted == assembler.counts["lost"]
    # Rollouts are numbered: each worker has begun all rollouts up to its newest, and none may be missing.
    for worker, begun in assembler.begun.items():
        newest = max(begun)
        of_worker = [n for n in range(newest + 1) if n // REPEATS % WORKERS == worker]
        assert counted or begun == set(of_worker)
    for rollout, rows in trained.items():
        place = rollout // REPEATS // WORKERS * REPEATS + rollout % REPEATS
        assert rows == 1 + place % 3
    # An assembler that continues from the journal holds the same rows.
    again = GroupAssembler(journal=tmp_path / "rows", max_idle=10**6)
    assert (again.held, again.counts) == (assembler.held, assembler.counts)
    if (rest := again.take_rest()) is not None:
        assert not set(rest["rollout_id"].flatten().tolist()) & set(trained)
    assert torch.tensor(list(trained.values())).sum() > 0

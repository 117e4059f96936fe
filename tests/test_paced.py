"""Groups are dispatched only while they can still be trained in time."""

from __future__ import annotations

import threading

import pytest
import torch

from headrace.pipeline import RepeatSampler, paced
from headrace.transforms import GroupAssembler, StalledError

pytestmark = pytest.mark.slow


def test_nothing_is_dispatched_that_would_be_stale_for_any_trainer_speed():
    assembler = GroupAssembler(groups=2, max_staleness=1, max_idle=10**6)
    sampler = RepeatSampler(64, group_size=2, prompts_per_batch=1)
    dispatched, trained, go_on = [], [], threading.Event()

    def dispatch():
        for number, draw in enumerate(paced(sampler.draws(), assembler, patience=60)):
            version = torch.full((2,), assembler.version)
            dispatched.append((number, assembler.version))
            done = torch.ones(2, dtype=torch.bool)
            assembler.put(draw.set(("next", "done"), done).set(("next", "policy_version"), version))
            if number == 19:
                break
        go_on.set()

    thread = threading.Thread(target=dispatch)
    thread.start()
    while len(trained) < 10:
        batch = assembler.take()
        if batch is None:
            assert thread.is_alive() or assembler.ready or go_on.is_set()
            continue
        trained.append(assembler.version - int(batch["next", "policy_version"].min()))
        assembler.version += 1
    thread.join(60)
    assert max(trained) <= 1
    assert assembler.counts["stale"] == 0
    for number, version in dispatched:
        assert number < 2 * (version + 2)


def test_missing_capacity_is_reported_in_time():
    assembler = GroupAssembler(groups=1, max_staleness=0)
    draws = paced(RepeatSampler(4, group_size=2).draws(), assembler, patience=0.1)
    assert next(draws)["group_id"].tolist() == [0, 0]
    with pytest.raises(StalledError, match=r"No capacity to dispatch 1 groups for 0.1 s.*group 0 has 0 of 2"):
        next(draws)
    with pytest.raises(ValueError, match="finite and > 0"):
        paced([], assembler, patience=-1)

"""A batch on an accelerator is read as seldom as documented. Its numbers equal the numbers on the CPU."""

from __future__ import annotations

import pytest
import torch
from any_rank import collected
from composed import composed
from fake_device import FakeDevice

from headrace.transforms import take_rows

OF_ROWS = ("grpo", "dapo", "rloo", "dr_grpo", "gdpo")  # these decide by a few numbers per row


def same(there, here) -> bool:
    keys = set(here.keys(True, True)) - {"prompt_text"}
    pairs = [(there.get(key), here.get(key)) for key in keys]
    return set(there.keys(True, True)) - {"prompt_text"} == keys and all(
        torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in pairs
    )


@pytest.mark.parametrize("recipe", OF_ROWS)
def test_a_batch_is_read_once_and_copied_once_with_the_numbers_of_the_cpu(recipe):
    batch = collected("uniform", recipe).exclude("prompt_text")
    words = (f"pipeline={recipe}", "pipeline.stages.split.minibatches=2")
    here = list(composed(*words).minibatches(batch))
    with FakeDevice() as fake:
        pipeline = composed(*words)
        there = list(pipeline.minibatches(fake.put(batch)))
        assert (len(fake.reads), len(fake.asynchronous)) == (1, 1), (fake.reads, fake.asynchronous)
        there = [fake.get(minibatch) for minibatch in there]
    assert all(same(one, other) for one, other in zip(there, here, strict=True))


def test_metrics_and_ledger_cost_no_device_read():
    batch = collected("uniform", "grpo").exclude("prompt_text")
    with FakeDevice() as fake:
        run = composed("pipeline=grpo").run(fake.put(batch))
        before = len(fake.reads)
        assert run.metrics["rows/in"] == len(batch)
        assert run.ledger.counts()["trained"] > 0
        assert len(fake.reads) == before


def test_dropped_rows_cost_no_second_read():
    batch = collected("uniform", "grpo").exclude("prompt_text")
    some = take_rows(batch, torch.arange(len(batch) - 1))
    with FakeDevice() as fake:
        run = composed("pipeline=grpo", "pipeline.stages.gate.on_incomplete=drop").run(fake.put(some))
        assert len(list(run.minibatches())) == 1
        assert len(fake.reads) == 1, fake.reads

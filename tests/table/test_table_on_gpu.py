"""CUDA tensors give the golden numbers, and cost no undocumented device read."""

from __future__ import annotations

import pytest
import torch
from any_rank import collected
from batches import batch_of
from composed import composed
from test_table_device_reads import OF_ROWS, same

from headrace.pipeline import load_pipeline
from headrace.transforms import group_relative_advantage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


FANNED = ([1.0, 3, 3, 5, 11], [0, 0, 0, 1, 1], [0, 1, 1, 2, 3])


def test_cuda_tensors_give_the_golden_numbers():
    reward, groups, rollouts = (torch.tensor(column, device="cuda") for column in FANNED)
    assert group_relative_advantage(reward, groups, rollouts, scale="none").tolist() == [-1, 1, 1, -3, 3]
    found = group_relative_advantage(torch.tensor([1.0, 3, 5], device="cuda"), [0, 0, 1])
    assert found.tolist() == pytest.approx([-0.70710629, 0.70710629, 0.0], abs=5e-8)  # ±1 / (√2 + 1e-6)


@pytest.mark.parametrize("segments", [1, 3])
def test_groups_of_one_size_have_the_bits_of_the_reshape_formula(segments):
    reward = torch.randn(512, device="cuda")
    x = reward.view(64, 8)
    x = x - x.mean(-1, keepdim=True)
    expected = (x / (x.std(-1, keepdim=True) + 1e-6)).flatten().repeat_interleave(segments)
    ids = torch.arange(512, device="cuda").repeat_interleave(segments)
    rows = reward.repeat_interleave(segments)
    found = group_relative_advantage(rows, ids // 8, ids, dtype=torch.float32)
    assert torch.equal(found, expected)


def test_devices_give_equal_results():
    generator = torch.Generator().manual_seed(0)
    reward = torch.randint(0, 5, (300,), generator=generator).float()
    groups = torch.randint(0, 40, (300,), generator=generator)
    on_gpu = group_relative_advantage(reward.cuda(), groups.cuda())
    torch.testing.assert_close(on_gpu.cpu(), group_relative_advantage(reward, groups))


def test_the_pipeline_runs_on_the_device_of_the_batch():
    batch = batch_of(*FANNED, device="cuda")
    pipeline = load_pipeline("pipeline=grpo", "pipeline.stages.gate.group_size=2")
    out = pipeline(batch)
    assert out["advantage"].device.type == "cuda"
    assert pipeline.metrics["rollouts/trained"] == 4


@pytest.mark.parametrize("recipe", OF_ROWS)
def test_a_batch_is_read_once_with_the_numbers_of_the_cpu(recipe):
    """The only device read before minibatches are gathered is one packed copy."""
    batch = collected("uniform", recipe).exclude("prompt_text")
    pipeline = composed(f"pipeline={recipe}", "pipeline.stages.split.minibatches=2")
    here = list(pipeline.minibatches(batch))
    pipeline = composed(f"pipeline={recipe}", "pipeline.stages.split.minibatches=2")
    there = batch.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as found:
            steps = pipeline.minibatches(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) == 1
    assert all(same(one.cpu(), other) for one, other in zip(steps, here, strict=True))

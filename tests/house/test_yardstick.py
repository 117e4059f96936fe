"""The NumPy yardstick of the benchmarks makes the minibatches that the pipeline makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline import load_pipeline

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # after tests/support, which has a batches.py
import numpy_grpo

ROUNDED = ("advantage", "loss_weight")
GROUP_SIZE = 4  # divisible by 1, 2 and 4, so any number of groups can be cut into so many minibatches


def random_batch(seed: int, *, incomplete: bool) -> TensorDict:
    """Groups of 4 rollouts of 1 to 3 rows, shuffled or in order. The ids have gaps."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    groups, tokens = int(draw(1, 9)), int(draw(1, 40))
    label = torch.randperm(1000, generator=generator)[:groups].sort().values
    group = label.repeat_interleave(GROUP_SIZE)
    reward = [
        torch.randn(len(group), generator=generator),
        draw(0, 2, len(group)).float(),  # some groups have equal rewards
        torch.full((len(group),), 0.7),
    ][seed % 3]
    rollout = torch.arange(len(group)) * 3 + 5
    segments = draw(1, 4, len(group)) if seed % 2 else torch.ones_like(group)
    if incomplete:
        segments[draw(0, len(group), 2)] = 0
    group, rollout, reward = (column.repeat_interleave(segments) for column in (group, rollout, reward))
    rows = len(group)
    log_prob = -torch.rand(rows, tokens, generator=generator)
    log_prob[draw(0, 20, rows, tokens) == 0] = float("nan")
    mask = draw(0, 3, rows, tokens) > 0
    mask[draw(0, 8, rows) == 0] = False
    columns = {
        "group_id": group,
        "rollout_id": rollout,
        "expected_rollouts": torch.full((rows,), GROUP_SIZE),
        ("next", "reward"): reward.unsqueeze(-1),
        ("tokens", "full"): draw(0, 99, rows, tokens),
        ("masks", "all_assistant_mask"): mask,
        ("masks", "all_attention_mask"): torch.ones_like(mask),
        ("log_probs", "full"): log_prob,
    }
    batch = TensorDict(columns, batch_size=[rows])
    return batch[torch.randperm(rows, generator=generator)] if seed % 5 else batch


def assert_equal(found: TensorDict, expected: TensorDict, what: str) -> None:
    """Check for equal columns and bits. A rounded number may differ by one unit in the last place."""
    assert set(found.keys(True, True)) == set(expected.keys(True, True)), what
    for key, column in expected.items(True, True):
        other = found[key]
        assert (other.dtype, other.shape) == (column.dtype, column.shape), f"{what}: {key}"
        if key in ROUNDED:
            step = torch.nextafter(column.abs(), torch.tensor(torch.inf)) - column.abs()
            assert ((other - column).abs() <= step).all(), f"{what}: {key}"
        else:
            assert torch.equal(other.nan_to_num(7.0), column.nan_to_num(7.0)), f"{what}: {key}"


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_the_yardstick_makes_the_minibatches_of_the_pipeline(minibatches):
    """Random batches have fan-out, masked groups, rows without tokens, any order, and incomplete groups."""
    words = ("pipeline=grpo", f"pipeline.stages.split.minibatches={minibatches}")
    pipeline = load_pipeline(*words, "pipeline.stages.gate.on_incomplete=drop")
    drawn = trained = 0
    for seed in range(12):
        batch = random_batch(seed + 100 * minibatches, incomplete=seed % 4 == 0)
        expected = list(numpy_grpo.grpo(batch, minibatches, incomplete="drop", drawn=drawn))
        found = list(pipeline.minibatches(batch))
        assert len(found) == len(expected), f"seed {seed}"
        for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
            assert_equal(ours, plain, f"seed {seed}, minibatch {number}")
        drawn += len(found) > 0  # the pipeline draws no permutation for an empty batch
        trained += sum(int((each["loss_weight"] > 0).sum()) for each in found)
    assert trained > 100

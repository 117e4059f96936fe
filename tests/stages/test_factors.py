"""Factors of an advantage: by its sign, by the difficulty of its group, and per token as per row."""

from __future__ import annotations

import math

import pytest
import torch
from batches import batch_of

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    DifficultyWeight,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    SignFactors,
    TurnDiscount,
    difficulty_weight,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_positive_and_negative_advantages_have_their_factors(dtype):
    batch = batch_of([0.0] * 3, [0] * 3)
    batch["advantage"] = torch.tensor([-2.0, 0.0, 4.0], dtype=dtype).view(3, 1, 1)
    out = SignFactors(positive=0.25, negative=2.0)(batch)["advantage"]
    assert out.dtype == dtype
    assert out.flatten().tolist() == [-4, 0, 1]


def test_stages_change_a_token_advantage_as_that_of_its_row():
    """In the table, where rows are gathered, or when a later stage reads it."""
    batch = FanOutCollapse()(batch_of([1.0, 1, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 2, 3]))
    batch["advantage"] = torch.tensor([-2.0, 1, 3, 4, -5]).view(5, 1, 1)
    stages = {
        "difficulty": DifficultyWeight(),
        "signs": SignFactors(positive=0.5),
        "discount": TurnDiscount(discount=0.5),
        "weight": LossWeight(fold="sum"),
    }
    of_rows = Pipeline(stages)(batch)["advantage"]
    by_token = batch.set("advantage", batch["advantage"].expand(5, 4, 1).contiguous())
    torch.testing.assert_close(Pipeline(stages)(by_token)["advantage"], of_rows.expand(5, 4, 1))
    for stage in stages.values():
        by_token = stage(by_token)
    torch.testing.assert_close(by_token["advantage"], of_rows.expand(5, 4, 1))


def test_a_group_is_weighted_by_its_difficulty():
    """MGPO, arXiv:2511.06221."""
    for successes in range(5):
        batch = batch_of([1.0] * successes + [0.0] * (4 - successes), [0] * 4)
        batch = GroupRelativeAdvantage(scale="none")(FanOutCollapse()(batch))
        p = successes / 4
        weight = math.exp(-sum(x * math.log(2 * x) for x in (p, 1 - p) if x))
        found = DifficultyWeight()(batch)["advantage"]
        torch.testing.assert_close(found, batch["advantage"] * weight)
        assert float(difficulty_weight(torch.tensor([p]))) == pytest.approx(weight)


def test_difficulty_needs_rewards_from_0_to_1():
    batch = GroupRelativeAdvantage()(FanOutCollapse()(batch_of([0.0, 1.5], [0, 0])))
    with pytest.raises(BatchError, match=r"needs rewards in \[0, 1\], .*; found 1.5 at row 1 \(rollout 1\)"):
        DifficultyWeight()(batch)

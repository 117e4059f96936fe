"""An advantage, per row or per token, is multiplied by a factor for its sign or its group's difficulty."""

from __future__ import annotations

import math
import random

import pytest
import torch
from alone import said_by
from batches import batch_of

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    DifficultyWeight,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    SampleFilter,
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
    assert torch.equal(SignFactors()(batch)["advantage"], batch["advantage"])


def test_stages_change_an_advantage_per_token_like_an_advantage_per_row():
    """The advantage is changed in the table, when rows are gathered, or when a later stage reads it."""
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
    """The weight of MGPO, arXiv:2511.06221, is exp(−KL((p, 1 − p) ‖ (½, ½))), with the group mean p."""
    for successes in range(5):  # rewards of exactly 0 and 1 are allowed
        batch = batch_of([1.0] * successes + [0.0] * (4 - successes), [0] * 4)
        batch = GroupRelativeAdvantage(scale="none")(FanOutCollapse()(batch))
        p = successes / 4
        weight = math.exp(-sum(x * math.log(2 * x) for x in (p, 1 - p) if x))
        said = said_by(DifficultyWeight(), batch)
        torch.testing.assert_close(said.batch["advantage"], batch["advantage"] * weight)
        assert said.metrics == {"mean": pytest.approx(weight)}
        assert float(difficulty_weight(torch.tensor([p]))) == pytest.approx(weight)


def test_difficulty_needs_rewards_from_0_to_1():
    for wrong in (1.5, -0.5):
        batch = GroupRelativeAdvantage()(FanOutCollapse()(batch_of([0.0, wrong], [0, 0])))
        found = rf"needs rewards in \[0, 1\], .*; found {wrong} at row 1 \(rollout 1\). Put RewardScale after"
        with pytest.raises(BatchError, match=found):
            DifficultyWeight()(batch)


def of_several(rewards: list[list[float]], groups: list[int], ids: list[int] | None = None):
    """A batch of rows with K rewards."""
    batch = batch_of([0.0] * len(groups), groups, ids)
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    return batch


def decoupled(missing: str = "raise") -> dict[str, BatchTransform]:
    """The stages of the recipe gdpo, up to the advantage."""
    options = {"several": "decoupled", "scale": "none", "missing": missing}
    return {
        "collapse": FanOutCollapse(columns=2, missing=missing),
        "advantage": GroupRelativeAdvantage(**options),
    }


@pytest.mark.parametrize("seed", range(100))
def test_a_group_is_weighted_by_the_difficulty_of_one_of_its_rewards(seed):
    """Loops over rollouts give the weights. Some rollouts lack a reward, and some are excluded."""
    chance, nan = random.Random(seed), float("nan")
    group = {number: chance.randint(0, 2) for number in range(9)}
    reward = {
        number: [chance.choice([0.0, 1.0, nan]), chance.choice([-3.0, 7.0, nan])] for number in range(9)
    }
    for each in set(group.values()):  # one rollout of each group has both rewards
        reward[min(number for number in group if group[number] == each)] = [1.0, 2.0]
    ids = [number for number in group for _ in range(chance.randint(1, 3))]
    chance.shuffle(ids)
    batch = of_several([reward[number] for number in ids], [group[number] for number in ids], ids)
    away = {number for number in group if reward[number][0] == 0 and chance.random() < 0.3}
    batch["away"] = torch.tensor([number in away for number in ids])
    out = SampleFilter(criterion=lambda batch: ~batch["away"], action="exclude")
    stages = {"out": out, **decoupled("skip")}
    before = Pipeline(stages)(batch)["advantage"].flatten().tolist()
    run = Pipeline({**stages, "difficulty": DifficultyWeight(reward=0)}).run(batch)
    found, counted = run.batch["advantage"], []
    for row, number in enumerate(ids):
        same = [other for other in group if group[other] == group[number] and other not in away]
        known = [reward[other][0] for other in same if not math.isnan(reward[other][0])]
        p = sum(known) / len(known)
        weight = math.exp(-sum(x * math.log(2 * x) for x in (p, 1 - p) if x))
        assert float(found[row]) == pytest.approx(before[row] * weight, rel=1e-12)
        counted += [weight] if number not in away and not math.isnan(reward[number][0]) else []
    assert run.metrics["difficulty/mean"] == pytest.approx(sum(counted) / len(counted), rel=1e-12)


def test_the_error_of_difficulty_says_which_reward_to_use():
    """The error does not advise RewardScale, because several='decoupled' refuses it."""
    batch = of_several([[0.0, 5], [1, 5], [0, 2]], [0, 0, 1])
    several = Pipeline({**decoupled(), "difficulty": DifficultyWeight()})
    with pytest.raises(BatchError, match=r"found 5.0 at row 0.*\. Set reward=0, or the index of another"):
        several(batch)
    second = Pipeline({**decoupled(), "difficulty": DifficultyWeight(reward=1)})
    with pytest.raises(BatchError, match=r"found 5.0 at row 0.*\. Choose another reward, scale this"):
        second(batch)
    third = Pipeline({**decoupled(), "difficulty": DifficultyWeight(reward=2)})
    with pytest.raises(BatchError, match=r"needs 3 rewards per row; found 2. Set FanOutCollapse\(columns=K"):
        third(batch)
    batch["next", "reward"][2, 0] = float("nan")
    first = Pipeline({**decoupled("skip"), "difficulty": DifficultyWeight(reward=0)})
    with pytest.raises(BatchError, match="the mean of reward 0; no rollout has it in group 1"):
        first(batch)

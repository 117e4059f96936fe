"""An advantage, per row or per token, is multiplied by a factor for its sign or its group's difficulty."""

from __future__ import annotations

import math
import random
import re
import statistics

import pytest
import torch
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


def several_rewards(rewards: list[list[float]], groups: list[int], ids: list[int] | None = None):
    """A batch of rows with K rewards."""
    batch = batch_of([0.0] * len(groups), groups, ids)
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    return batch


def compared(columns: int, missing: str = "raise") -> dict[str, BatchTransform]:
    """The stages up to the advantage: for several rewards, those of the recipe gdpo."""
    several = "decoupled" if columns > 1 else "sum"
    return {
        "collapse": FanOutCollapse(columns=columns, missing=missing),
        "advantage": GroupRelativeAdvantage(several=several, scale="none", missing=missing),
    }


def test_a_group_is_weighted_by_the_difficulty_of_its_reward():
    """Loops give exp(−KL((p, 1 − p) ‖ (½, ½))) of MGPO, arXiv:2511.06221, for the mean p of a group.

    Every second batch has a second reward, which is not averaged. Some rollouts lack a reward, and some are
    excluded.
    """
    for seed in range(16):
        chance, nan, columns = random.Random(seed), float("nan"), 1 + seed % 2
        group = {number: chance.randint(0, 2) for number in range(9)}
        reward = {n: [chance.choice([0, 1.0, nan]), chance.choice([-3.0, 7, nan])] for n in group}
        for each in set(group.values()):  # one rollout of each group has both rewards
            reward[min(n for n in group if group[n] == each)] = [chance.choice([0, 1.0]), 2.0]
        ids = [number for number in group for _ in range(chance.randint(1, 3))]
        chance.shuffle(ids)
        batch = several_rewards([reward[n][:columns] for n in ids], [group[n] for n in ids], ids)
        scored = {n for n in group if not math.isnan(reward[n][0])}
        away = {n for n in scored if sum(group[m] == group[n] for m in scored) > 1 and chance.random() < 0.2}
        away = {n for n in away if {m for m in scored if group[m] == group[n]} - away}
        batch["away"] = torch.tensor([number in away for number in ids])
        out = SampleFilter(criterion=lambda batch: ~batch["away"], action="exclude")
        stages = {"out": out, **compared(columns, "skip")}
        before = Pipeline(stages)(batch)["advantage"].flatten().tolist()
        stage = DifficultyWeight(reward=0 if columns == 2 else None)
        run = Pipeline({**stages, "difficulty": stage}).run(batch)
        p = {
            g: statistics.fmean(reward[n][0] for n in scored - away if group[n] == g) for g in group.values()
        }
        weight = {g: math.exp(-sum(x * math.log(2 * x) for x in (p[g], 1 - p[g]) if x)) for g in p}
        expected = [before[row] * weight[group[n]] for row, n in enumerate(ids)]
        assert run.batch["advantage"].flatten().tolist() == pytest.approx(expected, rel=1e-12), seed
        counted = [weight[group[n]] for n in ids if n in scored - away]
        assert run.metrics["difficulty/mean"] == pytest.approx(statistics.fmean(counted), rel=1e-12), seed


PUT = "Put RewardScale after FanOutCollapse"
SET = "Set reward=0, or the index of another reward that is in [0, 1]"
CHOOSE = "Choose another reward, scale this reward where it is computed"


@pytest.mark.parametrize(
    ("rewards", "options", "found"),
    [
        # RewardScale is not advised for several rewards, because several='decoupled' refuses it.
        ([[0.0], [1.5], [-0.5]], {}, f"1.5 at row 1 (rollout 1), -0.5 at row 2 (rollout 2). {PUT}"),
        ([[0.0, 5], [1, 0], [0, 0]], {}, f"5.0 at row 0 (rollout 0). {SET}"),
        ([[0.0, 5], [9, 1], [9, 0]], {"reward": 1}, f"5.0 at row 0 (rollout 0). {CHOOSE}"),
    ],
)
def test_the_error_of_difficulty_says_which_reward_to_use(rewards, options, found):
    stages = compared(len(rewards[0])) | {"difficulty": DifficultyWeight(**options)}
    with pytest.raises(BatchError) as refused:
        Pipeline(stages)(several_rewards(rewards, [0, 0, 1]))
    assert str(refused.value).partition("needs ")[2] == (
        f"rewards in [0, 1], whose mean is a success rate; found {found}, or remove this stage"
    )


def test_an_unknown_difficulty_is_refused():
    batch = several_rewards([[0.0, 5], [1, 5], [float("nan"), 2]], [0, 0, 1])
    for reward, said in (
        (2, "needs 3 rewards per row; found 2. Set FanOutCollapse(columns=K), or a smaller index; the first"),
        (0, "a group's difficulty is the mean of reward 0; no rollout has it in group 1. Score one, or"),
    ):
        stages = compared(2, "skip") | {"difficulty": DifficultyWeight(reward=reward)}
        with pytest.raises(BatchError, match=re.escape(said)):
            Pipeline(stages)(batch)

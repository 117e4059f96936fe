"""Generalised advantage estimates equal loops over the steps, and the numbers of other trainers."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
import torch
from batches import batch_of, cut_rows
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import (
    GAE,
    BatchError,
    BatchWhitening,
    FanOutCollapse,
    MissingKeyError,
    SampleFilter,
    generalized_advantage,
)

pytestmark = pytest.mark.torchrl

MASK, VALUES = ("masks", "all_assistant_mask"), ("values", "full")


class Drawn:
    """Random rollouts of one to three rows, ordered by the column `turn`. Some tokens are not sampled."""

    def __init__(self, seed: int):
        chance = random.Random(seed)
        self.gamma, self.lam = chance.choice([0.0, 0.9, 1.0]), chance.choice([0.0, 0.5, 0.95, 1.0])
        self.rewards = {9 * number + 4: chance.uniform(-2, 2) for number in range(chance.randint(1, 4))}
        self.ids = [rollout for rollout in self.rewards for _ in range(chance.randint(1, 3))]
        chance.shuffle(self.ids)
        rows, tokens = len(self.ids), chance.randint(1, 9)
        self.turn = chance.sample(range(100), rows)
        self.value = [[chance.uniform(-1, 1) for _ in range(tokens)] for _ in range(rows)]
        self.sampled = [[chance.random() < 0.6 for _ in range(tokens)] for _ in range(rows)]
        self.step = [sorted(chance.randint(0, 3) for _ in range(tokens)) for _ in range(rows)]

    def by_loops(self, per: str, out: frozenset[int] = frozenset()) -> tuple[list, list]:
        """The advantage and the target of each token, by the equations. Rows in `out` do not count."""
        advantage, target = ([[0.0] * len(row) for row in self.value] for _ in range(2))
        for rollout, reward in self.rewards.items():
            rows = sorted((self.turn[row], row) for row, own in enumerate(self.ids) if own == rollout)
            tokens = [(n, t) for _, n in rows if n not in out for t, s in enumerate(self.sampled[n]) if s]
            if per == "token":
                steps = [[token] for token in tokens]
            else:  # per turn or per row
                of = [(n, self.step[n][t] if per == "turn" else 0) for n, t in tokens]
                pairs = zip(of, tokens, strict=True)
                steps = [[token for _, token in some] for _, some in groupby(pairs, lambda pair: pair[0])]
            after = later = 0.0
            for number, step in reversed(list(enumerate(steps))):
                own = self.value[step[0][0]][step[0][1]]
                paid = reward if number == len(steps) - 1 else 0.0
                later = paid + self.gamma * after - own + self.gamma * self.lam * later
                after = own
                for n, t in step:
                    advantage[n][t], target[n][t] = later, later + own
        return advantage, target

    def batch(self) -> TensorDict:
        rewards = [self.rewards[rollout] for rollout in self.ids]
        batch = batch_of(rewards, [0] * len(rewards), self.ids, tokens=len(self.value[0]), turn=self.turn)
        batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
        batch[MASK], batch["turn_index"] = torch.tensor(self.sampled), torch.tensor(self.step)
        batch[VALUES] = torch.tensor(self.value, dtype=torch.float64)
        return batch


def off(found: torch.Tensor, expected: list) -> float:
    numbers = torch.tensor(expected, dtype=torch.float64)
    return float((found.reshape(numbers.shape) - numbers).abs().max())


def test_advantages_equal_loops_over_the_steps_of_a_rollout():
    """The loop follows the rows of a rollout in order. Tokens that were not sampled are not steps."""
    for seed in range(80):
        drawn = Drawn(seed)
        reward = torch.tensor([drawn.rewards[rollout] for rollout in drawn.ids], dtype=torch.float64)
        value, sampled = torch.tensor(drawn.value, dtype=torch.float64), torch.tensor(drawn.sampled)
        ids, turn, step = (torch.tensor(column) for column in (drawn.ids, drawn.turn, drawn.step))
        for per in ("token", "turn"):
            found = generalized_advantage(
                *(value, sampled, reward, ids, turn),
                step=step if per == "turn" else None,
                gamma=drawn.gamma,
                lam=drawn.lam,
            )
            for of_tokens, expected in zip(found, drawn.by_loops(per), strict=True):
                assert off(of_tokens, expected) < 1e-12, (seed, per)


UNITS = {
    "token": {},
    "turn": {"unit": "turn"},
    "row": {"unit": "turn", "turn_index_key": None},
}


@pytest.mark.parametrize("unit", UNITS)
def test_the_stage_equals_the_loops_for_dense_and_ragged_rows(unit):
    """Excluded rows are skipped, and get 0."""
    for seed in range(12):
        drawn = Drawn(seed)
        batch, chance = drawn.batch(), random.Random(seed)
        out = frozenset(row for row in range(len(batch)) if seed % 3 and chance.random() < 0.2)
        batch["out"] = torch.tensor([row in out for row in range(len(batch))])
        if seed % 2:
            lengths = [
                max(1, len(row) - 1 - row[::-1].index(True) if True in row else 0) + 1
                for row in drawn.sampled
            ]
            keys = [
                key for key in batch.keys(True, True) if batch.get(key)[0].ndim == 1 and key != "stranger"
            ]
            keys = [key for key in keys if batch.get(key).shape[1] == len(drawn.value[0])]
            batch = cut_rows(batch, [slice(length) for length in lengths], keys)
        stages = {
            "collapse": FanOutCollapse(),
            "out": SampleFilter(criterion=lambda batch: ~batch["out"], action="exclude", unit="sample"),
            "gae": GAE(gamma=drawn.gamma, lam=drawn.lam, turn_key="turn", **UNITS[unit]),
        }
        run = Pipeline(stages).run(batch)
        found = run.batch
        sizes = [
            abs(credit)
            for row, own in enumerate(drawn.by_loops(unit, out)[0])
            for token, credit in enumerate(own)
            if drawn.sampled[row][token] and row not in out
        ]
        assert run.metrics["gae/abs_mean"] == pytest.approx(sum(sizes) / max(len(sizes), 1), rel=1e-12)
        for key, expected in zip(("advantage", "value_target"), drawn.by_loops(unit, out), strict=True):
            for row, own in enumerate(found.unbind(0)):
                assert off(own[key], expected[row][: len(own[key])]) < 1e-12, (seed, row, key)


VALUE = [[0.5, -0.2, 0.9, 0.3, 0.0, 0.1], [0.4, 0.8, 0.6, -0.5, 0.7, 0.2], [-0.3, 0.1, 0.2, 0.6, 0.4, 0.5]]
HOLES = [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1]]
# The advantages, whitened over the sampled tokens, and the returns, for γ = 0.99, λ = 0.95 and the rewards
# 1, 0 and 0.5 at the last sampled tokens. Computed by running compute_gae_advantage_return of
# verl/trainer/ppo/core_algos.py, verl-project/verl at 1dda039b9c (2026-08-22), in float64.
VERL = (
    [
        [0.213139744, 1.462349521, 0.0, 0.0, 1.226944588, 1.152513475],
        [-0.901686183, -1.620970527, -1.344490674, 0.497454181, 0.0, 0.0],
        [0.0, 0.311039574, 0.0, -0.509130402, -0.165793355, -0.321369938],
    ],
    [
        [0.826388579, 0.889195725, 0.0, 0.0, 0.94545, 1.0],
        [0.045640479, 0.006422625, -0.02475, 0.0, 0.0, 0.0],
        [0.0, 0.486169324, 0.0, 0.4853475, 0.495, 0.5],
    ],
)
# With all tokens sampled: compute_gae_advantage_return of skyrl/backends/skyrl_train/utils/ppo_utils.py,
# NovaSky-AI/SkyRL at a9564572eb (2026-08-21), which does not skip tokens that were not sampled. The section
# "compute advantages and returns" of trl/experimental/ppo/ppo_trainer.py, huggingface/trl at f2cd57710a
# (2026-07-24), gives the same numbers to 1e-7. For a response that is shorter than the width of the batch,
# TRL puts the reward one token after the last, which decays the reward by γλ once more.
SKYRL = (
    [
        [0.202352663, 1.562325749, -0.394689669, 0.746803512, 1.384147406, 1.302836718],
        [-0.875803023, -1.657430732, -1.350995138, 0.665877865, -1.541874479, -0.665078706],
        [1.024282378, 0.34954673, 0.204685031, -0.512390832, -0.13731957, -0.307275902],
    ],
    [
        [0.784865607, 0.845045834, 0.851138579, 0.889195725, 0.94545, 1.0],
        [0.082212037, 0.045307855, 0.016595273, 0.04396095, 0.0099, 0.0],
        [0.444297285, 0.467142249, 0.486169324, 0.4853475, 0.495, 0.5],
    ],
)


@pytest.mark.parametrize(
    ("sampled", "expected", "near"),
    [(HOLES, VERL, 2e-7), ([[1] * 6] * 3, SKYRL, 2e-7)],
    ids=["verl", "skyrl"],
)
def test_advantages_and_targets_are_those_of_other_trainers(sampled, expected, near):
    batch = batch_of([1.0, 0.0, 0.5], [0, 1, 2], tokens=6)
    batch["next", "reward"] = batch["next", "reward"].double()
    batch[MASK] = torch.tensor(sampled).bool()
    batch[VALUES] = torch.tensor(VALUE, dtype=torch.float64)
    stages = {"gae": GAE(gamma=0.99, lam=0.95), "whitening": BatchWhitening()}
    found = Pipeline(stages)(batch)
    assert off(found["advantage"], expected[0]) < near
    assert off(found["value_target"], expected[1]) < 1e-8


def test_a_stage_that_masked_rows_alone_is_refused():
    """The stage takes the loss mask as the rows arrived, which only a pipeline knows."""
    batch = Drawn(5).batch()
    out = SampleFilter(criterion=lambda rows: rows["turn"] != rows["turn"].max(), unit="sample")
    with pytest.raises(BatchError, match="a stage that ran alone has masked some of them: put both stages"):
        GAE()(out(batch))


def test_rows_without_a_step_have_the_advantage_and_target_0():
    value, none = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for size, tokens in ((0, 3), (2, 3), (2, 0)):
        some = value[:size, :tokens], none[:size, :tokens], torch.ones(size)
        for found in generalized_advantage(*some):
            assert torch.equal(found, torch.zeros(size, tokens))


def test_invalid_values_rewards_and_turns_are_named():
    batch = Drawn(5).batch()
    batch[MASK][:] = True
    bad = batch.clone()
    bad[VALUES][1, 0] = float("nan")
    with pytest.raises(BatchError, match=r"the value must be finite for every token.*nan at row 1, token 0"):
        GAE()(bad)
    bad = batch.clone()
    bad["turn_index"][0, 0] = -1
    with pytest.raises(BatchError, match=r"turn index ≥ 0; found others in row 0 .*unit='token'"):
        GAE(unit="turn")(bad)
    two = batch_of([1.0, 1.0], [0, 0], [5, 5], turn=[3, 3])
    two[VALUES] = torch.zeros(2, 4)
    with pytest.raises(BatchError, match=r"must have different turns; found rollout 5"):
        GAE(turn_key="turn")(two)
    two["next", "reward"][1] = 2.0
    with pytest.raises(BatchError, match=r"must have the same reward; found rollout 5"):
        GAE()(two)
    with pytest.raises(MissingKeyError, match=r"\('values', 'full'\).*critic_key"):
        GAE()(two.exclude(VALUES))

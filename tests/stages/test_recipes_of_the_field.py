"""Every recipe equals an independent statement of its formula, one rollout after another."""

from __future__ import annotations

import itertools
import re
import statistics

import numpy as np
import pytest
import torch
from policies import with_old
from recipes import CONF, NAMES, of, pipeline_of

from headrace.transforms import (
    FanOutCollapse,
    LengthPenalty,
    OverlongPunishment,
    RewardScale,
    SampleFilter,
)
from headrace.transforms.table.schema import REWARD

MASK = ("masks", "all_assistant_mask")
KINDS = ("binary", "grid", "gaussian")


def rewards_of(kind: str, rng: np.random.Generator, rows: int) -> np.ndarray:
    draw = {
        "binary": lambda: rng.integers(0, 2, rows),
        "grid": lambda: rng.integers(0, 11, rows) / 10,
        "gaussian": lambda: rng.normal(size=rows),
    }
    return draw[kind]().astype(np.float32)


def ragged_batch(make_batch, kind: str, seed: int, *, lone: bool = True):
    """Shuffled rows of groups of 1 to 6 rollouts, or of 3 to 7 if no rollout may be alone."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(8), rng.integers(1 if lone else 2, 7, 8))
    if not lone:
        groups = np.concatenate([groups, np.arange(8)])
    rng.shuffle(groups)
    rewards = rewards_of(kind, rng, len(groups))
    batch = make_batch(rewards.tolist(), groups.tolist(), tokens=5)
    batch["expected_rollouts"] = torch.tensor([int((groups == g).sum()) for g in groups])
    batch["state_id"] = torch.arange(len(groups))
    return with_turns(batch, torch.from_numpy(rewards_of(kind, rng, len(groups) * 2)).view(-1, 2))


def with_turns(batch, rewards: torch.Tensor):
    """The batch with two turns per row. Each token belongs to a turn."""
    batch["turn_index"] = (torch.arange(batch[MASK].shape[1]) > 1).long().repeat(len(batch), 1)
    batch["turn_reward"] = rewards
    return batch


def run(name: str, batch, **changes: dict) -> torch.Tensor:
    """The advantage per row, or per row and token, in the order of the input rows."""
    out = pipeline_of(name, **changes)(batch)
    found = out["advantage"].reshape(len(out), *([] if out["advantage"].shape[1] == 1 else [-1])).float()
    assert found.isfinite().all()
    credit = found.new_full((len(batch), *found.shape[1:]), float("nan"))
    credit[out["headrace", "row"]] = found
    return credit


# -- the frameworks' formulas, written independently ----------------------------------------------------


def std(values, ddof=1):
    mean = statistics.fmean(values)
    return (sum((x - mean) ** 2 for x in values) / (len(values) - ddof)) ** 0.5


def divided(eps, *, ddof=1, lone=0.0, enters="add"):
    def formula(group, i):
        if len(group) == 1:
            return group[0] if lone == "raw" else lone
        spread = std(group, ddof)
        return (group[i] - statistics.fmean(group)) / (spread + eps if enters == "add" else max(spread, eps))

    return formula


def centred(group, i):
    return group[i] - statistics.fmean(group)


def against_the_others(group, i):
    others = group[:i] + group[i + 1 :]
    if not others:
        return 0.0
    credit = group[i] - statistics.fmean(others)
    spread = std(others) if len(others) > 1 else 0.0
    return credit / (spread + 1e-6) if len(set(others)) > 1 else credit


FORMULAS = {
    "verl": divided(1e-6, lone="raw"),
    "slime": divided(1e-6),
    "miles": divided(1e-6),
    "trl": divided(1e-4),
    "prime_rl": centred,
    "nemo_rl": against_the_others,
    "skyrl": divided(1e-6, lone="raw"),
    "rllm": divided(1e-6, ddof=0, lone="raw"),
    "areal": divided(1e-5),  # the test also whitens over tokens
    "openrlhf": divided(1e-9),
    "open_instruct": divided(1e-8, ddof=0),
    "tinker": centred,
    "torchrl": divided(1e-6, enters="clamp"),
}
NO_LONE = ("as/openrlhf", "as/torchrl", "pkpo")


def stated(formula, batch) -> torch.Tensor:
    rewards = [float(r) for r in batch["next", "reward"].flatten()]
    groups = batch["group_id"].tolist()
    out = []
    for row, group in enumerate(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        values = [rewards[i] for i in members]
        equal = len(values) > 1 and len(set(values)) == 1
        out.append(0.0 if equal else formula(values, members.index(row)))
    return torch.tensor(out, dtype=torch.float64)


def whitened_over_tokens(credit, tokens, eps):
    each = [float(a) for a, n in zip(credit, tokens, strict=True) for _ in range(int(n))]
    mean, spread = statistics.fmean(each), std(each)
    return torch.tensor([(float(a) - mean) / (spread + eps) for a in credit], dtype=torch.float64)


def test_every_convention_has_a_reference_formula():
    assert {f"as/{name}" for name in FORMULAS} == {name for name in NAMES if name.startswith("as/")}


def test_every_convention_has_its_source_and_date():
    """The source has repository, file, item, commit and date. The header also lists the differences."""
    where = r" Source: [\w.-]+/[\w.-]+, [\w/]+\.py, \w+,? .*\bat [0-9a-f]{10} \(2\d{3}-\d\d-\d\d\)"
    for name in FORMULAS:
        text = (CONF / "as" / f"{name}.yaml").read_text()
        head = " ".join(line.removeprefix("# ") for line in text.splitlines()[1:] if line.startswith("#"))
        assert re.search(where, head), head
        assert " Difference: " in head, name


@pytest.mark.parametrize("name", FORMULAS)
def test_a_convention_equals_its_frameworks_formula(make_batch, name, quick):
    for kind, seed in itertools.product(KINDS, range(1 if quick else 3)):
        batch = ragged_batch(make_batch, kind, seed, lone=f"as/{name}" not in NO_LONE)
        expected = stated(FORMULAS[name], batch)
        if name == "areal":
            expected = whitened_over_tokens(expected, batch[MASK].sum(-1), 1e-5)
        torch.testing.assert_close(run(f"as/{name}", batch).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.torchrl
@pytest.mark.parametrize("mode", [None, "sum"])
@pytest.mark.parametrize("seed", range(3))
def test_a_convention_of_torchrl_equals_torchrls_transform(make_batch, mode, seed):
    """Rollouts have one to four rows. The recipe names both modes of `trajectory_return`."""
    from torchrl.objectives.llm import MCAdvantage

    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, (3, 4))
    rollouts = np.repeat(np.arange(12), lengths.flatten())
    rewards = rng.integers(0, 11, len(rollouts)) / 10
    batch = make_batch(rewards.tolist(), (rollouts // 4).tolist(), rollouts.tolist())
    batch["expected_rollouts"] = torch.full((len(rollouts),), 4)
    batch["next", "done"] = torch.from_numpy(np.append(rollouts[1:] != rollouts[:-1], True))[:, None]
    transform = MCAdvantage(grpo_size=4, prompt_key="group_id", trajectory_return=mode)
    theirs = transform.inv(batch.exclude("prompt_text", "stranger"))
    summed = {"collapse": {"reward": "sum"}, "advantage": {"eps_mode": "clamp"}}
    ours = run("as/torchrl", batch) if mode is None else run("as/verl", batch, **summed)
    assert theirs["rollout_id"].tolist() == rollouts.tolist()
    credit = theirs["advantage"]
    credit = credit.values() if credit.is_nested else credit
    torch.testing.assert_close(ours, credit.flatten(), rtol=1e-5, atol=1e-6)


# -- the algorithms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rewards", "groups", "expected"),
    [
        ("rloo", [6.0, 3, 9, 12, 1], [0, 0, 1, 1, 2], [3, -3, -3, 3, 0]),  # against the mean of the others
        # The mean is 1/4; a group without success has the advantage 0.
        ("maxrl", [1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [3, -1, -1, -1, 0, 0]),
        ("passk", [1.0, 4, 2], [0, 0, 0], [0, 2 / (7 / 3) ** 0.5, 0]),  # only the best; std(1, 4, 2) = √(7/3)
        ("passk", [4.0, 4, 2], [0, 0, 0], [0, 0, 0]),  # a tie
        ("gpg", [4.0, 0], [0, 0], [4, -4]),  # the centred rewards are 2 and −2; one of two rewards is not 0
        # The std of 0, 2, 4, 6 is √(20/3).
        ("lite_ppo", [0.0, 2, 4, 6], [0, 0, 1, 1], [x / (20 / 3) ** 0.5 for x in (-1, 1, -1, 1)]),
    ],
)
def test_a_recipe_gives_the_numbers_by_hand(make_batch, name, rewards, groups, expected):
    batch = make_batch(rewards, groups, expected_rollouts=[groups.count(g) for g in groups])
    assert run(name, batch).tolist() == pytest.approx(expected, rel=1e-5)


def test_maxrl_refuses_negative_rewards(make_batch):
    with pytest.raises(ValueError, match=r"needs rewards ≥ 0; found -1.0 at row 1 \(rollout 1\)"):
        run("maxrl", make_batch([1.0, -1], [0, 0], expected_rollouts=[2, 2]))


def test_opo_weighs_the_baseline_by_length(make_batch):
    batch = make_batch([1.0, 0], [0, 0], expected_rollouts=[2, 2])
    batch[MASK] = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    # the baseline is (3·1 + 1·0) / 4
    assert run("opo", batch).tolist() == [0.25, -0.75]


def test_gdpo_scales_each_reward_separately(make_batch):
    # the first reward gives 0, the others ±0.7071 each; whitened, ±1.4142 becomes ±0.7071
    batch = make_batch([0.0, 0], [0, 0], expected_rollouts=[2, 2])
    batch["next", "reward"] = torch.tensor([[1.0, 1, 1], [1, -1, 0]])
    batch[MASK] = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]]).bool()
    found = run("gdpo", batch, collapse={"columns": 3})
    assert found.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_reinforce_pp_whitens_over_tokens(make_batch):
    batch = ragged_batch(make_batch, "gaussian", 4)
    expected = whitened_over_tokens(stated(centred, batch), batch[MASK].sum(-1), 0.0)
    torch.testing.assert_close(run("reinforce_pp_baseline", batch).double(), expected, rtol=1e-5, atol=1e-5)


def test_gigpo_adds_the_advantage_within_a_state(make_batch):
    """Two rollouts of two rows have the rewards 0, 4 and 0, 2. Both start in state 7, and γ is ½.

    The rewards 4 and 2 of the rollouts give ±1. The returns are 2, 4 and 1, 2. In state 7, the returns 2 and
    1 have the mean 1.5, which gives ±0.5. The other rows are alone in their states.
    """
    batch = make_batch(
        [0.0, 4, 0, 2], [0] * 4, [0, 0, 1, 1], expected_rollouts=[2] * 4, state_id=[7, 8, 7, 9]
    )
    found = run("gigpo", batch, returns={"discount": 0.5})
    assert found.tolist() == [1.5, 1, -1.5, -1]
    halved = run("gigpo", batch, returns={"discount": 0.5}, states={"weight": 0.5})
    assert halved.tolist() == [1.25, 1, -1.25, -1]


def test_shaping_counts_tokens_of_all_segments_and_keeps_one_reward(make_batch):
    batch = make_batch([1.0, 1, 2], [0, 0, 0], [5, 5, 6])
    batch[MASK] = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    collapsed = FanOutCollapse()(batch)
    assert LengthPenalty(coefficient=0.1)(collapsed)[REWARD].tolist() == pytest.approx([0.3, 0.3, 1.9])
    assert OverlongPunishment(max_length=8, cache=2)(collapsed)[REWARD].tolist() == [0.5, 0.5, 2]
    assert RewardScale(scale=2.0, bias=-1.0, high=2.5)(collapsed)[REWARD].tolist() == [1, 1, 2.5]
    assert RewardScale()(collapsed)[REWARD].tolist() == [1, 1, 2]


# -- laws for all ----------------------------------------------------------------------------------------


def columns_for(name, batch):
    if name == "mgpo":  # it needs rewards in [0, 1]
        batch["next", "reward"] = batch["next", "reward"].abs().clamp(0, 1)
    if name == "gdpo":
        reward = batch["next", "reward"].view(-1)
        batch["next", "reward"] = torch.stack([reward, reward.flip(0)], -1)
    return with_old(batch, 0.0)  # log-probabilities equal the sampler's: all weights are 1


BY_ROW = ("as/torchrl", "spo")  # these compare rows, as documented


def test_repeating_a_row_of_a_rollout_changes_no_advantage(make_batch, recipes):
    """The repeated row has no tokens in the loss, because OPO and whitening count them."""
    for name in (name for name in recipes if name not in BY_ROW):
        batch = columns_for(name, ragged_batch(make_batch, "grid", 1, lone=name not in NO_LONE))
        batch["next", "reward"] = batch["next", "reward"].abs()
        more = batch[2:3].clone()
        more[MASK] = torch.zeros_like(more[MASK])
        if name == "gigpo":  # its rows are env steps: add one after the end, in a new state
            more["next", "reward"] = torch.zeros_like(more["next", "reward"])
            more["state_id"] += 1000
        more["turn_index"] = torch.full_like(more["turn_index"], -1)
        more["turn_reward"] = torch.zeros_like(more["turn_reward"])
        with of(name):
            before, after = run(name, batch), run(name, torch.cat([batch, more]))
            torch.testing.assert_close(after[:-1], before, rtol=1e-5, atol=1e-6, equal_nan=True)


OF_TOKENS = ("gtpo", "high_entropy", "kl_in_advantage", "otb", "ppo")  # these read the tokens in the loss
BESIDE_REWARDS = ("kl_in_advantage", "opd", "ppo")  # these read more than rewards


def test_masking_rows_changes_no_advantage(make_batch, recipes):
    """Masked rows leave the loss, but not the statistics of rewards and lengths."""
    for name in (name for name in recipes if name not in OF_TOKENS):
        batch = columns_for(name, ragged_batch(make_batch, "grid", 2, lone=name not in NO_LONE))
        batch["next", "reward"] = batch["next", "reward"].abs()
        changes = {"overlong": {"max_length": 5, "cache": 4}} if name == "dapo" else {}
        mask = SampleFilter(criterion=lambda batch: batch["rollout_id"] % 3 > 0)
        with of(name):
            found, expected = run(name, mask(batch), **changes), run(name, batch, **changes)
            if name in ("tis", "mis", "mlperf"):  # these write an advantage per token in the loss
                expected[~mask(batch)["headrace", "in_loss"]] = 0.0
            elif name in ("opd", "rlsd"):  # a token out of the loss gets no term
                found, expected = (credit[batch["rollout_id"] % 3 > 0] for credit in (found, expected))
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_eight_equal_rewards_have_an_advantage_of_0(make_batch, recipes):
    for name in (name for name in recipes if name not in BESIDE_REWARDS):
        batch = make_batch([0.7] * 8, [0] * 8, expected_rollouts=[8] * 8, state_id=[0] * 8)
        batch[MASK] = torch.ones_like(batch[MASK])
        batch = with_turns(batch, torch.full((8, 2), 0.3))
        with of(name):
            out = pipeline_of(name)(columns_for(name, batch))
            assert len(out) == (0 if name == "dapo" else 8)  # dapo drops the group
            # recipes whose baseline is not the group's mean
            expected = {"asymre": 0.1, "w_reinforce": 0.1 * 0.7, "rae": 0.7}.get(name, 0.0)
            close = 1e-7 if name == "otb" else 0  # otb's denominator has verl's 1e-8
            for advantage in out["advantage"].flatten().tolist() if len(out) else ():
                assert advantage == pytest.approx(expected, rel=1e-6, abs=close)

"""Statements of papers on bias and variance hold under the conditions of docs/certificates.md."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from composed import configure

from headrace.pipeline.tools.certify import OneTurn, Prompt, StopOrContinue, Trajectory, certify_recipe
from headrace.transforms import group_relative_advantage

pytestmark = pytest.mark.slow

GROUPS = torch.tensor(list(product((0.0, 1.0), repeat=8)), dtype=torch.float64)  # all groups of 8 answers


def advantages(rewards: torch.Tensor, **options) -> torch.Tensor:
    """(G, n) the advantages of (G, n) rewards. Each line is a group."""
    group = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    return group_relative_advantage(rewards.flatten(), group, **options).reshape(rewards.shape)


def certified(recipe, task, group_size, *words):
    node = configure("load", f"pipeline={recipe}", *words).pipeline
    return certify_recipe(node, recipe, task, "task", group_size=group_size, overrides=words)


# -- arXiv:2607.00152: the size of an update is the group's standard deviation ---


def test_mean_abs_advantage_is_2_std_for_grpo_and_2_std_squared_for_dr_grpo():
    """If the share a of the rollouts is right, s² = a(1 − a). The means are 2a(1 − a)/s and 2a(1 − a)."""
    std = GROUPS.std(1, correction=0)
    grpo = advantages(GROUPS, ddof=0).abs().mean(1)
    assert float((grpo - 2 * std).abs().max()) == pytest.approx(2e-6, rel=1e-3)  # because of ε = 1e-6
    assert torch.allclose(advantages(GROUPS, ddof=0, eps=0.0).abs().mean(1), 2 * std, atol=1e-15)
    assert torch.allclose(advantages(GROUPS, scale="none").abs().mean(1), 2 * std**2, atol=1e-15)


def test_the_update_is_std_times_the_contrast_of_right_and_wrong():
    """(1/n) Σ A_i g_i = s (mean g of right − mean g of wrong) for all numbers g_i."""
    each = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    informative = (GROUPS.sum(1) > 0) & (GROUPS.sum(1) < 8)
    found = (advantages(GROUPS, ddof=0, eps=0.0) * each).mean(1)[informative]
    right, std = GROUPS[informative], GROUPS.std(1, correction=0)[informative]
    contrast = (right * each).sum(1) / right.sum(1) - ((1 - right) * each).sum(1) / (1 - right).sum(1)
    assert torch.allclose(found, std * contrast, atol=1e-14)


def test_the_identity_needs_two_rewards_and_divisor_n():
    """With divisor n − 1 the mean is 2s·√(7/8). For the rewards 0, ¼, ½, 1 it is 0.845, and 2s is 0.740."""
    std = GROUPS.std(1, correction=0)
    assert torch.allclose(advantages(GROUPS, eps=0.0).abs().mean(1), 2 * std * (7 / 8) ** 0.5, atol=1e-14)
    four = torch.tensor([[0.0, 0.25, 0.5, 1.0]], dtype=torch.float64)
    assert float(advantages(four, ddof=0, eps=0.0).abs().mean()) == pytest.approx(0.845, abs=5e-4)
    assert 2 * float(four.std(1, correction=0)) == pytest.approx(0.740, abs=5e-4)


# -- arXiv:2601.08521: a group-relative advantage is biased ---


def of_a_success(p: float, *, informative: bool, baseline: str = "mean") -> float:
    """The expected advantage of a right rollout in groups of eight, divided by its true advantage 1 − p."""
    chance = (p * GROUPS + (1 - p) * (1 - GROUPS)).prod(1) * GROUPS[:, 0]  # the first rollout is right
    if informative:
        chance = chance * (GROUPS.sum(1) < 8)
    advantage = advantages(GROUPS, scale="none", baseline=baseline)[:, 0]
    return float((chance * advantage).sum() / chance.sum()) / (1 - p)


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_easy_prompts_are_overestimated_only_over_informative_groups(p):
    """E[1 − mean | right] is 7/8 (1 − p). Over groups that are not all right, it is divided by 1 − p⁷.

    For p = 0.9 this is 0.168, as in the paper.
    """
    assert of_a_success(p, informative=False) == pytest.approx(7 / 8, abs=1e-14)
    assert of_a_success(p, informative=True) == pytest.approx(7 / 8 / (1 - p**7), abs=1e-14)
    assert of_a_success(p, informative=False, baseline="leave_one_out") == pytest.approx(1, abs=1e-14)
    gradient = certified("dr_grpo", OneTurn(theta=[float(torch.tensor(p).double().logit())]), 8)
    assert gradient.advantage.ratio == pytest.approx([7 / 8], abs=1e-9)


# -- arXiv:2509.07558: VL Norm is unbiased and has the least variance ---

VL_NORM = ("pipeline.stages.weight.unit=inverse_length",)


def vl_norm(task, power: float):
    return certified("rloo", task, 4, *VL_NORM, f"pipeline.stages.weight.power={power}").loss


def test_vl_norm_is_biased_if_length_depends_on_the_action():
    task = StopOrContinue()
    assert vl_norm(task, 0.0).ratio == pytest.approx([1, 1, 1], abs=1e-12)
    found = vl_norm(task, 1.0)
    assert found.ratio == pytest.approx([1.0737, 0.5962, 0.5983], abs=1e-4)
    assert found.cosine == pytest.approx(0.983, abs=5e-4)
    assert vl_norm(task, 0.75).cosine == pytest.approx(0.990, abs=5e-4)
    assert found.variance < vl_norm(task, 0.75).variance < vl_norm(task, 0.0).variance


class AnyLength(OneTurn):
    """An answer has 1 or 3 tokens with equal probability, whatever its action is."""

    def prompts(self):
        follow = [(len(self.theta), 0)]
        trajectories = [
            Trajectory((((0, action), *follow * more),), (self.rewards[action],), chance=0.5)
            for action in (0, 1)
            for more in (0, 2)
        ]
        return [Prompt(1.0, tuple(trajectories))]


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_vl_norm_is_unbiased_if_length_is_independent_of_the_action(power):
    assert vl_norm(AnyLength(theta=[0.7]), power).ratio == pytest.approx([1], abs=1e-12)
    depends = vl_norm(OneTurn(theta=[0.7], lengths=[1, 3]), power).ratio[0]
    assert abs(depends - 1) > 0.01

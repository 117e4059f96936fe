"""A certificate has the expected gradient of a recipe, over all outcomes of a small task."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from composed import composed, configure
from recipes import ADVANTAGES, CHAINS
from torch.nn.functional import logsigmoid

from headrace.pipeline.composing.compose import for_hydra
from headrace.pipeline.tools.certify import (
    Certificate,
    OneTurn,
    Refused,
    StopOrContinue,
    TurnsAsRows,
    certify_recipe,
)
from headrace.transforms import BatchTransform

pytestmark = pytest.mark.slow

STEPS = "pipeline.stages.collapse.reward=sum"
OF_THE_BATCH = {  # stages that read the batch or have a memory, so that outcomes are taken one by one
    "reinforce_pp": {"advantage"},
    "lite_ppo": {"advantage"},
    "gpg": {"advantage"},
    "gdpo": {"whitening"},
    "high_entropy": {"forks"},
    "kl_in_advantage": {"kl"},
    "ppo": {"whitening"},
    "rae": {"running"},
    "spo": {"running", "whitening"},
}

STOP = StopOrContinue()
TAUGHT = StopOrContinue(teacher=[0.1, 0.4, 0.6], reference=[0.2, -0.1, 0.5])


@cache
def certified(recipe: str, *words: str, task=STOP, group_size=4) -> Certificate | Refused:
    config = configure("load", f"pipeline={recipe}", *words).pipeline
    options = {"group_size": group_size, "overrides": words}
    return certify_recipe(config=config, recipe=recipe, task=task, task_name="task", **options)


def ratio(*arguments, **options) -> list[float]:
    return list(certified(*arguments, **options).advantage.ratio)


# -- the stop-or-continue task in numbers; docs/certificates.json has those of grpo and rloo -----------------


def test_true_gradient_is_the_gradient_of_the_mean_reward():
    """The mean reward is J = Σ P(turns) · R, where a turn is followed by another with P = σ(θ)."""
    theta = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64, requires_grad=True)
    on, stop = logsigmoid(theta).exp(), logsigmoid(-theta).exp()
    mean = on[0] * stop[1] * 0.8 + on[0] * on[1] * stop[2] * 2.0 + on[0] * on[1] * on[2] * 1.7
    mean.backward()
    torch.testing.assert_close(StopOrContinue().true_gradient(), theta.grad, rtol=1e-13, atol=0)


def test_dividing_by_std_biases_the_gradient():
    assert certified("rloo").outcomes == 256
    assert certified("rloo").advantage.variance == pytest.approx(0.0788, abs=5e-5)
    assert ratio("grpo") == pytest.approx([1.0225, 0.7806, 0.5272], abs=5e-5)
    assert certified("grpo").advantage.variance == pytest.approx(0.0733, abs=5e-5)


def test_a_mean_over_tokens_biases_the_gradient():
    found = certified("rloo").loss
    assert found.ratio == pytest.approx([0.563, 0.469, 0.484], abs=5e-4)
    assert found.cosine == pytest.approx(0.9978, abs=5e-5)
    straight = certified("dr_grpo", "pipeline.stages.weight.length=1").loss  # no division by tokens
    assert straight.ratio == pytest.approx([0.75, 0.75, 0.75], abs=1e-12)
    assert straight.scale == pytest.approx(0.75)


def test_a_return_to_go_with_a_leave_one_out_baseline_is_unbiased():
    assert ratio("mt_grpo") == pytest.approx([1, 1, 1], abs=1e-12)


@pytest.mark.torchrl
def test_a_perfect_critic_is_unbiased_and_whitening_enlarges_the_gradient():
    for lam in (0.0, 0.5, 1.0):
        words = ("pipeline.stages.whitening=null", f"pipeline.stages.gae.lam={lam}")
        for task in (STOP, TurnsAsRows()):
            assert ratio("ppo", *words, task=task, group_size=2) == pytest.approx([1, 1, 1], abs=1e-12)
    assert min(ratio("ppo")) > 1


def test_the_state_baseline_of_gigpo_shrinks_late_turns():
    """With m rollouts at a turn, its ratio is (m − 1)/m. GiGPO adds the ratio of whole rollouts, 0.75."""
    steps = {"task": TurnsAsRows()}
    words = (STEPS, "pipeline.stages.returns.discount=1.0")
    both = ratio("gigpo", *words, **steps)
    assert both == pytest.approx([1.50, 1.33, 1.08], abs=5e-3)
    whole = ratio("gigpo", *words, "pipeline.stages.states.weight=0.0", **steps)
    alone = [a - b for a, b in zip(both, whole, strict=True)]
    assert alone == pytest.approx([0.75, 0.58, 0.33], abs=5e-3)


class TurnMeans(BatchTransform):
    """As in ports of MT-GRPO, add up (reward − mean reward of the turn) over this turn and later ones."""

    within_groups = True

    def __init__(self):
        super().__init__(["turn_reward", ("next", "reward")], ["advantage"])

    def apply(self, batch):
        rewards, there = batch["turn_reward"].clone(), batch["masks", "all_assistant_mask"][:, 1:]
        rewards[torch.arange(len(batch)), there.sum(1) - 1] += batch["next", "reward"].flatten()
        credit = torch.zeros_like(rewards)
        for group in batch["group_id"].unique():
            of_group = batch["group_id"] == group
            inside, there_too = rewards[of_group], there[of_group]
            mean = inside.sum(0) / there_too.sum(0).clamp_min(1)
            apart = torch.where(there_too, inside - mean, 0.0)
            credit[of_group] = apart.flip(1).cumsum(1).flip(1)
        advantage = torch.cat([torch.zeros(len(batch), 1), credit], 1)
        return batch.set("advantage", advantage.unsqueeze(-1))


def test_summed_turn_means_lose_most_of_the_gradient():
    """A stage of the user is certified in the same way as one of the library."""
    words = (
        "pipeline.stages.filter=null",
        "pipeline.stages.advantage=null",
        "+pipeline.stages.mine={_target_: test_certificate.TurnMeans}",
        "pipeline.order=[gate,collapse,mine,split,weight]",
    )
    assert ratio("dr_grpo", *words) == pytest.approx([0.30, 0.11, 0.33], abs=5e-3)


# -- how outcomes go through a pipeline --------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [recipe for recipe in CHAINS if recipe not in OF_THE_BATCH])
def test_stages_within_groups_have_the_same_certificate_in_any_batch(recipe, monkeypatch):
    """Recipes that need rows of turns, or rewards in [0, 1], have tasks of their own."""
    task = {"gigpo": TurnsAsRows(), "mgpo": OneTurn(theta=[0.5, -1.0])}.get(recipe, TAUGHT)
    together = certified(recipe, task=task, group_size=2)
    monkeypatch.setattr("headrace.transforms.LossWeight.within_groups", False)
    apart = certified.__wrapped__(recipe, task=task, group_size=2)
    assert together.advantage.ratio == pytest.approx(apart.advantage.ratio, rel=1e-9, abs=1e-12)
    assert together.loss.variance == pytest.approx(apart.loss.variance, rel=1e-9)


def test_stages_over_the_batch_or_with_memory_say_so():
    for recipe in ADVANTAGES:
        stages = composed(f"pipeline={recipe}").stages.items()
        said = {name for name, stage in stages if not stage.within_groups}
        assert said == OF_THE_BATCH.get(recipe, set()), recipe


def test_a_running_baseline_sees_no_other_outcome():
    """The baseline is a constant in the first batch, so the certificate is unbiased."""
    assert ratio("rae", group_size=2) == pytest.approx([1, 1, 1], abs=1e-12)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("rloo", ["pipeline.stages.advantage.group_key=role"]),
        ("rloo", ["pipeline.stages.advantage.group_key=role", "pipeline.stages.filter=null"]),
        ("rloo", ["pipeline.stages.filter.group_key=role"]),
        ("roles", ["pipeline.stages.peers.keys=[role,expected_rollouts]"]),
    ],
)
def test_groups_by_another_column_do_not_mix_outcomes(recipe, words):
    """All rows have one role. A batch of all outcomes would make one group of all rows."""
    assert ratio(recipe, *words, group_size=2) == pytest.approx(ratio(recipe, group_size=2), rel=1e-9)


class Remembers(torch.nn.Module):
    """A user's stage that keeps the rewards of earlier batches and does not declare it."""

    in_keys, out_keys = ("advantage",), ("advantage",)
    seen = 0.0

    def forward(self, batch):
        reward = batch["headrace", "reward"].view(-1, 1, 1)
        out = batch.copy().set("advantage", batch["advantage"] - self.seen)
        self.seen = 0.9 * self.seen + 0.1 * float(reward.mean())
        return out


def test_a_user_stage_sees_no_other_outcome():
    words = ["pipeline.stages.filter=null", "pipeline.order=[gate,collapse,advantage,odd,split,weight]"]
    words += ["+pipeline.stages.odd={_target_: test_certificate.Remembers}"]
    assert ratio("dr_grpo", *words, group_size=2) == pytest.approx([0.5] * 3, abs=1e-12)


class TrainsAll(torch.nn.Module):
    """A user's stage that puts each place of a row into the loss, also those without an action."""

    in_keys = out_keys = (("masks", "all_assistant_mask"),)

    def forward(self, batch):
        return batch.copy().set(self.in_keys[0], torch.ones_like(batch[self.in_keys[0]]))


def test_only_places_with_an_action_have_a_gradient():
    words = ["pipeline.stages.odd={_target_: test_certificate.TrainsAll}", "pipeline.after.odd=advantage"]
    assert ratio("dr_grpo", *for_hydra(words), group_size=2) == pytest.approx([0.5] * 3, abs=1e-12)


def test_larger_groups_lower_variance_and_bias():
    for size in (2, 3):
        assert ratio("dr_grpo", group_size=size) == pytest.approx([1 - 1 / size] * 3)
    variances = [certified("rloo", group_size=size).advantage.variance for size in (2, 3, 4)]
    assert variances == sorted(set(variances), reverse=True)


def test_without_split_or_weights_the_advantage_is_unchanged():
    uncut = certified("rloo", "pipeline.stages.split=null", group_size=2)
    assert uncut == certified("rloo", group_size=2)
    bare = certified("rloo", "pipeline.stages.split=null", "pipeline.stages.weight=null", group_size=2)
    assert bare.advantage == uncut.advantage
    assert bare.loss is None

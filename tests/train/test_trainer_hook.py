"""TorchRL's trainers run a pipeline as a hook."""

from __future__ import annotations

import copy
import operator
from contextlib import nullcontext

import pytest
import torch
from composed import composed
from rollouts import OVERRIDES, make_collector, make_env, make_policy
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import GRPOLoss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import GRPOTrainer
from torchrl.trainers.trainers import DefaultOptimizationStepper, MixedPrecisionOptimizationStepper

from headrace.pipeline import Pipeline, PipelineHook, optimise
from headrace.transforms import BatchError, GroupAssembler

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

CUT = ("pipeline.stages.split.minibatches=2", "pipeline.stages.split.microbatches=2")
BATCHES, CLIP = 3, 0.01


def make_trainer(kind, hook: PipelineHook | None, *, policy=None, **options) -> Trainer:
    """A trainer with the loss per token, which weighted rows need, and a plain optimiser."""
    policy, env = policy or make_policy(), make_env()
    aggregation = options.pop("aggregation", "none")
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation=aggregation)
    collector = make_collector(env, BATCHES, policy=policy)
    options = {
        "optim_steps_per_batch": None,
        "clip_norm": CLIP,
        "num_epochs": 2,
        "optimizer": torch.optim.SGD(policy.parameters(), lr=0.1),
        "progress_bar": False,
    } | options
    if kind is Trainer:  # TorchRL warns about its own default
        options["optimization_stepper"] = DefaultOptimizationStepper()
    total = BATCHES * env.frames_per_batch
    with pytest.warns(UserWarning, match="experimental") if kind is GRPOTrainer else nullcontext():
        trainer = kind(collector=collector, total_frames=total, frame_skip=1, loss_module=loss, **options)
    if hook is not None:
        hook.register(trainer)
    return trainer


def by_hand(policy, recipe) -> None:
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for batch in make_collector(make_env(), BATCHES, policy=policy):
        optimise(recipe.run(batch, epochs=2).minibatches(), loss, optimizer, max_grad_norm=CLIP)


def weights_of(policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.parameters()]


@pytest.mark.parametrize("kind", [Trainer, GRPOTrainer])
def test_a_trainer_takes_the_steps_of_the_pipeline_bit_for_bit(kind):
    policy, same = make_policy(), make_policy()
    recipe = lambda: composed("pipeline=grpo", *OVERRIDES, *CUT)  # noqa: E731
    torch.manual_seed(1)
    trainer = make_trainer(kind, PipelineHook(recipe()), policy=policy)
    before = weights_of(policy)
    trainer.train()
    torch.manual_seed(1)
    by_hand(same, recipe())
    assert not all(map(torch.equal, before, weights_of(policy)))
    assert all(map(torch.equal, weights_of(same), weights_of(policy)))
    assert trainer.collected_frames == trainer.total_frames
    assert len(trainer._log_dict["rows/trained"]) == BATCHES
    assert sum(trainer._log_dict["rows/in"]) == BATCHES * 18
    assert all(loss != 0 for loss in trainer._log_dict["loss"])
    assert set(trainer._log_dict["optimiser/lr"]) == {0.1}
    assert trainer._log_dict["optimiser/steps"] == [4.0] * BATCHES  # two epochs of two minibatches
    assert all(norm > 0 for norm in trainer._log_dict["optimiser/grad_norm"])


def test_rows_wait_in_the_assembler_and_unfinished_ones_are_counted(monkeypatch):
    """Whole groups are trained in the order in which they became whole."""
    assembler, recipe = GroupAssembler(groups=2), composed("pipeline=grpo", *OVERRIDES, *CUT)
    taken, trained, take, run = [], [], assembler.take, recipe.run
    monkeypatch.setattr(assembler, "take", lambda: taken.append(take()) or taken[-1])
    monkeypatch.setattr(recipe, "run", lambda batch, **how: trained.append(batch) or run(batch, **how))
    trainer = make_trainer(GRPOTrainer, PipelineHook(recipe, assembler=assembler))
    trainer.train()
    assert all(map(operator.is_, trained, (batch for batch in taken if batch is not None)))
    assert len(trained) == 4
    assert assembler.emitted == 8
    assert sum(trainer._log_dict["rows/in"]) == BATCHES * 18 - 6  # all but the unfinished rows
    assert (assembler.held, assembler.ready) == (0, 0)
    assert assembler.counts["unfinished"] == 6


def train_from_a_buffer(*overrides: str) -> tuple[list[torch.Tensor], list[float]]:
    """Train on rows that the first half put into a buffer. Return the weights, and the steps per sample."""
    policy = make_policy()
    first, second = composed("pipeline=grpo", *OVERRIDES, *overrides).halves()
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(500),
        sampler=SamplerWithoutReplacement(),
        batch_size=make_env().frames_per_batch,
    )
    buffer.append_transform(first, invert=True)
    options = {"replay_buffer": buffer, "optim_steps_per_batch": 1, "num_epochs": 1}
    torch.manual_seed(1)
    hook = PipelineHook(second)
    trainer = make_trainer(
        GRPOTrainer, hook, policy=policy, empty_replay_buffer_on_weight_update=True, **options
    )
    trainer.train()
    assert all(rows > 0 for rows in trainer._log_dict["rows/trained"])
    return weights_of(policy), trainer._log_dict["steps"]


def test_a_trainer_with_a_buffer_takes_the_steps_and_weights_of_the_second_half():
    weights, steps = train_from_a_buffer()
    again, _ = train_from_a_buffer()
    by_rollout, _ = train_from_a_buffer("pipeline.stages.weight.unit=rollout")
    in_three, more_steps = train_from_a_buffer("pipeline.stages.split.minibatches=3")
    assert all(map(torch.equal, weights, again))
    assert not all(map(torch.equal, weights, by_rollout))
    assert not all(map(torch.equal, weights, in_three))
    assert sum(more_steps) == 3 * sum(steps) > 0


def test_a_trainers_own_stepper_uses_folded_weights():
    recipe = composed("pipeline=grpo", *OVERRIDES, "pipeline.stages.weight.fold=token_mean")
    hook = PipelineHook(recipe, stepper="trainer")
    trainer = make_trainer(GRPOTrainer, hook, aggregation="token_mean", optimization_stepper=None)
    before = weights_of(trainer.loss_module)
    trainer.train()
    assert not all(map(torch.equal, before, weights_of(trainer.loss_module)))
    assert type(trainer.optimization_stepper) is MixedPrecisionOptimizationStepper


@pytest.mark.parametrize(
    ("hook", "options", "message"),
    [
        ({}, {"optim_steps_per_batch": 2}, "set optim_steps_per_batch=None on the trainer; got 2"),
        (
            {},
            {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(9), batch_size=3)},
            r"With one, call first, second = pipeline.halves\(\)",
        ),
        ({"stepper": "trainer"}, {}, "ignores the weights that the pipeline writes"),
        ({}, {"optimizer": None, "optimization_stepper": DefaultOptimizationStepper()}, "pass optimizer="),
        ({}, {"gradient_accumulation_steps": 2}, "replaces MixedPrecisionOptimizationStepper"),
    ],
)
def test_an_incompatible_trainer_is_refused_on_registration(hook, options, message):
    hook = PipelineHook(composed("pipeline=grpo", *OVERRIDES), **hook)
    with pytest.raises(ValueError, match=message):
        make_trainer(GRPOTrainer, hook, **options)


def test_the_options_of_a_hook_are_checked():
    with pytest.raises(ValueError, match=r"stepper must be one of 'weighted', 'trainer'; got 'other'"):
        PipelineHook(Pipeline({}), stepper="other")


class OldPolicy(nn.Module):
    """A transform that adds log-probabilities of the policy at the start of the step, near the sampler's."""

    in_keys = (("log_probs", "full"),)
    out_keys = (("old_log_probs", "full"),)

    def forward(self, batch):
        return batch.copy().set(self.out_keys[0], batch[self.in_keys[0]] + 0.1)


@pytest.mark.parametrize("stepper", ["weighted", "trainer"])
def test_a_trainers_loss_corrects_for_the_sampler_once(stepper):
    folded = ["pipeline.stages.weight.fold=token_mean"] if stepper == "trainer" else []
    stages = composed("pipeline=tis", *OVERRIDES, *folded).stages
    recipe = Pipeline({"old": OldPolicy(), **stages}, log_prob_key=("old_log_probs", "full"))
    for key in (("log_probs", "full"), ("old_log_probs", "full")):
        options = {"aggregation": "token_mean", "optimization_stepper": None} if folded else {}
        trainer = make_trainer(GRPOTrainer, PipelineHook(recipe, stepper=stepper), **options)
        trainer.loss_module.set_keys(sample_log_prob=key)
        with pytest.raises(BatchError, match="count twice") if key[0] == "log_probs" else nullcontext():
            trainer.train()


def test_a_trainers_state_includes_pipeline_and_assembler():
    make = lambda: PipelineHook(composed("pipeline=grpo", *OVERRIDES), assembler=GroupAssembler(groups=2))  # noqa: E731
    hook, other = make(), make()
    make_trainer(Trainer, hook).train()
    state = copy.deepcopy(make_trainer(Trainer, None).state_dict())
    trainer = make_trainer(Trainer, other)
    other.load_state_dict(hook.state_dict())
    assert other.pipeline.stages["split"].state.calls == hook.pipeline.stages["split"].state.calls > 0
    assert other.assembler.emitted == hook.assembler.emitted
    assert "pipeline" in trainer.state_dict()
    assert "pipeline" not in state

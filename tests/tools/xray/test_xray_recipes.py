"""Recipes train their declared weights with each transform, in TorchRL's trainer, and on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from composed import composed
from recipes import ADVANTAGES, BY_TURN, CHAINS, FEW, of, pipeline_of
from tensordict import TensorDictBase
from torch import nn
from torchrl.objectives.llm import GRPOLoss
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import DefaultOptimizationStepper

from headrace.pipeline import Pipeline, PipelineHook, XRay, load_pipeline, optimise, xray

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

OLD, FULL, LOSS = ("old_log_probs", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask")
POSITIVE = ("entropy", "values", "sum_pi_squared")
SEGMENTS = (1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1)
LENGTHS = (3, 9, 5, 4, 8, 2, 6, 7, 5, 3, 10, 4, 2, 6)


def measure(step, recipe: str, declares: Pipeline, *, votes: bool = False, **options) -> XRay:
    """Compare a step with a second pipeline of the recipe, because running baselines change.

    With `votes`, one rollout of each group votes only.
    """

    def prepare(batch: TensorDictBase) -> None:
        """Add the columns that any recipe reads. The trainer's policy has equal logits."""
        tokens = batch["tokens", "full"]
        place = torch.arange(tokens.shape[1]).expand(tokens.shape)
        batch[OLD] = torch.where(batch["masks", "all_attention_mask"], batch[FULL], 0.0)
        batch[FULL] = batch[OLD] + 0.0005 * (tokens * 7 % 5 - 2)  # the sampling policy differs a little
        for number, name in enumerate(("teacher_log_probs", "ref_log_probs", *POSITIVE), 1):
            sign = 1 if name in POSITIVE else -1
            batch[name, "full"] = sign * (tokens * number % 7 + 1).double() / 8
        first = torch.cat([torch.tensor([True]), batch["next", "done"].flatten()[:-1]])
        segment = (~first).long()
        batch["role"] = batch["rollout_id"].flatten() % 2
        if votes:
            batch["votes_only"] = of_voters(batch)
        batch["turn"], batch["state_id"] = torch.arange(len(batch)), torch.arange(len(batch)) % 3
        batch["turn_index"] = torch.where(batch[LOSS], 2 * segment[:, None] + place % 2, -1)
        own = (batch["turn_index"][:, :, None] == torch.arange(4)).any(1)
        batch["turn_reward"] = torch.where(own, 0.1 * torch.arange(1.0, 5.0), 0.0)

    rewards = torch.tensor([1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.75, 0.1, 0.3, 0.9, 0.0, 0.5])
    if recipe == "gdpo":
        rewards = torch.stack([rewards, rewards.flip(0)], 1)
    return xray(
        step,
        declares,
        **{"cuts": (1,), "holes": True, "segments": SEGMENTS, "lengths": LENGTHS, "rewards": rewards}
        | options
        | {"prepare": prepare},
    )


def of_voters(batch: TensorDictBase) -> torch.Tensor:
    """The five rows of the third rollout of each of three groups. Two of these rollouts have two rows."""
    return batch["rollout_id"].flatten() % 4 == 2


def loss_of(model: nn.Module) -> GRPOLoss:
    loss = GRPOLoss(model, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    loss.set_keys(sample_log_prob=OLD)
    return loss


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("transform", [None, "pack", "tree"])
def test_every_recipe_trains_its_declared_weights(transform):
    """The number of micro-batches alternates between one and three, from recipe to recipe."""
    recipes = {None: ADVANTAGES, "pack": FEW, "tree": CHAINS}[transform]
    for number, recipe in enumerate(recipes):
        for microbatches in (1, 3)[(number + bool(transform)) % 2 :][:1]:
            cut = {"minibatches": 1, "microbatches": microbatches}
            pipeline, second = (pipeline_of(recipe, split=cut, **BY_TURN.get(recipe, {})) for _ in range(2))

            def step(model, batch, _, pipeline=pipeline):
                optimise(pipeline.minibatches(batch), loss_of(model), plain(model), transform=transform)

            with of(f"{recipe}, {microbatches} micro-batches"):
                measure(step, recipe, second).assert_uniform(1e-9)


@pytest.mark.parametrize("recipe", ["otb", "ppo"])
def test_an_advantage_per_token_is_trained_for_any_number_of_micro_batches(recipe):
    for cut in (1, 2, 3, 4, 14):
        split = {"minibatches": 1, "microbatches": cut}
        pipeline, second = (pipeline_of(recipe, split=split, **BY_TURN.get(recipe, {})) for _ in range(2))

        def step(model, batch, _, pipeline=pipeline):
            optimise(pipeline.minibatches(batch), loss_of(model), plain(model))

        measure(step, recipe, second).assert_uniform(1e-9)


@pytest.mark.parametrize("recipe", ["a_star_po", "grpo", "remax"])
def test_a_rollout_that_votes_only_is_in_no_numerator_and_no_denominator(recipe):
    for cut in (1, 2, 3, 4):
        split = {"minibatches": 1, "microbatches": cut}
        pipeline, second = (pipeline_of(recipe, split=split) for _ in range(2))
        voters = list[torch.Tensor]()

        def step(model, batch, _, pipeline=pipeline, voters=voters):
            voters.append(of_voters(batch))
            optimise(pipeline.minibatches(batch), loss_of(model), plain(model))

        found = measure(step, recipe, second, votes=True)
        found.assert_uniform(1e-9)
        coefficient = found.runs[0].coefficient
        assert voters[0].sum() == 5
        assert not coefficient[voters[0]].any()
        assert coefficient[~voters[0]].any()


class OneBatch:
    """A collector for a trainer that yields only the batch to measure."""

    init_random_frames = 0

    def __init__(self, batch: TensorDictBase):
        self.batch = batch

    def __iter__(self) -> Iterator[TensorDictBase]:
        yield self.batch

    def update_policy_weights_(self, *_, **__) -> None:
        """No worker has a copy of the weights."""

    def shutdown(self) -> None:
        """No worker runs."""


@pytest.mark.parametrize("recipe", FEW)
def test_torchrls_trainer_trains_the_weights_of_the_recipe(recipe):
    cut = {"minibatches": 1, "microbatches": 3}
    pipeline, second = (pipeline_of(recipe, split=cut, **BY_TURN.get(recipe, {})) for _ in range(2))

    def step(model, batch, _):
        trainer = Trainer(
            collector=OneBatch(batch),
            total_frames=len(batch),
            frame_skip=1,
            loss_module=loss_of(model),
            optimizer=plain(model),
            optimization_stepper=DefaultOptimizationStepper(),
            optim_steps_per_batch=None,
            clip_grad_norm=False,
            progress_bar=False,
        )
        PipelineHook(pipeline).register(trainer)
        trainer.train()

    measure(step, recipe, second).assert_uniform(1e-9)


@pytest.mark.parametrize(
    ("recipe", "how"), [("dapo", "summed"), ("tree_grpo", "summed"), ("gdpo", "DDP"), ("mis", "DDP")]
)
def test_two_ranks_train_the_weights_of_one_rank(recipe, how):
    ranks = ["process_group=world", "shared_ids=same"]
    ranks += ["stages.weight.gradients=mean"] * (how == "DDP")
    ranks += ["stages.tree.turn_key=turn"] * (recipe in BY_TURN)

    def step(model, batch, cut):
        words = [*ranks, "stages.split.minibatches=1", f"stages.split.microbatches={cut}"]
        pipeline = composed(f"pipeline={recipe}", *(f"pipeline.{word}" for word in words))
        loss = loss_of(model)
        if how == "DDP":
            optimise(pipeline.minibatches(batch), nn.parallel.DistributedDataParallel(loss), plain(model))
        else:
            optimise(pipeline.minibatches(batch), loss, plain(model), process_group="world")

    second = pipeline_of(recipe, **BY_TURN.get(recipe, {}))
    measure(step, recipe, second, ranks=(1, 2), cuts=(1, 2), gradients="reduced").assert_uniform(1e-9)


def test_options_by_column_are_trained_for_any_number_of_micro_batches():
    values = {0: {"scale": "none"}, 1: {"baseline": "leave_one_out"}, 2: {"baseline": "median"}}
    advantage = {"by_column": "group_id", "values": values}
    for cut in (1, 2, 3, 4, 14):
        options = {"stages": {"advantage": advantage, "filter": None}, "microbatches": cut}
        pipeline, second = (load_pipeline("grpo", group_size=4, **options) for _ in range(2))
        assert pipeline.stages["advantage"].column == "group_id"

        def step(model, batch, _, pipeline=pipeline):
            optimise(pipeline.minibatches(batch), loss_of(model), plain(model))

        measure(step, "grpo", second).assert_uniform(1e-9)

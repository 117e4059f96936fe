"""The gradient that a pipeline makes of every outcome of a group."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from headrace.pipeline.accounting.row_table import keys_of_stages
from headrace.pipeline.pipeline import Pipeline
from headrace.transforms.errors import BatchError

from .outcomes import ACTIONS, LOSS_MASK, OUTCOME


class Gradients(NamedTuple):
    """The gradient of each outcome, in the direction in which the reward grows; (outcomes, P) float64."""

    advantage: Tensor
    """Σ A ∇log π over the tokens in the loss of the group, over its rollouts."""
    loss: Tensor | None
    """Σ w A ∇log π with the recipe's own weights; None where it writes none."""


def gradients_of(
    pipeline: Pipeline, batch: TensorDictBase, score: Tensor, outcomes: int, group_size: int
) -> Gradients:
    """Run a pipeline over all outcomes, and add up what it makes of each::

        advantage  g = 1/n Σ_rows Σ_t A_t ∇log π_t       n rollouts in the group
        loss       g =     Σ_rows w Σ_t A_t ∇log π_t     w the row's loss weight

    An outcome of which nothing is trained has no gradient. All outcomes are groups of one batch where every
    stage keeps `within_groups` and a cut makes a step of each; else each is a batch, of a pipeline that
    remembers nothing of another.

    Args:
        pipeline: with one group an optimiser step (:func:`one_group_a_step`).
        batch: TensorDict ``[N]``, as :func:`all_outcomes` makes it.
        score: (actions, P) ∇ log π of each action.
        outcomes: how many there are.
        group_size: n.

    Raises:
        BatchError: a stage refused the rows, or wrote an advantage that is not finite.
    """
    stages, keys = list(pipeline.stages.values()), keys_of_stages(pipeline.stages.values())
    together = _keep_within(stages) and any(_cuts_groups(each) for each in stages)
    remembers = any(_may_remember(each) for each in stages)
    rows_of_outcomes = batch[OUTCOME].bincount(minlength=outcomes).tolist()
    batches = [batch] if together else batch.split(rows_of_outcomes)
    fresh = copy.deepcopy(pipeline) if remembers else pipeline
    advantage, loss = score.new_zeros(2, outcomes, score.shape[1])
    for rows in batches:
        if remembers:
            pipeline = copy.deepcopy(fresh)
        trained = pipeline.run(rows).batch
        pipeline.check()
        if len(trained) == 0:
            continue
        each = _by_row(trained, keys.get("advantage", "advantage"), score)
        if not bool(each.isfinite().all()):
            raise BatchError("the advantage of every token in the loss must be finite; found NaN or infinity")
        advantage.index_add_(0, trained[OUTCOME], each / group_size)
        if pipeline.weighs:
            weight = trained[keys.get("loss_weight", "loss_weight")].reshape(-1, 1)
            loss.index_add_(0, trained[OUTCOME], each * weight)
    return Gradients(advantage, loss if pipeline.weighs else None)


def _may_remember(stage: nn.Module) -> bool:
    """Whether a stage has a state, or is none of ours and may have one that it does not declare."""
    if getattr(stage, "cuts", False) or getattr(stage, "within_groups", False):
        return False
    return getattr(stage, "stateful", False) or not type(stage).__module__.startswith("headrace.")


def _keep_within(stages: list[nn.Module]) -> bool:
    """Whether each stage keeps `within_groups`, and what it takes for a group is within an outcome."""
    within: set[NestedKey | None] = {None, "group_id", "rollout_id", OUTCOME}
    for stage in stages:
        if not getattr(stage, "within_groups", False):
            return False
        for part in (stage, getattr(stage, "criterion", None)):
            for option in ("group_key", "rollout_key"):
                if getattr(part, option, None) not in within:
                    return False
        if within.intersection(getattr(stage, "keys", ())):  # an id of several, one of which is the group's
            within.add(getattr(stage, "into", None))
    return True


def _cuts_groups(stage: nn.Module) -> bool:
    """Whether a stage makes an optimiser step of each group."""
    options = [getattr(stage, name, None) for name in ("cuts", "unit", "minibatch_size")]
    return options == [True, "group", 1]


def _by_row(trained: TensorDictBase, advantage_key: NestedKey, score: Tensor) -> Tensor:
    """(N, P) Σ_t A_t ∇log π_t over the row's tokens in the loss."""
    inside = trained[LOSS_MASK] & (trained[ACTIONS] >= 0)
    credit = trained[advantage_key].reshape(len(trained), -1).to(score.dtype)  # (N, 1) or (N, T)
    credit = torch.where(inside, credit, 0.0)
    return torch.einsum("nt,ntp->np", credit, score[trained[ACTIONS].clamp_min(0)])

"""The gradient that a pipeline makes of every outcome of a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.pipeline.pipeline import Pipeline
from headrace.transforms.schema import IN_LOSS, has_key

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
    stage keeps `within_groups`; else each is a batch, of a pipeline that remembers nothing of another.

    Args:
        pipeline: with one group an optimiser step (:func:`one_group_a_step`).
        batch: TensorDict ``[N]``, as :func:`all_outcomes` makes it.
        score: (actions, P) ∇ log π of each action.
        outcomes: how many there are.
        group_size: n.

    Raises:
        BatchError: a stage refused the rows.
    """
    stages = list(pipeline.stages.values())
    together = all(getattr(each, "within_groups", False) for each in stages)
    remembers = any(getattr(each, "stateful", False) and not getattr(each, "cuts", False) for each in stages)
    rows_of_outcomes = batch[OUTCOME].bincount(minlength=outcomes).tolist()
    batches = [batch] if together else batch.split(rows_of_outcomes)
    state = pipeline.state_dict()
    shape = (outcomes, score.shape[1])
    advantage, loss = score.new_zeros(shape), score.new_zeros(shape)
    for rows in batches:
        if remembers:
            pipeline.load_state_dict(state)
        trained = pipeline.run(rows).batch
        if len(trained) == 0:
            continue
        each = _by_row(trained, score)
        advantage.index_add_(0, trained[OUTCOME], each / group_size)
        if pipeline.weighs:
            loss.index_add_(0, trained[OUTCOME], each * trained["loss_weight"].reshape(-1, 1))
    return Gradients(advantage, loss if pipeline.weighs else None)


def _by_row(trained: TensorDictBase, score: Tensor) -> Tensor:
    """(N, P) Σ_t A_t ∇log π_t over the row's tokens in the loss."""
    inside = trained[LOSS_MASK] & (trained[ACTIONS] >= 0)
    if has_key(trained, IN_LOSS):
        inside = inside & trained[IN_LOSS][:, None]
    credit = trained["advantage"].reshape(len(trained), -1).to(score.dtype)  # (N, 1) or (N, T)
    credit = torch.where(inside, credit, 0.0)
    return torch.einsum("nt,ntp->np", credit, score[trained[ACTIONS].clamp_min(0)])

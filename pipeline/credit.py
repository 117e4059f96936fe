"""Advantages for a trainer that makes its own minibatches and loss weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.schema import FLOAT, ROW, has_key
from headrace.transforms.tensordicts import device_of

from .halves import before_the_cut
from .pipeline import Pipeline
from .run import Run


class Credit(NamedTuple):
    """Advantage and mask of each input row, in the order of the input."""

    advantage: Tensor
    """(N, 1), or (N, T) if each token has its own; 0 outside the loss."""
    in_loss: Tensor
    """(N, 1), or (N, T) if the batch has a loss mask; bool, True trains."""
    run: Run
    """The run, with ledger, metrics and report."""


def advantages_of(pipeline: Pipeline, batch: TensorDictBase) -> Credit:
    """Run the stages before the split, and return advantages and masks for all rows in input order.

    Use it in a trainer that makes minibatches and loss weights itself. A row that a stage drops or masks has
    advantage 0 and is out of the loss: leave it out of means over tokens or rows. If the batch has a loss
    mask, this reads the device once, in addition to the stages.

    Args:
        pipeline: its split and weight are not used.
        batch: TensorDict ``[N]`` with ids, rewards, and the other columns that the recipe reads.

    Returns:
        A :class:`Credit`.

    Raises:
        BatchError: a stage refused the batch, or moved tokens between rows, which the trainer's rows would
            not follow.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import load_pipeline
        >>> batch = TensorDict(
        ...     {"group_id": [7, 4, 7, 4], "rollout_id": [0, 1, 2, 3], ("next", "reward"): [1.0, 2, 3, 2]},
        ...     batch_size=[4],
        ... )
        >>> words = "pipeline.stages.gate.group_size=2", "pipeline.stages.filter.action=drop"
        >>> pipeline = load_pipeline("pipeline=dr_grpo", *words)
        >>> credit = advantages_of(pipeline, batch)
        >>> credit.advantage.flatten().tolist(), credit.in_loss.flatten().tolist()
        ([-1.0, 0.0, 1.0, 0.0], [True, False, True, False])
    """
    first = before_the_cut(pipeline)
    run = first.run(batch)
    if batch.ndim != 1 or (run.ledger is not None and len(run.ledger.reason) != len(batch)):
        raise BatchError(f"advantages_of needs a batch of shape [N]; got {[*batch.shape]}")
    if run.ledger is None or len(run.batch) == 0:
        nothing = torch.zeros(len(batch), 1, dtype=FLOAT, device=device_of(batch))
        return Credit(nothing, nothing.bool(), run)
    keys = [stage.advantage_key for stage in first.stages.values() if hasattr(stage, "advantage_key")]
    if not keys:
        raise BatchError(f"no stage writes an advantage; the stages are {', '.join(first.order)}")

    def put_back(column: Tensor) -> Tensor:
        """Put the values of the remaining rows at their input rows; 0 and False for the others."""
        wide = column.reshape(len(column), -1)
        return wide.new_zeros(len(batch), wide.shape[1]).index_copy_(0, run.batch.get(ROW), wide)

    advantage, mask_key = put_back(run.batch.get(keys[-1])), first.loss_mask_key
    mask = advantage.new_ones(len(batch), 1, dtype=torch.bool)
    if has_key(batch, mask_key):
        before, mask = batch.get(mask_key), put_back(run.batch.get(mask_key))
        new = (mask & ~before).any(1) if before.shape == mask.shape else mask.any(1)
        if rows := new.nonzero().flatten().tolist():
            raise BatchError(
                "the trainer has the tokens of the input rows, but a stage put other tokens into the loss "
                f"at rows {listing(map(str, rows))}. Remove the stage that merges or widens rows"
            )
    trains = mask & (run.ledger.reason == 0).unsqueeze(1)
    keep = trains if advantage.shape[1] > 1 else trains.any(1, keepdim=True)
    return Credit(torch.where(keep, advantage, 0), trains, run)

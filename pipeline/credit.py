"""What a pipeline gives to the rows of another trainer, which cuts and weighs them by itself."""

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
    """What each row that came in gets, in the order in which they came."""

    advantage: Tensor
    """(N, 1), or (N, T) where tokens have one each; 0 out of the loss."""
    in_loss: Tensor
    """(N, 1), or (N, T) where the batch has a loss mask; bool, True trains."""
    run: Run
    """Ledger, metrics and report of the batch."""


def advantages_of(pipeline: Pipeline, batch: TensorDictBase) -> Credit:
    """Run the stages in front of the cut, and give all rows back in the order in which they came.

    For a trainer that makes minibatches and weighs tokens itself, and asks only what each of its rows is
    worth. A row that leaves has an advantage of 0 and is out of the loss: a mean over tokens or rows is to
    leave it out, too. One device read beside those of the stages, where the batch has a loss mask.

    Args:
        pipeline: of a recipe; its split and weight are not used.
        batch: TensorDict ``[N]``: ids, rewards, and what else the recipe reads.

    Returns:
        A :class:`Credit`.

    Raises:
        BatchError: a stage refused the batch, or moved tokens from row to row, which no other trainer would
            know of.

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
        raise BatchError(f"rows are given back one for one, so that a batch is [N]; got {[*batch.shape]}")
    if run.ledger is None or len(run.batch) == 0:
        nothing = torch.zeros(len(batch), 1, dtype=FLOAT, device=device_of(batch))
        return Credit(nothing, nothing.bool(), run)
    keys = [stage.advantage_key for stage in first.stages.values() if hasattr(stage, "advantage_key")]
    if not keys:
        raise BatchError(f"no stage gives an advantage; there are {', '.join(first.order)}")

    def put_back(column: Tensor) -> Tensor:
        """Of the rows that stay, where they came from; 0 and False for the others."""
        wide = column.reshape(len(column), -1)
        return wide.new_zeros(len(batch), wide.shape[1]).index_copy_(0, run.batch.get(ROW), wide)

    advantage, mask_key = put_back(run.batch.get(keys[-1])), first.loss_mask_key
    mask = advantage.new_ones(len(batch), 1, dtype=torch.bool)
    if has_key(batch, mask_key):
        before, mask = batch.get(mask_key), put_back(run.batch.get(mask_key))
        new = (mask & ~before).any(1) if before.shape == mask.shape else mask.any(1)
        if rows := new.nonzero().flatten().tolist():
            raise BatchError(
                "another trainer has the tokens of rows as they came in; found others in the loss at rows "
                f"{listing(map(str, rows))}. Leave out the stage that merges rows or makes them wider"
            )
    trains = mask & (run.ledger.reason == 0).unsqueeze(1)
    keep = trains if advantage.shape[1] > 1 else trains.any(1, keepdim=True)
    return Credit(torch.where(keep, advantage, 0), trains, run)

"""Advantages for a trainer that makes its own minibatches and loss weights."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.schema import FLOAT
from headrace.transforms.tensordicts import device_of

from .decision import Decider
from .halves import before_the_cut
from .pipeline import Pipeline
from .run import Run


class Credit(NamedTuple):
    """Advantage and mask of each input row, in the order of the input."""

    advantage: Tensor
    """(N, 1) float32, or (N, T) if each token has its own; 0 outside the loss."""
    in_loss: Tensor
    """(N, 1), or (N, T) if the batch has a loss mask; bool, True trains."""
    run: Run
    """The run, with ledger, metrics and report."""


def advantages_of(pipeline: Pipeline, batch: TensorDictBase) -> Credit:
    """Run the stages before the split, and return advantages and masks for all rows in input order.

    Use it in a trainer that makes minibatches and loss weights itself. A row that a stage drops or masks has
    advantage 0 and is out of the loss: leave it out of means over tokens or rows. The tensors are on the
    batch's device. If the batch has a loss mask, this reads the device once, in addition to the stages.

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
    decision, device = Decider(before_the_cut(pipeline)).decide(batch), device_of(batch)
    advantage, in_loss = [
        (each.unsqueeze(1) if each.ndim == 1 else each).to(device)
        for each in (decision.advantage, decision.in_loss)
    ]
    return Credit(advantage.to(FLOAT), in_loss, decision.run)

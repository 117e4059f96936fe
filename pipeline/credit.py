"""What a pipeline gives to the rows of another trainer, which cuts and weighs them by itself."""

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
    """What each row that came in gets, in the order in which they came."""

    advantage: Tensor
    """(N, 1) float32, or (N, T) where tokens have one each; 0 out of the loss."""
    in_loss: Tensor
    """(N, 1), or (N, T) where the batch has a loss mask; bool, True trains."""
    run: Run
    """Ledger, metrics and report of the batch."""


def advantages_of(pipeline: Pipeline, batch: TensorDictBase) -> Credit:
    """What :func:`decide` says of a batch by the stages in front of the cut, as tensors on its device.

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
    decision, device = Decider(before_the_cut(pipeline)).decide(batch), device_of(batch)
    advantage, in_loss = [
        (each.unsqueeze(1) if each.ndim == 1 else each).to(device)
        for each in (decision.advantage, decision.in_loss)
    ]
    return Credit(advantage.to(FLOAT), in_loss, decision.run)

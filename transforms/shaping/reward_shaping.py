"""Rewards shaped before anything is measured against them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule
from headrace.transforms.schema import REWARD, read_written


class RewardShaping(BatchTransform):
    """What shaping stages have in common: after FanOutCollapse, they rewrite the rollout's reward.

    Reads and writes ``("headrace", "reward")`` (N,), so that every segment keeps its rollout's one reward. A
    pipeline refuses one after the advantage.
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(self, in_keys: Sequence[NestedKey | None] = ()):
        super().__init__([REWARD, *in_keys], [REWARD])

    @abstractmethod
    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,) shaped rewards."""

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Rewrite the reward."""
        reward = read_written(batch, REWARD, reader=type(self).__name__, writer="FanOutCollapse")
        rules, shaped = self.rules(batch), self.shape(batch, reward).to(reward.dtype)
        known = ~reward.isnan()  # a reward that is missing stays so
        rewarded = known.sum().clamp_min(1)
        measured = {
            "changed": (known & (shaped != reward)).double().sum() / rewarded,
            "mean": torch.where(known, shaped - reward, 0.0).double().sum() / rewarded,
        }
        return Outcome(batch.set(REWARD, shaped), measured=measured, rules=rules)

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """What must hold of the rows."""
        return ()


class RewardScale(RewardShaping):
    """Scale and shift the rollout's reward, then clip it: ``min(max(scale · R + bias, low), high)``.

    Reads and writes ``("headrace", "reward")``.

    Args:
        scale: factor.
        bias: added after scaling.
        low: least result.
        high: greatest result.

    Raises:
        MissingKeyError: FanOutCollapse is not before it.

    Example:
        >>> RewardScale(scale=2.0, bias=-1.0)
        RewardScale(scale=2.0, bias=-1.0)
    """

    within_groups = True

    def __init__(
        self,
        *,
        scale: float = 1.0,
        bias: float = 0.0,
        low: float = float("-inf"),
        high: float = float("inf"),
    ):
        super().__init__()
        if not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.scale, self.bias, self.low, self.high = scale, bias, low, high

    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,)."""
        return (self.scale * reward + self.bias).clamp(self.low, self.high)

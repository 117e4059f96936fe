"""Rewards shaped before anything is measured against them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, Outcome
from .checks import Rule, set_rule
from .distributed import population_of
from .ids import first_row, sum_by
from .options import nested_key
from .schema import REWARD, read_written


def overlong_punishment(length: Tensor, *, max_length: int, cache: int) -> Tensor:
    """The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).

    ::

        0                          L ≤ L_max − L_cache
        (L_max − L_cache − L)/L_cache    up to L_max
        −1                         beyond

    Args:
        length: (N,) tokens.
        max_length: L_max, tokens.
        cache: L_cache, tokens, in (0, L_max].

    Returns:
        (N,) float in [−1, 0], to be added to the reward.

    Example:
        >>> overlong_punishment(torch.tensor([8, 10, 12]), max_length=10, cache=4).tolist()
        [-0.5, -1.0, -1.0]
    """
    over = length - (max_length - cache)
    return -(over.clamp(0, cache) / cache).to(torch.get_default_dtype())


def length_penalty(length: Tensor, *, coefficient: float, free: int = 0) -> Tensor:
    """A penalty that grows linearly: ``−c · max(L − free, 0)``.

    Args:
        length: (N,) tokens.
        coefficient: c, reward per token, ≥ 0.
        free: tokens that cost nothing.

    Returns:
        (N,) float ≤ 0, to be added to the reward.

    Example:
        >>> length_penalty(torch.tensor([4, 10]), coefficient=0.5, free=3).tolist()
        [-0.5, -3.5]
    """
    return -coefficient * (length - free).clamp_min(0).to(torch.get_default_dtype())


class RewardShaping(BatchTransform):
    """What shaping stages have in common: after FanOutCollapse, they rewrite the rollout's reward.

    Reads and writes ``("headrace", "reward")`` (N,), so that every segment keeps its rollout's one reward. A
    pipeline refuses one after the advantage.
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(self, in_keys: Sequence[NestedKey] = ()):
        super().__init__([REWARD, *in_keys], [REWARD])

    @abstractmethod
    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,) shaped rewards."""

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Rewrite the reward."""
        reward = read_written(batch, REWARD, reader=type(self).__name__, writer="FanOutCollapse")
        shaped = self.shape(batch, reward).to(reward.dtype)
        known = ~reward.isnan()  # a reward that is missing stays so
        rewarded = known.sum().clamp_min(1)
        measured = {
            "changed": (known & (shaped != reward)).double().sum() / rewarded,
            "mean": torch.where(known, shaped - reward, 0.0).double().sum() / rewarded,
        }
        return Outcome(batch.set(REWARD, shaped), measured=measured, rules=self.rules(batch))

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """What must hold of the rows."""
        return ()


class _LengthShaping(RewardShaping):
    """Shaping by a rollout's tokens, over all its segments, those that a filter silenced included."""

    def __init__(self, loss_mask_key: NestedKey, rollout_key: NestedKey | None):
        self.loss_mask_key, self.rollout_key = nested_key(loss_mask_key), nested_key(rollout_key)
        super().__init__([self.loss_mask_key, self.rollout_key])

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """Every row has a rollout."""
        return [set_rule(self.ids(batch, "rollout"), "rollout_id", "their lengths would be added up")]

    def rollout_lengths(self, batch: TensorDictBase) -> Tensor:
        """(N,) int64, over all rows of each row's rollout."""
        if self.rollout_key is None:
            return self.lengths(batch)
        people = population_of(batch, every=True)
        everyone = people.take({"lengths": self.lengths(batch)}, {"rollouts": self.ids(batch, "rollout")})
        return people.put_back(sum_by(first_row(everyone["rollouts"]), everyone["lengths"]))


class OverlongPunishment(_LengthShaping):
    """Add :func:`overlong_punishment` of the rollout's tokens to its reward.

    Reads `loss_mask_key`, ``("headrace", "length")`` if there, `rollout_key`; reads and writes
    ``("headrace", "reward")``.

    Args:
        max_length: L_max, tokens in the loss over all segments of a rollout.
        cache: L_cache, tokens, in (0, L_max].
        weight: factor of the punishment, in units of the reward.
        loss_mask_key: (N, T) bool.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.

    Example:
        >>> OverlongPunishment(max_length=10, cache=4)
        OverlongPunishment(max_length=10, cache=4)
    """

    def __init__(
        self,
        *,
        max_length: int,
        cache: int,
        weight: float = 1.0,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        rollout_key: NestedKey | None = "rollout_id",
    ):
        super().__init__(loss_mask_key, rollout_key)
        if not 0 < cache <= max_length:
            raise ValueError(f"cache must be in (0, max_length]; got {cache} and {max_length}")
        self.max_length, self.cache, self.weight = max_length, cache, weight

    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,)."""
        lengths = self.rollout_lengths(batch)
        return reward + self.weight * overlong_punishment(
            lengths, max_length=self.max_length, cache=self.cache
        )


class LengthPenalty(_LengthShaping):
    """Add :func:`length_penalty` of the rollout's tokens to its reward.

    Reads `loss_mask_key`, ``("headrace", "length")`` if there, `rollout_key`; reads and writes
    ``("headrace", "reward")``.

    Args:
        coefficient: reward per token, ≥ 0.
        free: tokens that cost nothing.
        loss_mask_key: (N, T) bool.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.

    Example:
        >>> LengthPenalty(coefficient=0.01)
        LengthPenalty(coefficient=0.01)
    """

    def __init__(
        self,
        *,
        coefficient: float,
        free: int = 0,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        rollout_key: NestedKey | None = "rollout_id",
    ):
        super().__init__(loss_mask_key, rollout_key)
        if coefficient < 0 or free < 0:
            raise ValueError(f"coefficient and free must be ≥ 0; got {coefficient} and {free}")
        self.coefficient, self.free = coefficient, free

    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,)."""
        return reward + length_penalty(
            self.rollout_lengths(batch), coefficient=self.coefficient, free=self.free
        )


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

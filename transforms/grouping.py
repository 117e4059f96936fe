"""Statistics per group, in the two layouts that a batch can have.

Both answer the same questions with tensors that broadcast against the rewards they were made for, so that
every formula is written once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .ids import reduce_by, sum_by


class Grouping(Protocol):
    """What a baseline or a scale may ask. Shapes broadcast against :attr:`reward`."""

    reward: Tensor
    """The rewards."""
    deviation: Tensor
    """Each reward less the mean of its group, in which each rollout has one vote."""
    count: Tensor
    """Rollouts per group."""

    def std(self, ddof: int) -> Tensor:
        """Standard deviation of the rewards per group, with the divisor ``max(count - ddof, 1)``."""

    def batch_std(self, ddof: int) -> Tensor:
        """Standard deviation of the rewards over all rollouts of the batch."""

    def equal(self) -> Tensor:
        """True where all rewards of the group are one number."""


class Blocks:
    """Groups of one size in contiguous rows: a (P, G) view of the rewards, in their own dtype.

    The statistics are the ones that the reshape formula takes, so results are bit-equal to it: centred
    first, since the std of the uncentred rewards differs in the last bit.
    """

    def __init__(self, reward: Tensor):
        self.reward = reward
        self.deviation = reward - reward.mean(-1, keepdim=True)
        self.count = reward.new_full((), reward.shape[1])

    def std(self, ddof: int) -> Tensor:
        """(P, 1)."""
        return self.deviation.std(-1, keepdim=True, correction=ddof)

    def batch_std(self, ddof: int) -> Tensor:
        """Scalar."""
        return (self.reward - self.reward.mean()).std(correction=ddof)

    def equal(self) -> Tensor:
        """(P, 1) bool."""
        return self.reward.amax(-1, keepdim=True) == self.reward.amin(-1, keepdim=True)


class ById:
    """Any other layout: one entry a row, float64, sums in buffers at the first row of each group.

    Args:
        reward: (N,) float64; every row of a rollout carries the rollout's reward.
        first: (N,) int64, the first row of each row's group.
        speaks: (N,) bool, True on one row of each rollout.
    """

    def __init__(self, reward: Tensor, first: Tensor, speaks: Tensor):
        self.reward, self.first = reward, first
        self.votes = speaks.to(reward.dtype)
        self.count = sum_by(first, self.votes)
        self.deviation = reward - sum_by(first, reward * self.votes) / self.count

    def std(self, ddof: int) -> Tensor:
        """(N,); two passes, since a sum of squares loses everything to a large mean."""
        squares = sum_by(self.first, self.deviation.square() * self.votes)
        return (squares / (self.count - ddof).clamp_min(1)).sqrt()

    def batch_std(self, ddof: int) -> Tensor:
        """Scalar."""
        rollouts = self.votes.sum()
        deviation = self.reward - (self.reward * self.votes).sum() / rollouts
        return ((deviation.square() * self.votes).sum() / (rollouts - ddof).clamp_min(1)).sqrt()

    def equal(self) -> Tensor:
        """(N,) bool."""
        high, low = (reduce_by(self.first, self.reward, how) for how in ("amax", "amin"))
        return high == low


def squares_fit(peak: float, terms: int, dtype: torch.dtype) -> bool:
    """Whether `terms` squares of numbers up to `peak` can be summed in a dtype without overflow."""
    return peak < (torch.finfo(dtype).max / max(terms, 1)) ** 0.5 / 2

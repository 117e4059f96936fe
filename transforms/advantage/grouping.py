"""Statistics per group, in the two layouts that a batch can have.

Both answer the same questions with tensors that broadcast against the rewards they were made for, so that
every formula is written once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.transforms.ids import reduce_by, sum_by


class Grouping(Protocol):
    """What a baseline or a scale may ask. Shapes broadcast against :attr:`reward`."""

    reward: Tensor
    """The rewards."""
    deviation: Tensor
    """Each reward less the mean of its group, in which each rollout has one vote."""
    count: Tensor
    """Rollouts per group."""
    rollouts: Tensor
    """Rollouts of the batch, a scalar."""
    length: Tensor
    """Tokens of each rollout; only there where somebody asked."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` per group, each rollout once."""

    def max(self, values: Tensor) -> Tensor:
        """Maximum of `values` per group."""

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` over all rollouts of the batch, each once; a scalar."""

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

    def __init__(self, reward: Tensor, length: Tensor | None = None):
        self.reward = reward
        self.deviation = reward - reward.mean(-1, keepdim=True)
        self.count = reward.new_full((), reward.shape[1])
        self.rollouts = reward.new_full((), reward.numel())
        if length is not None:
            self.length = length

    def sum(self, values: Tensor) -> Tensor:
        """(P, 1)."""
        return values.sum(-1, keepdim=True)

    def max(self, values: Tensor) -> Tensor:
        """(P, 1)."""
        return values.amax(-1, keepdim=True)

    def total(self, values: Tensor) -> Tensor:
        """Scalar."""
        return values.sum()

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
        is_first_segment: (N,) bool, True on one row of each rollout.
        length: (N,) tokens of each row's rollout.
    """

    def __init__(self, reward: Tensor, first: Tensor, is_first_segment: Tensor, length: Tensor | None = None):
        self.reward, self.first = reward, first
        self.votes = is_first_segment.to(reward.dtype)
        self.rollouts = self.votes.sum()
        self.count = sum_by(first, self.votes)
        self.deviation = reward - self.sum(reward) / self.count
        if length is not None:
            self.length = length

    def sum(self, values: Tensor) -> Tensor:
        """(N,)."""
        return sum_by(self.first, values * self.votes)

    def max(self, values: Tensor) -> Tensor:
        """(N,)."""
        return reduce_by(self.first, values, "amax")

    def total(self, values: Tensor) -> Tensor:
        """Scalar."""
        return (values * self.votes).sum()

    def std(self, ddof: int) -> Tensor:
        """(N,); two passes, since a sum of squares loses everything to a large mean."""
        squares = self.sum(self.deviation.square())
        return (squares / (self.count - ddof).clamp_min(1)).sqrt()

    def batch_std(self, ddof: int) -> Tensor:
        """Scalar."""
        deviation = self.reward - self.total(self.reward) / self.rollouts
        return (self.total(deviation.square()) / (self.rollouts - ddof).clamp_min(1)).sqrt()

    def equal(self) -> Tensor:
        """(N,) bool."""
        return self.max(self.reward) == -self.max(-self.reward)


def squares_fit(peak: float, terms: int, dtype: torch.dtype) -> bool:
    """Whether `terms` squares of numbers up to `peak` can be summed in a dtype without overflow."""
    return peak < (torch.finfo(dtype).max / max(terms, 1)) ** 0.5 / 2

"""Statistics per group, in the layouts that a batch can have.

All answer the same questions with tensors that broadcast against the rewards they were made for, so that
every formula is written once; and, but for :class:`ReshapeFormula`, with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from headrace.transforms.ids import reduce_by, sum_by
from headrace.transforms.sums import sum_in_any_order

ROOM = 16.0  # what sums in slices need above the largest square


class Grouping(ABC):
    """What a baseline or a scale may ask. Shapes broadcast against :attr:`reward`.

    Attributes:
        reward: the rewards, float64.
        count: rollouts per group.
        rollouts: rollouts of the batch, a scalar.
        length: tokens of each rollout; only there where somebody asked.
    """

    reward: Tensor
    count: Tensor
    rollouts: Tensor
    length: Tensor

    @abstractmethod
    def add(self, values: Tensor) -> Tensor:
        """Sum of `values` per group, each rollout once, of numbers that need no rounding, such as counts."""

    @abstractmethod
    def add_all(self, values: Tensor) -> Tensor:
        """Sum of such `values` over all rollouts of the batch, each once; a scalar."""

    @abstractmethod
    def max(self, values: Tensor) -> Tensor:
        """Maximum of `values` per group."""

    def sum(self, values: Tensor, peak: Tensor | None = None) -> Tensor:
        """Sum of `values` per group, each rollout once, whatever their order; none is above `peak`."""
        peak = self.max(values.abs()) if peak is None else peak
        return sum_in_any_order(values, self.add, peak=peak, terms=self.count)

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` over all rollouts of the batch, each once, whatever their order; a scalar."""
        return sum_in_any_order(values, self.add_all, peak=values.abs().amax(), terms=self.rollouts)

    @cached_property
    def high(self) -> Tensor:
        """Largest reward per group."""
        return self.max(self.reward)

    @cached_property
    def low(self) -> Tensor:
        """Smallest reward per group."""
        return -self.max(-self.reward)

    @cached_property
    def deviation(self) -> Tensor:
        """Each reward less the mean of its group, in which each rollout has one vote."""
        above = self.reward - self.low  # exact where rewards are near one another
        return above - self.sum(above, self.high - self.low) / self.count

    @cached_property
    def batch_deviation(self) -> Tensor:
        """Each reward less the mean over all rollouts of the batch."""
        above = self.reward - self.reward.amin()
        return above - self.total(above) / self.rollouts

    def std(self, ddof: int) -> Tensor:
        """Standard deviation of the rewards per group, with the divisor ``max(count - ddof, 1)``.

        Two passes, since a sum of squares loses everything to a large mean.
        """
        squares = self.sum(self.deviation.square(), (self.high - self.low).square())
        return (squares / (self.count - ddof).clamp_min(1)).sqrt()

    def batch_std(self, ddof: int) -> Tensor:
        """Standard deviation of the rewards over all rollouts of the batch."""
        squares = self.total(self.batch_deviation.square())
        return (squares / (self.rollouts - ddof).clamp_min(1)).sqrt()

    def equal(self) -> Tensor:
        """True where all rewards of the group are one number."""
        return self.high == self.low


class Blocks(Grouping):
    """Groups of one size in contiguous rows: a (P, G) block of rewards, float64."""

    def __init__(self, reward: Tensor, length: Tensor | None = None):
        self.reward = reward
        self.low, self.high = torch.aminmax(reward, dim=-1, keepdim=True)
        self.count = reward.new_full((), reward.shape[1], dtype=torch.float64)
        self.rollouts = reward.new_full((), reward.numel(), dtype=torch.float64)
        if length is not None:
            self.length = length

    def add(self, values: Tensor) -> Tensor:
        """(P, 1)."""
        return values.sum(-1, keepdim=True)

    def add_all(self, values: Tensor) -> Tensor:
        """Scalar."""
        return values.sum()

    def max(self, values: Tensor) -> Tensor:
        """(P, 1)."""
        return values.amax(-1, keepdim=True)


class ReshapeFormula(Blocks):
    """The same in the dtype of the rewards and by the operators of the formula that everybody knows.

    ``x = r.view(P, G); x -= x.mean(-1); x / (x.std(-1) + eps)``, to the bit: centred first, since the std of
    the uncentred rewards differs in the last one. Counts stay float64: float16 ends at 65,504.
    """

    def sum(self, values: Tensor, peak: Tensor | None = None) -> Tensor:
        """(P, 1)."""
        return self.add(values)

    def total(self, values: Tensor) -> Tensor:
        """Scalar."""
        return self.add_all(values)

    @cached_property
    def deviation(self) -> Tensor:
        """(P, G)."""
        return self.reward - self.reward.mean(-1, keepdim=True)

    def std(self, ddof: int) -> Tensor:
        """(P, 1)."""
        return self.deviation.std(-1, keepdim=True, correction=ddof)

    @cached_property
    def batch_deviation(self) -> Tensor:
        """(P, G)."""
        return self.reward - self.reward.mean()

    def batch_std(self, ddof: int) -> Tensor:
        """Scalar."""
        return self.batch_deviation.std(correction=ddof)


class ById(Grouping):
    """Any other layout: one entry a row, sums in buffers at the first row of each group.

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
        if length is not None:
            self.length = length

    def add(self, values: Tensor) -> Tensor:
        """(N,)."""
        return sum_by(self.first, values * self.votes)

    def add_all(self, values: Tensor) -> Tensor:
        """Scalar."""
        return (values * self.votes).sum()

    def max(self, values: Tensor) -> Tensor:
        """(N,)."""
        return reduce_by(self.first, values, "amax")


def squares_fit(peak: float, terms: int, dtype: torch.dtype) -> bool:
    """Whether `terms` squares of differences of numbers up to `peak` can be summed without overflow."""
    return peak < (torch.finfo(dtype).max / max(terms, 1)) ** 0.5 / ROOM

"""Statistics per group, in the layouts that a batch can have.

All answer the same questions with tensors that broadcast against the rewards they were made for, so that
every formula is written once; and, but for :class:`ReshapeFormula`, with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from headrace.transforms.sums import ExactSum, divide, exact_sum

ROOM = 16.0  # what sums in slices need above the largest square


class Grouping(ABC):
    """What a baseline or a scale may ask. What is known of each group is a table, until it is :meth:`spread`.

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
    _deviation: Tensor | None = None
    _batch_deviation: Tensor | None = None

    @property
    @abstractmethod
    def labels(self) -> Tensor:
        """(M,) int64, by which the groups of the rewards, flattened, are told apart."""

    @property
    def voices(self) -> Tensor:
        """(M,) bool, True on one reward, flattened, of each rollout."""
        return torch.ones_like(self.labels, dtype=torch.bool)

    @abstractmethod
    def add(self, values: Tensor) -> Tensor:
        """Sum of `values` per group, each rollout once, of numbers that need no rounding, such as counts."""

    @abstractmethod
    def add_all(self, values: Tensor) -> Tensor:
        """Sum of such `values` over all rollouts of the batch, each once; a scalar."""

    @abstractmethod
    def max(self, values: Tensor) -> Tensor:
        """Maximum of `values` per group."""

    def spread(self, per_group: Tensor) -> Tensor:
        """What is known of each group, for each of its rollouts."""
        return per_group

    def sums(self, values: Tensor) -> ExactSum:
        """Sum of `values` per group, each rollout once, of which nothing is lost."""
        terms = (
            self.count if values.device.type == "cpu" else self.spread(self.count)
        )  # there the most will do
        return exact_sum(values, self.add, peak=lambda: self.spread(self.max(values.abs())), terms=terms)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` per group, each rollout once, whatever their order."""
        return self.sums(values).high

    def total(self, values: Tensor) -> ExactSum:
        """Sum of `values` over all rollouts of the batch, each once, of which nothing is lost; a scalar."""
        return exact_sum(values, self.add_all, peak=lambda: values.abs().amax(), terms=self.rollouts)

    @property
    def deviation(self) -> Tensor:
        """Each reward less the mean of its group, in which a rollout has one vote; equal ones are 0."""
        if self._deviation is None:  # `cached_property` has a lock, through which nothing is traced
            self._deviation = self._deviate()
        return self._deviation

    def _deviate(self) -> Tensor:
        mean = divide(self.sums(self.reward), self.count)
        deviation = self.reward - self.spread(mean.high)
        short = mean.low.device.type == "cpu" and not bool(mean.low.any())  # as it is for most rewards
        return deviation if short else deviation.sub_(self.spread(mean.low))

    @property
    def batch_deviation(self) -> Tensor:
        """Each reward less the mean over all rollouts of the batch."""
        if self._batch_deviation is None:
            self._batch_deviation = self._deviate_from_all()
        return self._batch_deviation

    def _deviate_from_all(self) -> Tensor:
        mean = divide(self.total(self.reward), self.rollouts)
        return (self.reward - mean.high).sub_(mean.low)

    def std(self, ddof: int) -> Tensor:
        """Standard deviation of the rewards per group, with the divisor ``max(count - ddof, 1)``.

        Two passes, since a sum of squares loses everything to a large mean.
        """
        return (self.sum(self.deviation.square()) / (self.count - ddof).clamp_min(1)).sqrt()

    def batch_std(self, ddof: int) -> Tensor:
        """Standard deviation of the rewards over all rollouts of the batch."""
        squares = self.total(self.batch_deviation.square()).high
        return (squares / (self.rollouts - ddof).clamp_min(1)).sqrt()


class Blocks(Grouping):
    """Groups of one size in contiguous rows: a (P, G) block of rewards, float64."""

    def __init__(self, reward: Tensor, length: Tensor | None = None):
        self.reward = reward
        self.count = reward.new_full((), reward.shape[1], dtype=torch.float64)
        self.rollouts = reward.new_full((), reward.numel(), dtype=torch.float64)
        if length is not None:
            self.length = length

    @property
    def labels(self) -> Tensor:
        """(P · G,)."""
        groups, size = self.reward.shape
        return torch.arange(groups, device=self.reward.device)[:, None].expand(groups, size).flatten()

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

    def sums(self, values: Tensor) -> ExactSum:
        """(P, 1)."""
        total = self.add(values)
        return ExactSum(total, torch.zeros_like(total))

    def total(self, values: Tensor) -> ExactSum:
        """Scalar."""
        total = self.add_all(values)
        return ExactSum(total, torch.zeros_like(total))

    def _deviate(self) -> Tensor:
        """(P, G); equal rewards, of which rounding leaves up to 0.9 after the division, are 0."""
        low, high = torch.aminmax(self.reward, dim=-1, keepdim=True)
        return (self.reward - self.reward.mean(-1, keepdim=True)).masked_fill_(low == high, 0.0)

    def std(self, ddof: int) -> Tensor:
        """(P, 1)."""
        return self.deviation.std(-1, keepdim=True, correction=ddof)

    def _deviate_from_all(self) -> Tensor:
        """(P, G)."""
        return self.reward - self.reward.mean()

    def batch_std(self, ddof: int) -> Tensor:
        """Scalar."""
        return self.batch_deviation.std(correction=ddof)


class ById(Grouping):
    """Any other layout: rollouts anywhere, with the label of their group, and tables by label.

    Args:
        reward: (M,) float64, one a rollout; or of several rows of a rollout, of which one counts.
        label: (M,) int64, that of the rollout's group.
        labels: P, more than any label; tables have as many entries, whether or not all are used.
        counts: (M,) bool, True on one row of each rollout; None: everywhere.
        length: (M,) tokens of each rollout.
    """

    def __init__(
        self,
        reward: Tensor,
        label: Tensor,
        labels: int,
        counts: Tensor | None = None,
        length: Tensor | None = None,
    ):
        self.reward, self.label, self.tables = reward, label, labels
        self.votes = None if counts is None else counts.to(reward.dtype)
        if self.votes is None and label.device.type == "cpu":
            self.rollouts = reward.new_full((), len(reward))
            self.count = torch.bincount(label, minlength=labels).to(reward.dtype)
        else:
            votes = torch.ones_like(reward) if self.votes is None else self.votes
            self.rollouts, self.count = votes.sum(), self._table(votes)
        if length is not None:
            self.length = length

    @property
    def labels(self) -> Tensor:
        """(M,)."""
        return self.label

    @property
    def voices(self) -> Tensor:
        """(M,)."""
        return super().voices if self.votes is None else self.votes.bool()

    def _table(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.tables).scatter_add_(0, self.label, values)

    def add(self, values: Tensor) -> Tensor:
        """(P,)."""
        return self._table(values if self.votes is None else values * self.votes)

    def add_all(self, values: Tensor) -> Tensor:
        """Scalar."""
        return (values if self.votes is None else values * self.votes).sum()

    def max(self, values: Tensor) -> Tensor:
        """(P,); of labels that are not used, −∞."""
        table = values.new_full((self.tables,), float("-inf"))
        return table.scatter_reduce_(0, self.label, values, "amax")

    def spread(self, per_group: Tensor) -> Tensor:
        """(P,) → (M,); a scalar stays one."""
        return per_group.index_select(0, self.label) if per_group.ndim else per_group


def largest_to_square(terms: int, dtype: torch.dtype) -> float:
    """Below it, `terms` squares of differences of numbers can be summed without overflow."""
    return float((torch.finfo(dtype).max / max(terms, 1)) ** 0.5 / ROOM)


def squares_fit(peak: float, terms: int, dtype: torch.dtype) -> bool:
    """Whether `terms` squares of differences of numbers up to `peak` can be summed without overflow."""
    return peak < largest_to_square(terms, dtype)

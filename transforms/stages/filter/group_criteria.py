"""Criteria for :class:`SampleFilter` that compare a rollout with the others of its group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import ColumnNames, Ids, Rows
from headrace.transforms.table.options import INF, LowerBound, UpperBound, at_least
from headrace.transforms.table.schema import REWARD

from .criteria import Criterion

By = Literal["reward", "length", "efficiency", "variance"]
ROUNDING = 2.0**-40  # share of Σ R²: variances that differ by less are equal up to rounding


def best_of(reward: Tensor, groups: Ids, ids: Tensor, k: int, by: By, length: Tensor | None = None) -> Tensor:
    """Choose k rollouts of each group: (V,) bool, True where the rollout is kept.

    ::

        reward      the k largest R
        length      the k smallest L
        efficiency  the k largest R/L                          (GFPO, arXiv:2508.09726)
        variance    the a largest and k − a smallest R, for the a with the largest variance
                                                               (PODS, arXiv:2504.13818)

    Of equal rollouts, those with smaller ids are kept. Under ``variance``, if several a give the same
    variance, the largest a is used. The k rewards with the largest variance are at the two ends of the sorted
    rewards (PODS, theorem 1). If the largest reward replaces the k-th smallest, the variance does not become
    smaller, so a is at least 1, and there are only k choices.

    Args:
        reward: (V,) float64, one per rollout.
        groups: group of each of the V rollouts.
        ids: (V,) int64, rollout ids.
        k: number of rollouts kept per group, ≥ 1. A group with k rollouts or fewer keeps all.
        by: criterion, see above.
        length: (V,) int64, tokens per rollout, for ``length`` and ``efficiency``.

    Example:
        >>> ids, reward = torch.arange(4), torch.tensor([0.0, 0.1, 0.8, 1.0], dtype=torch.float64)
        >>> groups = Ids(torch.zeros(4, dtype=torch.int64))
        >>> best_of(reward, groups, ids, 2, "reward").tolist()
        [False, False, True, True]
        >>> best_of(reward, groups, ids, 2, "variance").tolist()
        [True, False, False, True]
    """
    if len(reward) == 0:
        return torch.zeros_like(reward, dtype=torch.bool)
    value = -reward
    if by in ("length", "efficiency") and length is not None:
        value = length.double() if by == "length" else -reward / length.clamp_min(1)
    # 1. The rank of each rollout in its group, the best first.
    by_id = ids.argsort()

    def places(value: Tensor) -> Tensor:
        order = by_id[value[by_id].argsort(stable=True)]
        return groups.positions(torch.empty_like(order).scatter_(0, order, torch.arange(len(order))))

    place = places(value)
    if by != "variance":
        return place < k
    # 2. Cumulative sums of the sorted rewards and of their squares. The largest reward is subtracted first,
    # so that small differences between large rewards are not rounded away.
    table = reward.new_zeros(groups.n, int(groups.count.max()) + 1)
    table[groups.of, place + 1] = reward - groups.spread(groups.max(reward))
    sums, squares = table.cumsum(1), table.square().cumsum(1)
    count = groups.count[:, None]
    sum_of_all, squares_of_all = sums.gather(1, count), squares.gather(1, count)
    # 3. The number a of largest rewards that maximises the variance. Among variances that are equal up to
    #    rounding, the largest a.
    best, best_a = torch.full_like(sum_of_all, -1.0), torch.full_like(count, k)
    for a in range(k, 0, -1):
        largest_end = count.clamp_max(a)  # sorted rewards before this index are the a largest,
        smallest_begin = (count - k + a).clamp_min(0)  # and those from this index on the k − a smallest
        total = sums.gather(1, largest_end) + (sum_of_all - sums.gather(1, smallest_begin))
        square = squares.gather(1, largest_end) + (squares_of_all - squares.gather(1, smallest_begin))
        variance = square - total.square() / k  # the variance times k
        better = variance > best + squares_of_all * ROUNDING
        best_a, best = torch.where(better, a, best_a), torch.where(better, variance, best)
    best_a = groups.spread(best_a.flatten())
    largest = place < best_a
    return largest | (places(reward.masked_fill(largest, float("inf"))) < k - best_a)


class BestOf(Criterion, columns=("loss_mask", "group", "rollout")):
    """Keep the k best rollouts of each group (:func:`best_of`). Reason: ``not_best``.

    With ``action="exclude"`` later stages compute their statistics over the kept rollouts, as GFPO and PODS
    do. With ``action="mask"`` the statistics are over all rollouts. A rollout without a reward stays. Put
    this filter after FanOutCollapse.

    Args:
        k: number of rollouts kept per group, ≥ 1. A group with k rollouts or fewer keeps all.
        by: ``reward``, ``length``, ``efficiency`` or ``variance``.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "not_best"
    unit = "rollout"

    def __init__(self, *, k: int, by: By = "reward", **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.k, self.by = at_least("k", k, 1), by
        lengths = self.loss_mask_key if by in ("length", "efficiency") else None
        keys = (REWARD, self.group_key, self.rollout_key, lengths)
        self.in_keys = tuple(key for key in keys if key is not None)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        rollouts = rows.rollouts
        votes = rollouts.is_first & ~rows[REWARD].isnan()
        voters, number = rows.where(votes), rollouts.of[votes]
        length = None
        if self.by in ("length", "efficiency"):
            length = rows.with_excluded.rollouts.sum(rows.lengths)[number]
        kept = best_of(voters[REWARD], voters.groups, voters.rollouts.labels, self.k, self.by, length)
        stays = torch.ones(rollouts.n, dtype=torch.bool)
        stays[number] = kept
        return rollouts.spread(stays)


class GroupMeanWithin(Criterion, columns=("group", "rollout")):
    """Keep groups whose mean reward is in ``[low, high]``. Reason: ``group_mean``.

    The mean is over the rollouts that have a reward and are not excluded. A group without any reward leaves.
    Put this filter after FanOutCollapse.

    Args:
        low: lower bound of the mean; −∞: none.
        high: upper bound of the mean; ∞: none.
        names: other names of columns, such as `group_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "group_mean"
    unit = "group"

    def __init__(self, *, low: LowerBound = -INF, high: UpperBound = INF, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        if not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high = low, high
        self.in_keys = tuple(key for key in (REWARD, self.group_key, self.rollout_key) if key is not None)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        reward, groups = rows[REWARD], rows.groups
        voters = Ids(groups.of, rows.rollouts.is_first & ~reward.isnan())
        lowest = voters.min(reward)  # subtracted first, so that the mean of equal rewards is exact
        mean = lowest + voters.sum(reward - voters.spread(lowest)) / voters.count
        mean = mean.to(rows.dtype(REWARD))  # rounded like the rewards, so that a bound such as 0.1 is exact
        return groups.spread((mean >= self.low) & (mean <= self.high))

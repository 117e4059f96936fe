"""Criteria for :class:`SampleFilter` that look at a rollout among those of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import population_of, present_ranks
from headrace.transforms.ids import as_ids, first_row, first_row_of_pairs, is_first, reduce_by, sum_by
from headrace.transforms.options import at_least, nested_key, one_of
from headrace.transforms.ranking import Ranking, rank_in_groups
from headrace.transforms.rows import device_of
from headrace.transforms.schema import COUNTED, REWARD, read_written
from headrace.transforms.sums import divide, exact_sum
from headrace.transforms.tokens import lengths

from .criteria import Criterion

By = Literal["reward", "length", "efficiency", "variance"]


class Rollouts(NamedTuple):
    """The rollouts of a batch, each on all of its rows. Shapes do not depend on the data."""

    reward: Tensor
    """(N,) float64."""
    length: Tensor
    """(N,) int64, tokens."""
    groups: Tensor
    """(N,) int64, the first row of each row's group."""
    ids: Tensor
    """(N,) int64."""
    votes: Tensor
    """(N,) bool, True on one row of each rollout that is in the statistics and has a reward."""


def best_of(rollouts: Rollouts, k: int, by: By) -> Tensor:
    """Who is among the k of its group that are kept; (N,) bool, True where a row does not vote.

    ::

        reward      the k largest R
        length      the k smallest L
        efficiency  the k largest R/L                          (GFPO, arXiv:2508.09726)
        variance    a largest and k − a smallest R, with the a for which their variance is largest
                                                               (PODS, arXiv:2504.13818)

    Of equals those with the smaller ids are kept, and under ``variance`` as many of the largest as there can
    be. No device read.

    Args:
        rollouts: of all ranks that share the batch.
        k: rollouts of a group, ≥ 1; one that has no more keeps all.
        by: what is compared.

    Example:
        >>> ids = torch.arange(4)
        >>> reward = torch.tensor([0.0, 0.1, 0.8, 1.0], dtype=torch.float64)
        >>> four = Rollouts(reward, ids + 5, torch.zeros_like(ids), ids, ids >= 0)
        >>> best_of(four, 2, "reward").tolist(), best_of(four, 2, "variance").tolist()
        ([False, False, True, True], [True, False, False, True])
    """
    size = sum_by(rollouts.groups, rollouts.votes.long())
    apart = torch.where(rollouts.votes, rollouts.groups, len(size))  # who has no vote stands elsewhere
    values = {
        "reward": -rollouts.reward,
        "length": rollouts.length.double(),
        "efficiency": -rollouts.reward / rollouts.length.clamp_min(1),
        "variance": -rollouts.reward,
    }[by]
    ranking = rank_in_groups(apart, values, rollouts.ids)
    place = torch.arange(len(size), device=size.device) - ranking.start
    if by != "variance":
        return ranking.to_rows(place < k) | ~rollouts.votes
    number = ranking.at_places(size)
    reward = torch.where(ranking.at_places(rollouts.votes), ranking.at_places(rollouts.reward), 0.0)
    high = most_apart(ranking, reward, number, k)
    kept = (number <= k) | (place < high) | (place >= number - (k - high))
    return ranking.to_rows(kept) | ~rollouts.votes


def most_apart(ranking: Ranking, reward: Tensor, number: Tensor, k: int) -> Tensor:
    """How many of the largest rewards are among the k of a group that vary most; (N,) int64 by place.

    The k rewards that vary most are at the two ends (PODS, theorem 1), so that there are k + 1 choices.

    Args:
        ranking: of rows, the largest reward of each group first.
        reward: (N,) float64, by place.
        number: (N,) int64, how many the group has, by place.
        k: ≥ 1.
    """
    # Squares of what is far from 0 would lose the differences.
    centred = reward - reward.index_select(0, ranking.start)
    sums = [ranking.running(centred), ranking.running(centred.square())]

    def first(count: Tensor) -> list[Tensor]:
        at = (ranking.start + count.clamp_min(1) - 1).clamp_max(len(number) - 1)
        return [torch.where(count > 0, each.index_select(0, at), 0.0) for each in sums]

    everyone, chosen = first(number), torch.full_like(number, k)
    largest = torch.full_like(reward, -1.0)
    for high in range(k, -1, -1):
        head, tail = first(torch.full_like(number, high)), first((number - k + high).clamp_min(0))
        total, squares = (a + (c - b) for a, b, c in zip(head, tail, everyone, strict=True))
        spread = squares - total.square() / k
        better = spread > largest + everyone[1] * 2.0**-40  # of equals that rounding tells apart, the first
        chosen, largest = torch.where(better, high, chosen), torch.where(better, spread, largest)
    return chosen


class _OfGroup(Criterion):
    """A criterion that compares the rollouts of groups, by the reward that FanOutCollapse wrote."""

    asks_in_loss = True

    def __init__(self, group_key: NestedKey, rollout_key: NestedKey | None, *others: NestedKey):
        self.group_key, self.rollout_key = nested_key(group_key), nested_key(rollout_key)
        keys = (REWARD, self.group_key, self.rollout_key, *others)
        self.in_keys = tuple(key for key in keys if key is not None)

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """Every row in the statistics has a group and a rollout."""
        why = "rows without an id would be compared"
        rules = [set_rule(ids, f"{unit}_id", why) for unit, ids in self._ids(batch).items()]
        counted = batch.get(COUNTED, None)
        return rules if counted is None else [rule._replace(bad=rule.bad & counted) for rule in rules]

    def _ids(self, batch: TensorDictBase) -> dict[str, Tensor]:
        groups = as_ids(self._column(batch, "group_key"), "group_id")
        if self.rollout_key is not None:
            return {"group": groups, "rollout": as_ids(self._column(batch, "rollout_key"), "rollout_id")}
        ranks = present_ranks()
        start = 0 if ranks is None else ranks.rank << 40  # rows of other ranks are others
        return {"group": groups, "rollout": torch.arange(start, start + len(batch), device=groups.device)}

    def _judge(self, batch: TensorDictBase, judge: Callable[[Rollouts], Tensor], length: Tensor) -> Tensor:
        """(N,) bool: what `judge` says of the rollouts of all ranks, for each row of this one."""
        reward = read_written(batch, REWARD, reader=type(self).__name__, writer="FanOutCollapse").double()
        known = batch.get(COUNTED, torch.ones_like(length, dtype=torch.bool)) & ~reward.isnan()
        ids = {f"{unit}s": column for unit, column in self._ids(batch).items()}
        people = population_of(batch, every=True)
        every = people.take({"reward": reward, "length": length, "known": known}, ids)
        known, rollouts = every["known"], first_row(every["rollouts"])
        voter = first_row_of_pairs(rollouts, known.long())
        votes, length = known & is_first(voter), sum_by(rollouts, every["length"])
        found = Rollouts(every["reward"], length, first_row(every["groups"]), every["rollouts"], votes)
        return people.put_back(judge(found).index_select(0, voter))


class BestOf(_OfGroup):
    """The k best rollouts of each group (:func:`best_of`). Reason: ``not_best``.

    With ``action="exclude"`` the statistics of later stages are those of the rollouts kept, as GFPO and PODS
    have it, with ``mask`` those of all. A rollout without a reward stays. It stands after FanOutCollapse.

    Args:
        k: rollouts of a group that stay, ≥ 1; one that has no more keeps all.
        by: ``reward``, ``length``, ``efficiency``, ``variance``.
        loss_mask_key: (N, T) bool, dense or ragged, for ``length`` and ``efficiency``.
        group_key: (N,) or (N, 1) int.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.
    """

    within_groups = True

    reason = "not_best"
    unit = "rollout"

    def __init__(
        self,
        *,
        k: int,
        by: By = "reward",
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
    ):
        self.k, self.by = at_least("k", k, 1, required=True), one_of("by", by, get_args(By))
        self.loss_mask_key = nested_key(loss_mask_key)
        super().__init__(group_key, rollout_key, *([self.loss_mask_key] if self._measures else []))

    @property
    def _measures(self) -> bool:
        return self.by in ("length", "efficiency")

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        length = torch.zeros(len(batch), dtype=torch.int64, device=device_of(batch))
        if self._measures:
            length = lengths(batch, self.loss_mask_key, reader=type(self).__name__, option="loss_mask_key")
        return self._judge(batch, lambda found: best_of(found, self.k, self.by), length)


class GroupMeanWithin(_OfGroup):
    """Groups whose mean reward is in ``[low, high]``. Reason: ``group_mean``.

    The mean is over the rollouts in the statistics that have a reward; a group without any leaves. It stands
    after FanOutCollapse.

    Args:
        low: least mean that stays.
        high: greatest mean that stays.
        group_key: (N,) or (N, 1) int.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.
    """

    within_groups = True

    reason = "group_mean"
    unit = "group"

    def __init__(
        self,
        *,
        low: float = float("-inf"),
        high: float = float("inf"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
    ):
        if not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high = low, high
        super().__init__(group_key, rollout_key)

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        length = torch.zeros(len(batch), dtype=torch.int64, device=device_of(batch))
        reward = read_written(batch, REWARD, reader=type(self).__name__, writer="FanOutCollapse")
        dtype = reward.dtype  # in which a bound is the reward that it names
        return self._judge(batch, lambda found: self._within(group_mean(found).to(dtype)), length)

    def _within(self, mean: Tensor) -> Tensor:
        return (mean >= self.low) & (mean <= self.high)


def group_mean(rollouts: Rollouts) -> Tensor:
    """(N,) float64: the mean reward of each row's group; NaN where nobody votes. No device read."""
    reward, groups = torch.where(rollouts.votes, rollouts.reward, 0.0), rollouts.groups
    total = exact_sum(
        reward,
        lambda part: sum_by(groups, part),
        peak=lambda: reduce_by(groups, reward.abs(), "amax"),
        terms=sum_by(groups, torch.ones_like(groups)),
    )
    mean = divide(total, sum_by(groups, rollouts.votes.long()))
    return mean.high + mean.low

"""Baselines and scales of the advantage ``(R − b) / s``. Each is one line of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from headrace.transforms.table import Ids, stable_order
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.options import above_zero, at_least, within

Baseline = Literal[
    "mean",
    "leave_one_out",
    "median",
    "length_weighted",
    "best_other",
    "best_of_k",
    "log_mean_exp",
    "batch",
    "column",
    "none",
]
BaselineOf = Literal["group", "votes_only"]
Scale = Literal["group", "leave_one_out", "mad", "batch", "mean", "nonzero", "none"]
EpsMode = Literal["add", "clamp", "skip"]
Singleton = Literal["zero", "raw", "raise"]
Ddof = Literal[0, 1]
Clip = Sequence[float | None]


class Grouped:
    """The rewards of all groups, sorted by group and then by reward, for baselines and scales.

    Values per rollout are (V,), in this order. Values per group are (P,); :meth:`spread` maps them to
    rollouts. Sums add up in this order, so they depend bit for bit only on the rewards of the group.

    Args:
        reward: (V,) float64, one per rollout.
        ids: group ids of the rollouts.
        length: (V,) int64, tokens per rollout, for ``length_weighted``.
        value: (V,) float64, the baseline of each rollout, for ``column``.
        votes_only: (V,) bool, rollouts that vote and do not train, for ``baseline_of="votes_only"``.

    Attributes:
        reward: (V,) R, ascending within each group.
        count: (P,) n, the number of rollouts, in float64; `size` holds the same numbers in int64.
        start: (P,) int64, index of the first rollout of each group; `end` is the index after its last.
        of: (V,) int64, index of each rollout's group.
        order: (V,) int64, index of each rollout in the order that was given (:meth:`unsorted`).
        even: whether all groups have one size.
        length: (V,) int64, or None; likewise `value` and `votes_only`.

    Example:
        >>> g = Grouped(torch.tensor([5.0, 1.0, 3.0]).double(), Ids(torch.tensor([7, 2, 7])))
        >>> g.reward.tolist(), g.count.tolist(), g.unsorted(g.deviation).tolist()
        ([1.0, 3.0, 5.0], [1.0, 2.0], [1.0, 0.0, -1.0])
    """

    def __init__(
        self,
        reward: Tensor,
        ids: Ids,
        length: Tensor | None = None,
        value: Tensor | None = None,
        votes_only: Tensor | None = None,
    ):
        self.size, self.end = ids.count, ids.count.cumsum(0)
        self.count, self.start = ids.count.double(), self.end - ids.count
        together = None if ids.ascending else stable_order(ids.of)
        if together is not None:
            reward = reward.index_select(0, together)
        self.of = ids.of if together is None else ids.of.index_select(0, together)
        self.even = bool(len(reward)) and int(ids.count.max()) * ids.n == len(reward)
        if self.even:
            order = torch.from_numpy(reward.view(ids.n, -1).numpy().argsort(1))
            order = order.add_(self.start.unsqueeze(1)).view(-1)
        else:  # a stable sort takes one pass over keys that almost ascend
            order = torch.from_numpy(keys_of(self.of, reward).argsort(kind="stable"))
        self.reward = reward.index_select(0, order)
        self.order = order if together is None else together.index_select(0, order)
        self.length, self.value, self.votes_only = (
            None if column is None else column.index_select(0, self.order)
            for column in (length, value, votes_only)
        )

    def unsorted(self, values: Tensor) -> Tensor:
        """(V,) values in the original order of the rollouts."""
        return torch.empty_like(values).scatter_(0, self.order, values)

    def spread(self, per_group: Tensor) -> Tensor:
        """Map (P,) values per group to (V,) values per rollout."""
        return per_group.index_select(0, self.of)

    def sum(self, values: Tensor) -> Tensor:
        """(P,) float64, Σ_{j∈g} values_j of (V,) values."""
        if self.even:
            return values.double().view(len(self.count), -1).cumsum(1).select(1, -1)  # cumsum adds in order
        return torch.bincount(self.of, weights=values, minlength=len(self.count))

    @cached_property
    def alone(self) -> Tensor:
        """(V,) bool: whether the rollout is the only one of its group."""
        return self.spread(self.size == 1)

    @cached_property
    def place(self) -> Tensor:
        """(V,) int64: index of each reward in its sorted group, from 0."""
        return torch.arange(len(self.of), device=self.of.device) - self.spread(self.start)

    @cached_property
    def smallest(self) -> Tensor:
        """(P,) min_{j∈g} R_j."""
        return self.reward.index_select(0, self.start)

    @cached_property
    def largest(self) -> Tensor:
        """(P,) max_{j∈g} R_j."""
        return self.reward.index_select(0, self.end - 1)

    @cached_property
    def equal(self) -> Tensor:
        """(P,) bool: all rewards of the group are equal."""
        return self.smallest == self.largest

    @cached_property
    def above(self) -> Tensor:
        """(V,) R_i − min_{j∈g} R_j: its sums lose no digits if rewards are far from 0."""
        return self.reward - self.spread(self.smallest)

    @cached_property
    def deviation(self) -> Tensor:
        """(V,) R_i − mean_{j∈g} R_j, exactly 0 if all rewards are equal."""
        return self.above - self.spread(self.sum(self.above) / self.count)

    @cached_property
    def batch_deviation(self) -> Tensor:
        """(V,) R_i − mean over all rollouts; exactly 0 if all rewards are equal."""
        above = self.reward - (self.reward.amin() if len(self.reward) else 0.0)
        return above - add_up(above) / len(above)

    def std(self, ddof: int) -> Tensor:
        """(P,) std of each group. It is computed from the deviations, because Σ R² − n·mean² would cancel."""
        return (self.sum(self.deviation.square()) / (self.count - ddof).clamp_min(1)).sqrt()

    def batch_std(self, ddof: int) -> Tensor:
        """() std over all rollouts."""
        squares = add_up(self.batch_deviation.square())
        return (squares / max(len(self.reward) - ddof, 1)).sqrt()

    @cached_property
    def median(self) -> Tensor:
        """(P,) median; for an even count the mean of the two middle rewards."""
        low, high = (self.reward[self.start + (self.size - odd) // 2] for odd in (1, 0))
        return low / 2 + high / 2

    @cached_property
    def mad(self) -> Tensor:
        """(P,) median_{j∈g} |R_j − median(R)|."""
        return Grouped((self.reward - self.spread(self.median)).abs(), Ids(self.of)).median

    @cached_property
    def best_other(self) -> Tensor:
        """(V,) max_{j∈g, j≠i} R_j; R_i if the group has one rollout."""
        second = self.reward[(self.end - 2).maximum(self.start)]
        is_last = self.place == self.spread(self.size) - 1
        return torch.where(is_last, self.spread(second), self.spread(self.largest))

    @cached_property
    def worst_other(self) -> Tensor:
        """(V,) min_{j∈g, j≠i} R_j; R_i if the group has one rollout."""
        second = self.reward[(self.start + 1).minimum(self.end - 1)]
        return torch.where(self.place == 0, self.spread(second), self.spread(self.smallest))

    @cached_property
    def of_votes_only(self) -> Grouped:
        """The rollouts that vote only, in the same groups. Each group has at least one such rollout."""
        chosen = cast(Tensor, self.votes_only)
        return Grouped(self.reward[chosen], Ids(self.of[chosen]))

    def running(self, values: Tensor) -> Tensor:
        """(V,) cumulative sum of (V,) values within each group."""
        table = values.new_zeros(len(self.count), int(self.size.max()))
        table[self.of, self.place] = values
        return table.cumsum(1)[self.of, self.place]


# R − b, (V,). All but the last three give exactly 0 in a group with equal rewards.
BASELINES: dict[str, Callable[[Grouped, Formula], Tensor]] = {
    "mean": lambda g, _: g.deviation,
    "leave_one_out": lambda g, _: g.deviation * g.spread(g.count / (g.count - 1).clamp_min(1)),
    "median": lambda g, _: g.reward - g.spread(g.median),
    "length_weighted": lambda g, _: g.deviation - g.spread(length_weighted(g)),
    "best_other": lambda g, _: g.reward - g.best_other,
    "best_of_k": lambda g, formula: above_others_of_k(g, cast(int, formula.k)),
    "log_mean_exp": lambda g, formula: above_log_mean_exp(g, formula.temperature),
    "batch": lambda g, _: g.batch_deviation,
    "column": lambda g, _: g.reward - cast(Tensor, g.value),
    "none": lambda g, _: g.reward,
}
ABSOLUTE = ("batch", "column", "none")  # the baselines that need no group
ONE_A_GROUP = ("mean", "median", "log_mean_exp")  # baselines with one number per group, from rewards alone

# s before ε is added: (P,) per group, () per batch, or (V,) per rollout.
SCALES: dict[str, Callable[[Grouped, int], Tensor] | None] = {
    "group": lambda g, ddof: g.std(ddof),
    "leave_one_out": lambda g, ddof: leave_one_out_std(g, ddof),
    "mad": lambda g, _: g.mad,
    "batch": lambda g, ddof: g.batch_std(ddof),
    "mean": lambda g, _: g.sum(g.reward) / g.count,
    "nonzero": lambda g, _: (g.reward != 0).double().mean(),
    "none": None,
}
SPREADS = ("group", "leave_one_out", "mad")  # scales that are 0 if the rewards of the group are equal
OF_GROUP = ("group", "mad", "mean")  # scales with one number per group
OF_BATCH = ("batch", "nonzero")  # baselines and scales that are computed over all groups of the batch
MAY_BE_0 = ("leave_one_out", "mad")  # scales that can be 0 even if the rewards of the group differ


@dataclass(frozen=True)
class Formula:
    """The options of :func:`group_relative_advantage`, whose docstring has the equations.

    Raises:
        ValueError: an option is out of its range, or two options exclude each other.
    """

    baseline: Baseline = "mean"
    scale: Scale = "group"
    ddof: Ddof = 1
    eps: float = 1e-6
    eps_mode: EpsMode = "add"
    singleton: Singleton = "zero"
    clip: Clip | None = None
    shift: float = 0.0
    k: int | None = None
    baseline_of: BaselineOf = "group"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        within("eps", self.eps, 0)
        low, high = self.clip if self.clip is not None and len(self.clip) == 2 else (None, None)
        bounds = [bound for bound in (low, high) if bound is not None]
        if self.clip is not None and (not bounds or bounds[0] > bounds[-1]):
            raise ValueError(f"clip must be [low, high], one of which may be None; got {self.clip!r}")
        if self.scale in MAY_BE_0 and self.eps_mode != "skip":
            raise ValueError(
                f"scale={self.scale!r} needs eps_mode='skip'; got eps_mode={self.eps_mode!r}. This scale is "
                "often 0 although the rewards of the group differ, and dividing by ε alone makes advantages "
                "of about a million"
            )
        at_least("k", self.k, 2)
        if (self.k is not None) != (self.baseline == "best_of_k"):
            raise ValueError(
                "baseline='best_of_k' needs k, and no other baseline reads it; got "
                f"k={self.k} with baseline={self.baseline!r}"
            )
        if self.baseline_of == "votes_only" and self.baseline not in ONE_A_GROUP:
            raise ValueError(
                f"baseline_of='votes_only' needs a baseline of {', '.join(ONE_A_GROUP)}; got "
                f"baseline={self.baseline!r}"
            )
        above_zero("temperature", self.temperature)
        if self.temperature != 1 and self.baseline != "log_mean_exp":
            raise ValueError(
                "only baseline='log_mean_exp' reads temperature; got "
                f"temperature={self.temperature} with baseline={self.baseline!r}"
            )

    @cached_property
    def is_relative(self) -> bool:
        """Whether the baseline or the scale compares rollouts. A rollout alone then has no advantage."""
        return self.baseline not in ABSOLUTE or self.scale in SPREADS

    @cached_property
    def within_groups(self) -> bool:
        """Whether the advantages of a group depend on this group alone."""
        return self.baseline not in OF_BATCH and self.scale not in OF_BATCH

    @cached_property
    def least_group(self) -> int:
        """The lowest number of rollouts that a group may have."""
        return self.k or (2 if self.singleton == "raise" and self.is_relative else 1)


def advantage_in_groups(g: Grouped, formula: Formula) -> Tensor:
    """The advantage ``(R − b − δ) / s``, clipped: (V,) float64 in the order of :class:`Grouped`."""
    credit = above_baseline(g, formula)
    if formula.shift:
        credit = credit - formula.shift
        if formula.is_relative:
            credit = credit.masked_fill(g.alone, 0.0)
    if (measure := SCALES[formula.scale]) is not None:
        scale = measure(g, formula.ddof)
        divisor = with_eps(scale, formula.eps, formula.eps_mode)
        of_equal = formula.scale == "group" or (formula.scale == "mean" and formula.eps_mode != "skip")
        is_zero = scale == 0 if of_equal else divisor == 0
        divisor = divisor.masked_fill(is_zero, float("inf"))  # the quotient is then 0
        credit = credit / (g.spread(divisor) if formula.scale in OF_GROUP else divisor)
    if formula.scale in MAY_BE_0 and (formula.baseline in ABSOLUTE or formula.shift):
        credit = credit.masked_fill(g.spread(g.equal), 0.0)
    if formula.is_relative and formula.singleton == "raw":
        credit = torch.where(g.alone, g.reward, credit)
    return credit if formula.clip is None else credit.clamp(*formula.clip)


def above_baseline(g: Grouped, formula: Formula) -> Tensor:
    """``R − b``: (V,) float64 in the order of :class:`Grouped`."""
    if formula.baseline_of == "group":
        return BASELINES[formula.baseline](g, formula)
    voting = g.of_votes_only
    level = voting.reward - BASELINES[formula.baseline](voting, formula)
    return g.reward - g.spread(level.index_select(0, voting.start))


def baseline_in_groups(g: Grouped, formula: Formula) -> Tensor:
    """The baseline ``b + δ`` of each rollout: (V,) float64 in the order of :class:`Grouped`."""
    level = g.reward - above_baseline(g, formula)
    if formula.is_relative:
        lone = torch.zeros_like(level) if formula.singleton == "raw" else level
        return torch.where(g.alone, lone, level + formula.shift)
    return level + formula.shift


def keys_of(of: Tensor, reward: Tensor) -> np.ndarray:
    """(V,) sort keys. They ascend by group, and within a group by its float64 rewards."""
    short = reward.float()
    if not torch.equal(short.double(), reward):
        return torch.complex(of.double(), reward).numpy()
    bits = short.numpy().view(np.int32)  # as integers, they ascend like floats, but descend below 0
    return (of.numpy() << 32) + (bits ^ (bits >> 31 & 0x7FFFFFFF))


def with_eps(scale: Tensor, eps: float, eps_mode: str) -> Tensor:
    """The divisor: the scale, to which ε is applied as `eps_mode` says."""
    if eps_mode == "add":
        return scale + eps
    if eps_mode == "clamp":
        return scale.clamp_min(eps)
    return torch.where(scale > 0, scale + eps, 1.0)


def length_weighted(g: Grouped) -> Tensor:
    """(P,) the length-weighted mean minus the plain mean: ``Σ L_j d_j / Σ L_j`` with the deviations d."""
    ids, length = Ids(g.of), cast(Tensor, g.length).double()
    return ids.sum(length * g.deviation) / g.sum(length).clamp_min(1)


def above_others_of_k(g: Grouped, k: int) -> Tensor:
    """(V,) mean of ``max(R_i − max_{j∈K} R_j, 0)`` over all sets K of k − 1 other rollouts of the group.

    This mean is the integral over t < R_i of the fraction of sets whose rewards are all ≤ t. If j of the
    n − 1 other rewards are ≤ t, this fraction is ``C(j, k − 1) / C(n − 1, k − 1)``. The fraction is constant
    between neighbouring rewards, so the integral is a cumulative sum over the sorted rewards.
    """
    others = g.spread(g.size) - 1
    area = torch.where(g.place == 0, 0.0, g.reward - g.reward.roll(1))
    for taken in range(k - 1):
        area = area * (g.place - taken).clamp_min(0) / (others - taken).clamp_min(1)
    return g.running(area)


def above_log_mean_exp(g: Grouped, temperature: float) -> Tensor:
    """(V,) ``R − τ log mean exp(R/τ)``. The largest R is subtracted first, and expm1 and log1p are used.

    The result does not overflow if rewards differ much, and does not cancel if they differ little.
    """
    from_best = g.reward - g.spread(g.largest)
    mean = g.sum(torch.expm1(from_best / temperature)) / g.count
    return from_best - temperature * g.spread(torch.log1p(mean))


def leave_one_out_std(g: Grouped, ddof: int) -> Tensor:
    """(V,): for each rollout, the std of the other rollouts of its group.

    With the deviations d from the group's mean, the sum of squares of the others about their own mean is
    ``Σ d_j² − d_i² · n/(n − 1)``. This difference cancels for a rollout that is far from others that are
    nearly equal. A group has at most one such rollout, the one furthest from the mean, so its sum is computed
    directly. If the others are all equal the std is exactly 0, despite rounding.
    """
    squares, others = g.deviation.square(), (g.count - 1).clamp_min(1)
    rest = g.spread(g.sum(squares)) - squares * g.spread(g.count / others)
    furthest = squares == g.spread(torch.maximum(squares[g.start], squares[g.end - 1]))
    alone = furthest & g.spread(g.sum(furthest.double()) == 1)
    without = g.above - g.spread(g.sum(g.above.masked_fill(alone, 0.0)) / others)
    anew = g.spread(g.sum(without.square().masked_fill(alone, 0.0)))
    divisor = g.spread((g.count - 1 - ddof).clamp_min(1))
    std = (torch.where(alone, anew, rest).clamp_min(0) / divisor).sqrt()
    return std.masked_fill(g.best_other == g.worst_other, 0.0)


def largest_to_square(terms: int, dtype: torch.dtype) -> float:
    """If all numbers are below this bound, the sum of `terms` squared differences does not overflow."""
    return float((torch.finfo(dtype).max / max(terms, 1)) ** 0.5 / 16)

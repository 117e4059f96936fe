"""What an advantage is: the reward less a baseline, over a scale. Each part is a line, combined by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.transforms.options import at_least, one_of, within
from headrace.transforms.ranking import rank_in_groups

from .grouping import Grouping

Baseline = Literal[
    "mean",
    "leave_one_out",
    "median",
    "length_weighted",
    "best_other",
    "best_of_k",
    "log_mean_exp",
    "batch",
    "none",
]
Scale = Literal["group", "leave_one_out", "mad", "batch", "mean", "nonzero", "none"]
EpsMode = Literal["add", "clamp", "skip"]
Singleton = Literal["zero", "raw", "raise"]
Clip = Sequence[float | None]

# The reward less its baseline. In a group whose rewards are all equal, all but the last two give 0.
BASELINES: dict[str, Callable[[Grouping, Formula], Tensor]] = {
    "mean": lambda g, _: g.deviation,
    "leave_one_out": lambda g, _: g.deviation * g.spread(g.count / (g.count - 1).clamp_min(1)),
    "median": lambda g, _: g.reward - g.spread(median(g.reward, g)),
    "length_weighted": lambda g, _: (
        g.deviation - g.spread(g.sum(g.length * g.deviation) / g.add(g.length).clamp_min(1))
    ),
    "best_other": lambda g, _: (g.reward - other_best(g.reward, g)).masked_fill(g.spread(g.count == 1), 0.0),
    "best_of_k": lambda g, formula: above_others_of_k(g, formula.k or 2),
    "log_mean_exp": lambda g, formula: above_log_mean_exp(g, formula.temperature),
    "batch": lambda g, _: g.batch_deviation,
    "none": lambda g, _: g.reward,
}
ABSOLUTE = ("batch", "none")  # the baselines that need no group

# What the difference is divided by, before ε: of the group, of the batch, or of each rollout.
SCALES: dict[str, Callable[[Grouping, int], Tensor] | None] = {
    "group": lambda g, ddof: g.std(ddof),
    "leave_one_out": lambda g, ddof: leave_one_out_std(g, ddof),
    "mad": lambda g, _: median((g.reward - g.spread(median(g.reward, g))).abs(), g),
    "batch": lambda g, ddof: g.batch_std(ddof),
    "mean": lambda g, _: g.sum(g.reward) / g.count,
    "nonzero": lambda g, _: g.add_all((g.reward != 0).double()) / g.rollouts,
    "none": None,
}
SPREADS = ("group", "leave_one_out", "mad")  # of the group: 0 where its rewards are equal
OF_BATCH = ("batch", "nonzero")  # baselines and scales that are measured over all groups of the batch
MAY_BE_0 = ("leave_one_out", "mad")  # and also where they are not


@dataclass(frozen=True)
class Formula:
    """The options of :func:`group_relative_advantage`, which has their equations.

    Raises:
        ValueError: an option is none of its values, or two do not go together.
    """

    baseline: Baseline = "mean"
    scale: Scale = "group"
    ddof: int = 1
    eps: float = 1e-6
    eps_mode: EpsMode = "add"
    singleton: Singleton = "zero"
    clip: Clip | None = None
    shift: float = 0.0
    temperature: float = 1.0
    k: int | None = None

    def __post_init__(self) -> None:
        one_of("baseline", self.baseline, get_args(Baseline))
        one_of("scale", self.scale, get_args(Scale))
        one_of("ddof", self.ddof, (0, 1))
        within("eps", self.eps, 0, float("inf"))
        one_of("eps_mode", self.eps_mode, get_args(EpsMode))
        one_of("singleton", self.singleton, get_args(Singleton))
        check_clip(self.clip)
        if self.scale in MAY_BE_0 and self.eps_mode != "skip":
            raise ValueError(
                "the others of a rollout, or most of a group, are often all equal, and a spread of 0 plus ε "
                f"makes an advantage of a million: scale={self.scale!r} needs eps_mode='skip'; got "
                f"eps_mode={self.eps_mode!r}"
            )
        within("shift", self.shift, float("-inf"), float("inf"))
        within("temperature", self.temperature, torch.finfo(torch.float32).tiny, float("inf"))
        at_least("k", self.k, 2)
        if (self.k is not None) != (self.baseline == "best_of_k"):
            raise ValueError(
                f"k is for baseline='best_of_k', and needed there; got {self.k} for {self.baseline!r}"
            )
        if self.temperature != 1 and self.baseline != "log_mean_exp":
            raise ValueError(f"temperature is for baseline='log_mean_exp'; got {self.baseline!r}")

    @property
    def is_relative(self) -> bool:
        """Whether a group is needed: then equal rewards give 0, and a lone rollout has no advantage."""
        return self.baseline not in ABSOLUTE or self.scale in SPREADS

    @property
    def within_groups(self) -> bool:
        """Whether the advantages of a group are the same whatever else is in the batch."""
        return self.baseline not in OF_BATCH and self.scale not in OF_BATCH

    @property
    def least_group(self) -> int:
        """How many rollouts a group must have."""
        return self.k or (2 if self.singleton == "raise" and self.is_relative else 1)


def advantage_in_groups(grouping: Grouping, formula: Formula) -> Tensor:
    """The formula, in whatever layout; no device read."""
    g, credit = grouping, BASELINES[formula.baseline](grouping, formula)
    if formula.shift:
        credit = credit - formula.shift
        if formula.is_relative:
            credit = credit.masked_fill(g.spread(g.count == 1), 0.0)
    if (spread := SCALES[formula.scale]) is not None:
        divisor = spread(g, formula.ddof)
        softened = with_eps(divisor, formula.eps, formula.eps_mode)
        nothing = softened == 0
        if formula.scale == "group":
            nothing = nothing | (divisor == 0)
        softened = softened.masked_fill_(nothing, float("inf"))  # by which all is divided to 0
        credit = credit / (softened if formula.scale == "leave_one_out" else g.spread(softened))
    if formula.scale in MAY_BE_0 and (formula.baseline in ABSOLUTE or formula.shift):
        credit = credit.masked_fill(g.spread(g.std(0) == 0), 0.0)
    if formula.is_relative and formula.singleton == "raw":
        credit = torch.where(g.spread(g.count == 1), g.reward, credit)
    return credit if formula.clip is None else credit.clamp(*formula.clip)


def with_eps(spread: Tensor, eps: float, eps_mode: str) -> Tensor:
    """What to divide by."""
    if eps_mode == "add":
        return spread + eps
    if eps_mode == "clamp":
        return spread.clamp_min(eps)
    return torch.where(spread > 0, spread + eps, 1.0)


def other_best(values: Tensor, g: Grouping) -> Tensor:
    """For each rollout, the largest of the others' `values` in its group; −∞ where there is none."""
    best = g.max(values)
    is_best = values == g.spread(best)
    runner_up = g.max(values.masked_fill(is_best, float("-inf")))
    of_best = torch.where(g.add(is_best.double()) == 1, runner_up, best)
    return torch.where(is_best, g.spread(of_best), g.spread(best))


def above_others_of_k(g: Grouping, k: int) -> Tensor:
    """For each rollout, by how much it exceeds the best of k − 1 others, in the mean over all such sets.

    It is an integral over the values t below R_i of the share of sets that lie at t or below, which is with
    j of the others there ``C(j, k − 1) / C(n − 1, k − 1)``. That is constant between neighbouring rewards, so
    that a sum along their order is all there is to do.
    """
    reward = g.reward.double().flatten()
    number = torch.broadcast_to(g.spread(g.count), g.reward.shape).flatten()
    ranking = rank_in_groups(g.labels, reward)
    values, others = ranking.at_places(reward), ranking.at_places(number) - 1
    below = ranking.before(ranking.at_places(g.voices)).double()
    place = torch.arange(len(values), device=values.device)
    share = torch.where(place == ranking.start, 0.0, values - values.roll(1))
    for taken in range(k - 1):
        share = share * (below - taken).clamp_min(0) / (others - taken).clamp_min(1)
    return ranking.to_rows(ranking.running(share)).view_as(g.reward).to(g.reward.dtype)


def above_log_mean_exp(g: Grouping, temperature: float) -> Tensor:
    """``R − τ log mean exp(R/τ)``, from the best of the group on, and without a cancellation for large τ."""
    from_best = g.reward - g.spread(g.max(g.reward))
    mean = g.sum(torch.expm1(from_best / temperature)) / g.count
    return from_best - g.spread(temperature * torch.log1p(mean))


def median(values: Tensor, g: Grouping) -> Tensor:
    """The median of `values` per group, each rollout once; of an even number between the middle two."""
    flat, votes = values.flatten(), g.voices
    number = torch.broadcast_to(g.spread(g.count), values.shape).flatten().long()
    ranking = rank_in_groups(g.labels, flat)
    votes, number = ranking.at_places(votes), ranking.at_places(number)
    place, half = ranking.before(votes), ranking.at_places(flat) / 2
    low, high = (torch.where(votes & (place == middle // 2), half, 0.0) for middle in (number - 1, number))
    return g.add(ranking.to_rows(low).view_as(values)) + g.add(ranking.to_rows(high).view_as(values))


def leave_one_out_std(g: Grouping, ddof: int) -> Tensor:
    """For each rollout, the std of the others in its group.

    With d the deviations from the group's mean, the squares of the others about their own mean add up to
    ``Σ d_j² − d_i² · n/(n − 1)``. That loses all digits for a rollout that lies far from others which agree,
    of which a group has one at most: for the rollout furthest from the mean they are added up anew. Where
    the others are all equal the std is exactly 0, from which rounding would keep it.
    """
    squares, others = g.deviation.square(), (g.count - 1).clamp_min(1)
    rest = g.spread(g.sum(squares)) - squares * g.spread(g.count / others)
    furthest = squares == g.spread(g.max(squares))
    alone = furthest & g.spread(g.add(furthest.double()) == 1)
    without = g.reward.masked_fill(alone, 0.0)
    without = g.reward - g.spread(g.sum(without) / others)
    anew = g.spread(g.sum(without.square().masked_fill(alone, 0.0)))
    divisor = g.spread((g.count - 1 - ddof).clamp_min(1))
    std = (torch.where(alone, anew, rest).clamp_min(0) / divisor).sqrt()
    return std.masked_fill(other_best(g.reward, g) == -other_best(-g.reward, g), 0.0)


def check_clip(clip: Clip | None) -> None:
    """Check bounds.

    Raises:
        ValueError: they are not two, both open, or in the wrong order.
    """
    if clip is None:
        return
    low, high = clip if len(clip) == 2 else (None, None)
    bounds = [bound for bound in (low, high) if bound is not None]
    if not bounds or any(bound != bound for bound in bounds) or bounds[0] > bounds[-1]:
        raise ValueError(f"clip must be [low, high], one of which may be null; got {clip!r}")

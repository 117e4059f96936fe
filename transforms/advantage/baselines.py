"""What an advantage is: the reward less a baseline, over a scale. Each part is a line, combined by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.transforms.options import one_of, within

from .grouping import Grouping

Baseline = Literal["mean", "leave_one_out", "length_weighted", "best_other", "batch", "none"]
Scale = Literal["group", "leave_one_out", "batch", "mean", "nonzero", "none"]
EpsMode = Literal["add", "clamp", "skip"]
Singleton = Literal["zero", "raw", "raise"]
Clip = Sequence[float | None]

# The reward less its baseline. In a group whose rewards are all equal, the first four give 0.
BASELINES: dict[str, Callable[[Grouping], Tensor]] = {
    "mean": lambda g: g.deviation,
    "leave_one_out": lambda g: g.deviation * g.spread(g.count / (g.count - 1).clamp_min(1)),
    "length_weighted": lambda g: (
        g.deviation - g.spread(g.sum(g.length * g.deviation) / g.add(g.length).clamp_min(1))
    ),
    "best_other": lambda g: (g.reward - other_best(g.reward, g)).masked_fill(g.spread(g.count == 1), 0.0),
    "batch": lambda g: g.batch_deviation,
    "none": lambda g: g.reward,
}
ABSOLUTE = ("batch", "none")  # the baselines that need no group

# What the difference is divided by, before ε: of the group, of the batch, or of each rollout.
SCALES: dict[str, Callable[[Grouping, int], Tensor] | None] = {
    "group": lambda g, ddof: g.std(ddof),
    "leave_one_out": lambda g, ddof: leave_one_out_std(g, ddof),
    "batch": lambda g, ddof: g.batch_std(ddof),
    "mean": lambda g, _: g.sum(g.reward) / g.count,
    "nonzero": lambda g, _: g.add_all((g.reward != 0).double()) / g.rollouts,
    "none": None,
}
SPREADS = ("group", "leave_one_out")  # of the group: 0 where its rewards are equal


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

    def __post_init__(self) -> None:
        one_of("baseline", self.baseline, get_args(Baseline))
        one_of("scale", self.scale, get_args(Scale))
        one_of("ddof", self.ddof, (0, 1))
        within("eps", self.eps, 0, float("inf"))
        one_of("eps_mode", self.eps_mode, get_args(EpsMode))
        one_of("singleton", self.singleton, get_args(Singleton))
        check_clip(self.clip)
        if self.scale == "leave_one_out" and self.eps_mode != "skip":
            raise ValueError(
                "the others of a rollout are often all equal, and a std of 0 plus ε makes an advantage of a "
                f"million: scale='leave_one_out' needs eps_mode='skip'; got eps_mode={self.eps_mode!r}"
            )

    @property
    def is_relative(self) -> bool:
        """Whether a group is needed: then equal rewards give 0, and a lone rollout has no advantage."""
        return self.baseline not in ABSOLUTE or self.scale in SPREADS


def advantage_in_groups(grouping: Grouping, formula: Formula) -> Tensor:
    """The formula, in whatever layout; no device read."""
    g, credit = grouping, BASELINES[formula.baseline](grouping)
    if (spread := SCALES[formula.scale]) is not None:
        divisor = spread(g, formula.ddof)
        softened = with_eps(divisor, formula.eps, formula.eps_mode)
        nothing = softened == 0
        if formula.scale == "group":
            nothing = nothing | (divisor == 0)
        softened = softened.masked_fill_(nothing, float("inf"))  # by which all is divided to 0
        credit = credit / (softened if formula.scale == "leave_one_out" else g.spread(softened))
    if formula.scale == "leave_one_out" and formula.baseline in ABSOLUTE:
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

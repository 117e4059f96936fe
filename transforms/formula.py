"""What an advantage is: the reward less a baseline, over a scale. Each part is a line, combined by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .base import one_of
from .grouping import Grouping

Baseline = Literal["mean", "leave_one_out", "length_weighted", "best_other", "batch", "none"]
Scale = Literal["group", "leave_one_out", "batch", "mean", "nonzero", "none"]
EpsMode = Literal["add", "clamp", "skip"]
Singleton = Literal["zero", "raw", "raise"]
Clip = Sequence[float | None]

# The reward less its baseline; what a group of equal rewards has for it is 0 for all but the last two.
BASELINES: dict[str, Callable[[Grouping], Tensor]] = {
    "mean": lambda g: g.deviation,
    "leave_one_out": lambda g: g.deviation * (g.count / (g.count - 1).clamp_min(1)),
    "length_weighted": lambda g: g.reward - g.sum(g.length * g.reward) / g.sum(g.length).clamp_min(1),
    "best_other": lambda g: g.reward - other_best(g.reward, g),
    "batch": lambda g: g.reward - g.total(g.reward) / g.rollouts,
    "none": lambda g: g.reward,
}
ABSOLUTE = ("batch", "none")

# What the difference is divided by, before ε.
SCALES: dict[str, Callable[[Grouping, int], Tensor] | None] = {
    "group": lambda g, ddof: g.std(ddof),
    "leave_one_out": lambda g, ddof: leave_one_out_std(g, ddof),
    "batch": lambda g, ddof: g.batch_std(ddof),
    "mean": lambda g, _: g.sum(g.reward) / g.count,
    "nonzero": lambda g, _: g.total((g.reward != 0).to(g.reward.dtype)) / g.rollouts,
    "none": None,
}
SPREADS = ("group", "leave_one_out")  # of the group: 0 where its rewards are equal
SINGLETONS = ("zero", "raw", "raise")
EPS_MODES = ("add", "clamp", "skip")


def advantage_in_groups(
    grouping: Grouping,
    *,
    baseline: str,
    scale: str,
    ddof: int,
    eps: float,
    eps_mode: str,
    singleton: str,
    clip: Clip | None,
) -> Tensor:
    """The formula of :func:`group_relative_advantage`, in whatever layout; no device read."""
    credit = BASELINES[baseline](grouping)
    relative = is_relative(baseline, scale)
    nothing = grouping.equal() if relative else torch.zeros_like(credit, dtype=torch.bool)
    if (spread := SCALES[scale]) is not None:
        divisor = spread(grouping, ddof)
        divisor = with_eps(divisor, eps, eps_mode)
        nothing = nothing | (divisor == 0)
        credit = credit / divisor
        credit.masked_fill_(nothing, 0.0)  # in place: at a million rows an allocation costs as much
    else:
        credit = credit.masked_fill(nothing, 0.0)
    if relative and singleton == "raw":
        credit = torch.where(grouping.count == 1, grouping.reward, credit)
    return credit if clip is None else credit.clamp(*clip)


def is_relative(baseline: str, scale: str) -> bool:
    """Whether a group is needed to say anything: then equal rewards say 0, and a lone rollout nothing."""
    return baseline not in ABSOLUTE or scale in SPREADS


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
    is_best = values == best
    runner_up = g.max(values.masked_fill(is_best, float("-inf")))
    alone_at_top = g.sum(is_best.to(values.dtype)) == 1
    return torch.where(is_best & alone_at_top, runner_up, best)


def leave_one_out_std(g: Grouping, ddof: int) -> Tensor:
    """For each rollout, the std of the others in its group.

    With d the deviations from the group's mean, the squares of the others about their own mean add up to
    ``Σ d_j² − d_i² · n/(n − 1)``. Where the others are all equal the std is exactly 0, the difference not.
    """
    squares = g.deviation.square()
    others = g.sum(squares) - squares * (g.count / (g.count - 1).clamp_min(1))
    std = (others.clamp_min(0) / (g.count - 1 - ddof).clamp_min(1)).sqrt()
    return std.masked_fill(other_best(g.reward, g) == -other_best(-g.reward, g), 0.0)


def check_options(
    *,
    baseline: str,
    scale: str,
    ddof: int,
    eps: float,
    eps_mode: str,
    singleton: str,
    clip: Clip | None,
) -> None:
    """Raise ValueError for an option that is none."""
    one_of("baseline", baseline, tuple(BASELINES))
    one_of("scale", scale, tuple(SCALES))
    one_of("ddof", ddof, (0, 1))
    one_of("eps_mode", eps_mode, EPS_MODES)
    one_of("singleton", singleton, SINGLETONS)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be finite and ≥ 0; got {eps!r}")
    if clip is not None:
        low, high = (bound for bound in clip) if len(clip) == 2 else (None, None)
        if (low is None and high is None) or (low is not None and high is not None and low > high):
            raise ValueError(f"clip must be [low, high], one of which may be null; got {clip!r}")

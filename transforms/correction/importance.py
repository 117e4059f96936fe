"""Importance weights of tokens that another policy sampled than the one that trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from headrace.transforms.ids import Ids, add_up
from headrace.transforms.options import has_effect, one_of, takes_options
from headrace.transforms.rows import Rows
from headrace.transforms.tokens import plain_sum, sum_of_tokens, zero_outside

from .ratios import LARGEST, Policies, Ratios, clamped, over_units

Level = Literal["token", "sequence", "mean"]
Bound = Literal["truncate", "zero", "none"]
Normalise = Literal["none", "batch"]
NOTHING = 1e-8  # a mean weight at or below it: there is nothing to normalise


@takes_options
def importance_weight(
    log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    bound: Bound = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
    normalise: Normalise = "none",
) -> Tensor:
    """Weigh tokens by how much more likely the trainer's policy π_old makes them than μ, which sampled.

    With ρ_t = π_old / μ of a token, over the L tokens of its row in the mask::

        token     w_t = ρ_t                  log ρ_t is clamped to ±20
        sequence  w_t = Π_u ρ_u              its log, the sum, is clamped to ±20
        mean      w_t = (Π_u ρ_u)^(1/L)      its log, the mean, is clamped to ±20

        truncate  min(w, high), and max(·, low) if low is given    TIS, Espeholt et al., arXiv:1802.01561
        zero      w if low ≤ w ≤ high, else 0                      IcePop, arXiv:2510.18855
        none      w

        batch     w / mean(w), of tokens, or of rows that have a token where the level is not token

    Bounds are inclusive, and None is open. What was zeroed counts in the mean; a mean of at most 1e-8 changes
    nothing. Computed in float64 and rounded once, by sums that do not depend on the order of rows.

    Args:
        log_prob: (N, T) float, log π_old: the trainer's policy at the start of the step.
        sampler_log_prob: (N, T) float, log μ: the policy that sampled.
        mask: (N, T) bool; outside of it nothing is read, and the weight is 0.
        level: over what ρ is multiplied.
        bound: what happens to weights outside of `low` and `high`.
        low: ≥ 0, or None.
        high: > 0, or None.
        normalise: by what the weights are divided.

    Returns:
        (N, T) ≥ 0, in the dtype of the log-probabilities, at least float32, without a gradient.

    Raises:
        ValueError: an option that is none.
        BatchError: shapes differ; a log-probability in the mask is not finite, with its rows.

    Example:
        >>> trainer, sampler = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-1.5, -3.0, 0.0]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> importance_weight(trainer, sampler, mask)
        tensor([[1.6487, 2.0000, 0.0000]])
        >>> importance_weight(trainer, sampler, mask, level="sequence", bound="none")
        tensor([[12.1825, 12.1825,  0.0000]])
    """
    formula = WeightFormula(level, bound, low, high, normalise)
    policies = Policies(log_prob, sampler_log_prob, mask)
    rows = Rows.of(row=torch.arange(len(mask)))
    found = rows.measured(**policies.counted(), **policies.each_row(formula.of_rows))
    policies.require_known(rows, found)
    weighed = formula.weigh_rows(found, None, policies.dtype)
    of_row = None if weighed.of_row is None else weighed.of_row.to(mask.device)
    return policies.each_row(
        lambda ratio, of_row: {"weight": formula.weight(ratio, of_row, weighed.mean)}, of_row
    )["weight"]


class Importance(NamedTuple):
    """What the rows of a batch say of the weights of their tokens."""

    of_row: Tensor | None
    """(M,) the one weight of each row's tokens, before it is normalised; None where each has its own."""
    out: Tensor | None
    """(M,) bool: the ratio behind it is out of bounds."""
    mean: float
    """By which all weights are divided."""


@dataclass(frozen=True)
class WeightFormula:
    """The options of :func:`importance_weight`, and its arithmetic: of tokens, then of rows, then of tokens.

    Raises:
        ValueError: an option is none of its values; bounds leave nothing between them.
    """

    level: Level
    bound: Bound
    low: float | None
    high: float | None
    normalise: Normalise = "none"

    def __post_init__(self) -> None:
        one_of("level", self.level, get_args(Level))
        one_of("bound", self.bound, get_args(Bound))
        one_of("normalise", self.normalise, get_args(Normalise))
        check_bounds(self.low, self.high)
        bounded = self.low is not None or self.high is not None
        has_effect(importance_weight, "bound", self.bound, bounded or self.bound == "none", "low or high")

    @property
    def most(self) -> float:
        """No weight of a token is larger, before it is normalised."""
        high = math.exp(LARGEST) if self.high is None or self.bound == "none" else self.high
        return 1.01 * max(high, self.low or 0.0)  # and what rounding adds

    def of_rows(self, ratio: Ratios) -> dict[str, Tensor]:
        """(B,) each: what weights follow from, of the tokens of each row."""
        if self.level != "token":
            return {"total": sum_of_tokens(ratio.token)}
        if self.normalise == "none":
            return {}
        return {"weight": sum_of_tokens(self.weight(ratio, None, 1.0))}

    def measured(self, ratio: Ratios) -> dict[str, Tensor]:
        """(B,) each: what is measured of the tokens of each row."""
        if self.level != "token":
            return ratio.of_rows()
        ratios = ratio.clamped.exp().to(ratio.dtype)  # `excess + 1` would lose a small one
        out = outside(ratios, self.low, self.high) & ratio.mask
        weight = zero_outside(self.bounded(ratios), ratio.mask)
        found = {"largest": largest(weight), "outside": out.sum(-1)}
        weight = weight.double()
        return found | ratio.of_rows() | {"weight": plain_sum(weight), "squares": plain_sum(weight.square())}

    def weigh_rows(self, found: Mapping[str, Tensor], rollouts: Ids | None, dtype: torch.dtype) -> Importance:
        """What follows from all rows.

        Args:
            found: (M,) float64 by name, of :meth:`of_rows` and :meth:`Policies.counted`.
            rollouts: which rows are one sequence; None: each row is.
            dtype: to which weights are rounded.
        """
        tokens, of_row, out, mean = found["tokens"], None, None, 1.0
        if self.level != "token":
            log, length = over_units(found["total"], rollouts), over_units(tokens, rollouts)
            log = log / length.clamp_min(1) if self.level == "mean" else log
            ratio = clamped(log).exp().to(dtype)  # of each sequence
            of_row, out = self.bounded(ratio).double(), outside(ratio, self.low, self.high)
        if self.normalise == "batch" and len(tokens):
            weights = found["weight"] if of_row is None else of_row * (length > 0)
            count = tokens.sum() if of_row is None else (length > 0).sum()
            found_mean = float(add_up(weights) / count.clamp_min(1))
            mean = found_mean if found_mean > NOTHING else 1.0
        if rollouts is not None and of_row is not None and out is not None:
            of_row, out = rollouts.spread(of_row), rollouts.spread(out)
        return Importance(of_row, out, mean)

    @staticmethod
    def sums(found: Mapping[str, Tensor], weighed: Importance) -> dict[str, Tensor]:
        """(M,) float64: over the tokens of each row the sum of weights and of their squares, the largest, and
        how many ratios are out of bounds (``weight``, ``squares``, ``largest``, ``outside``).

        Args:
            found: (M,) by name, of :meth:`measured` and :meth:`Policies.counted`.
            weighed: by :meth:`weigh_rows`.
        """
        sums, tokens, weight = dict(found), found["tokens"], weighed.of_row
        if weight is not None and weighed.out is not None:
            sums["weight"], sums["squares"] = tokens * weight, tokens * weight.square()
            sums["largest"], sums["outside"] = weight * (tokens > 0), tokens * weighed.out
        for name, power in (("weight", 1), ("squares", 2), ("largest", 1)):
            sums[name] = sums[name] / weighed.mean**power
        return sums

    def weight(self, ratio: Ratios, of_row: Tensor | None, mean: float) -> Tensor:
        """(B, T) weights, 0 out of the mask.

        Args:
            ratio: of tokens.
            of_row: (B,) the weight of each row, where its tokens have one.
            mean: by which weights are divided.
        """
        if of_row is None:
            weight = self.bounded(ratio.log().clamp_(-LARGEST, LARGEST).exp_().to(ratio.dtype))
        else:
            weight = of_row.to(ratio.dtype).unsqueeze(-1).repeat(1, ratio.mask.shape[1])
        if mean != 1:
            weight = (weight.double() / mean).to(ratio.dtype)
        return zero_outside(weight, ratio.mask)

    def bounded(self, ratio: Tensor) -> Tensor:
        """Ratios with what `bound` makes of those outside."""
        if self.bound == "none" or (self.low is None and self.high is None):
            return ratio
        if self.bound == "truncate":
            return ratio.clamp(self.low, self.high)
        return zero_outside(ratio.clone(), ~outside(ratio, self.low, self.high))


def check_bounds(low: float | None, high: float | None) -> None:
    """Check bounds of a ratio.

    Raises:
        ValueError: `low` is below 0 or above `high`, or `high` is not above 0.
    """
    if not (low is None or low >= 0) or not (high is None or high > 0):
        raise ValueError(f"bounds of a ratio: low ≥ 0 and high > 0, or None; got {low!r} and {high!r}")
    if low is not None and high is not None and not low <= high:
        raise ValueError(f"low must be ≤ high; got {low!r} and {high!r}")


def outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bool: below `low` or above `high`, in the ratio's own precision."""
    if low is None and high is None:
        return torch.zeros_like(ratio, dtype=torch.bool)
    return ratio != ratio.clamp(low, high)


def largest(values: Tensor) -> Tensor:
    """(B,) of (B, T) ≥ 0; NaN where one is."""
    return values.amax(-1) if values.shape[-1] else values.sum(-1)

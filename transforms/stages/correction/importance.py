"""Importance weights: corrections for tokens that were sampled by another policy than the one that trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headrace.transforms.table import Ids, Rows
from headrace.transforms.table.options import has_effect, takes_options
from headrace.transforms.table.tokens import plain_sum, sum_of_tokens, zero_outside

from .ratios import LARGEST, Policies, Ratios, clamped, over_units

Level = Literal["token", "sequence", "mean"]
Bound = Literal["truncate", "zero", "none"]


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
) -> Tensor:
    """Compute importance weights π_old / μ. μ is the policy that sampled, π_old the trainer's policy.

    With ρ_t = π_old / μ of a token, and the L tokens of its row in the mask::

        token     w_t = ρ_t                  log ρ_t is clamped to ±20
        sequence  w_t = Π_u ρ_u              its log, the sum, is clamped to ±20
        mean      w_t = (Π_u ρ_u)^(1/L)      its log, the mean, is clamped to ±20

        truncate  min(w, high), and max(·, low) if low is given    TIS, Espeholt et al., arXiv:1802.01561
        zero      w if low ≤ w ≤ high, else 0                      IcePop, arXiv:2510.18855
        none      w

    Bounds are inclusive; None means no bound. Weights are computed in float64 and rounded once. Sums do not
    depend on the row order.

    Args:
        log_prob: (N, T) float, log π_old: the trainer's policy at the start of the step.
        sampler_log_prob: (N, T) float, log μ: the policy that sampled.
        mask: (N, T) bool; tokens outside of it are not read and get weight 0.
        level: how ρ is reduced, see the equations.
        bound: what happens to weights outside of `low` and `high`, see the equations.
        low: lower bound ≥ 0, or None.
        high: upper bound > 0, or None.

    Returns:
        (N, T) ≥ 0, in the dtype of the log-probabilities, at least float32, without a gradient.

    Raises:
        ValueError: an option has an unknown value.
        BatchError: shapes differ, or a log-probability in the mask is not finite; the message lists the rows.

    Example:
        >>> trainer, sampler = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-1.5, -3.0, 0.0]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> importance_weight(trainer, sampler, mask)
        tensor([[1.6487, 2.0000, 0.0000]])
        >>> importance_weight(trainer, sampler, mask, level="sequence", bound="none")
        tensor([[12.1825, 12.1825,  0.0000]])
    """
    formula = WeightFormula(level, bound, low, high)
    policies = Policies(log_prob, sampler_log_prob, mask)
    rows = Rows.of(row=torch.arange(len(mask)))
    found = rows.measured(**policies.counted(), **policies.each_row(formula.of_rows))
    policies.require_known(rows, found)
    weighed = formula.weigh_rows(found, None, policies.dtype)
    of_row = None if weighed.of_row is None else weighed.of_row.to(mask.device)
    return policies.each_row(lambda ratio, of_row: {"weight": formula.weight(ratio, of_row)}, of_row)[
        "weight"
    ]


class Importance(NamedTuple):
    """Weights per row; None if each token has its own."""

    of_row: Tensor | None
    """(M,) weight of all tokens of each row."""
    out: Tensor | None
    """(M,) bool: the row's ratio is out of bounds."""


@dataclass(frozen=True)
class WeightFormula:
    """The options of :func:`importance_weight`, and its arithmetic.

    Raises:
        ValueError: a bound is below 0 or has no effect, or `low` is greater than `high`.
    """

    level: Level
    bound: Bound
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)
        bounded = self.low is not None or self.high is not None
        has_effect(importance_weight, "bound", self.bound, bounded or self.bound == "none", "low or high")

    @property
    def most(self) -> float:
        """An upper bound of the weight of a token."""
        high = math.exp(LARGEST) if self.high is None or self.bound == "none" else self.high
        return 1.01 * max(high, self.low or 0.0)  # 1.01 covers rounding

    def of_rows(self, ratio: Ratios) -> dict[str, Tensor]:
        """(B,) each: sums over the tokens of each row from which :meth:`weigh_rows` computes weights."""
        return {} if self.level == "token" else {"total": sum_of_tokens(ratio.token)}

    def measured(self, ratio: Ratios) -> dict[str, Tensor]:
        """(B,) each: sums over the tokens of each row, for the metrics."""
        if self.level != "token":
            return ratio.of_rows()
        ratios = ratio.clamped.exp().to(ratio.dtype)  # `excess + 1` would round small ratios
        out = outside(ratios, self.low, self.high) & ratio.mask
        weight = zero_outside(self.bounded(ratios), ratio.mask)
        found = {"largest": largest(weight), "outside": out.sum(-1)}
        weight = weight.double()
        return found | ratio.of_rows() | {"weight": plain_sum(weight), "squares": plain_sum(weight.square())}

    def weigh_rows(self, found: Mapping[str, Tensor], rollouts: Ids | None, dtype: torch.dtype) -> Importance:
        """Compute the weights per row.

        Args:
            found: by name, (M,) float64, from :meth:`of_rows` and :meth:`Policies.counted`.
            rollouts: the rows of a rollout are one sequence; None: each row is a sequence.
            dtype: dtype to which weights are rounded.
        """
        of_row = out = None
        if self.level != "token":
            log, length = over_units(found["total"], rollouts), over_units(found["tokens"], rollouts)
            log = log / length.clamp_min(1) if self.level == "mean" else log
            ratio = clamped(log).exp().to(dtype)  # one per sequence
            of_row, out = self.bounded(ratio).double(), outside(ratio, self.low, self.high)
            if rollouts is not None:
                of_row, out = rollouts.spread(of_row), rollouts.spread(out)
        return Importance(of_row, out)

    @staticmethod
    def sums(found: Mapping[str, Tensor], weighed: Importance) -> dict[str, Tensor]:
        """(M,) float64 each, over the tokens of each row: ``weight``, ``squares``, ``largest``, ``outside``.

        These are the sum of weights, the sum of their squares, the largest weight, and the number of ratios
        that are out of bounds.

        Args:
            found: by name, (M,), from :meth:`measured` and :meth:`Policies.counted`.
            weighed: result of :meth:`weigh_rows`.
        """
        sums, tokens, weight = dict(found), found["tokens"], weighed.of_row
        if weight is not None and weighed.out is not None:
            sums["weight"], sums["squares"] = tokens * weight, tokens * weight.square()
            sums["largest"], sums["outside"] = weight * (tokens > 0), tokens * weighed.out
        return sums

    def weight(self, ratio: Ratios, of_row: Tensor | None) -> Tensor:
        """(B, T) weights, 0 out of the mask.

        Args:
            ratio: ratios of the tokens.
            of_row: (B,) weight of all tokens of each row; None: each token has its own weight.
        """
        if of_row is None:
            weight = self.bounded(ratio.log().clamp_(-LARGEST, LARGEST).exp_().to(ratio.dtype))
        else:
            weight = of_row.to(ratio.dtype).unsqueeze(-1).repeat(1, ratio.mask.shape[1])
        return zero_outside(weight, ratio.mask)

    def bounded(self, ratio: Tensor) -> Tensor:
        """Apply `bound` to ratios."""
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
        raise ValueError(f"bounds of a ratio must be low ≥ 0 and high > 0, or None; got {low!r} and {high!r}")
    if low is not None and high is not None and not low <= high:
        raise ValueError(f"low must be ≤ high; got {low!r} and {high!r}")


def outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bool: the ratio is below `low` or above `high`, compared in the ratio's dtype."""
    if low is None and high is None:
        return torch.zeros_like(ratio, dtype=torch.bool)
    return ratio != ratio.clamp(low, high)


def largest(values: Tensor) -> Tensor:
    """(B,) the largest of (B, T) values ≥ 0, 0 if T is 0; NaN if a value is NaN."""
    return values.amax(-1) if values.shape[-1] else values.sum(-1)

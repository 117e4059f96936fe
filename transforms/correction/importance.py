"""Importance weights of tokens that another policy sampled than the one that trains."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from headrace.transforms.checks import enforce
from headrace.transforms.options import one_of

from .ratios import Ratios, clamped, finite_rule, sum_of_rows, total_of

Level = Literal["token", "sequence", "mean"]
Bound = Literal["truncate", "zero", "none"]
Normalise = Literal["none", "batch"]
NOTHING = 1e-8  # a mean weight at or below it: there is nothing to normalise


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
    nothing. Computed in float64 and rounded once, by sums that do not depend on the order of rows. One device
    read, for the check.

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
    check_weights(level, bound, low, high, normalise)
    ratio = Ratios(log_prob, sampler_log_prob, mask)
    enforce([finite_rule(ratio, log_prob, sampler_log_prob)])
    weight = bounded(ratio_of(ratio, level), bound, low, high)
    if normalise == "batch":
        weight = (weight.double() / mean_of(share_of_mean(weight, ratio, level))).to(weight.dtype)
    return torch.where(mask, weight, 0.0)


def check_weights(
    level: str, bound: str, low: float | None, high: float | None, normalise: str = "none"
) -> None:
    """Check the options of a weight.

    Raises:
        ValueError: an option that is none; bounds that leave nothing between them.
    """
    one_of("level", level, get_args(Level))
    one_of("bound", bound, get_args(Bound))
    one_of("normalise", normalise, get_args(Normalise))
    check_bounds(low, high)


def check_bounds(low: float | None, high: float | None) -> None:
    """Check bounds of a ratio.

    Raises:
        ValueError: `low` is below 0 or above `high`, `high` is not above 0, or one of them is NaN.
    """
    if not (low is None or low >= 0) or not (high is None or high > 0):
        raise ValueError(f"bounds of a ratio: low ≥ 0 and high > 0, or None; got {low!r} and {high!r}")
    if low is not None and high is not None and not low <= high:
        raise ValueError(f"low must be ≤ high; got {low!r} and {high!r}")


def ratio_of(ratio: Ratios, level: str, total: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
    """The ratios at a level, before any bound: (N, T) of tokens, (N, 1) of rows; no mask is applied.

    Args:
        ratio: of tokens.
        level: token, sequence, mean.
        total: (N,) float64, log ρ added up over the row's rollout; None: over the row.
        tokens: (N,) int64, of the row's rollout; None: of the row.
    """
    if level == "token":
        return ratio.clamped.exp().to(ratio.dtype)  # `excess + 1` would lose a small one
    log = ratio.total if total is None else total
    if level == "mean":
        log = log / (ratio.tokens if tokens is None else tokens).clamp_min(1)
    return clamped(log).exp().to(ratio.dtype).unsqueeze(-1)


def outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bool: below `low` or above `high`, in the ratio's own precision."""
    below = torch.zeros_like(ratio, dtype=torch.bool) if low is None else ratio < low
    return below if high is None else below | (ratio > high)


def bounded(ratio: Tensor, bound: str, low: float | None, high: float | None) -> Tensor:
    """Ratios with what `bound` makes of those outside."""
    if bound == "none" or (low is None and high is None):
        return ratio
    return ratio.clamp(low, high) if bound == "truncate" else ratio.masked_fill(outside(ratio, low, high), 0)


class Share(NamedTuple):
    """What a row has in the mean weight."""

    weight: Tensor
    """(N,) float64."""
    count: Tensor
    """(N,) int64."""


def share_of_mean(weight: Tensor, ratio: Ratios, level: str, once: Tensor | None = None) -> Share:
    """Each token's weight once, or where rows have one weight, that of each row or rollout with a token once.

    Args:
        weight: (N, T) of tokens, (N, 1) of rows.
        ratio: of tokens.
        level: token, sequence, mean.
        once: (N,) bool, one row of each rollout that has a token; None: each row is one.
    """
    if level == "token":
        return Share(sum_of_rows(torch.where(ratio.mask, weight.double(), 0.0)), ratio.tokens)
    count = ratio.tokens > 0 if once is None else once
    return Share(weight[:, 0].double() * count, count.long())


def mean_of(share: Share) -> Tensor:
    """Scalar float64 to divide weights by: their mean, 1 where that is next to nothing."""
    mean = total_of(share.weight) / share.count.sum().clamp_min(1)
    return torch.where(mean > NOTHING, mean, 1.0)

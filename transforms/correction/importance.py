"""Importance weights of tokens that another policy sampled than the one that trains."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.transforms.checks import enforce
from headrace.transforms.options import one_of
from headrace.transforms.tokens import in_blocks

from .policies import Policies
from .ratios import Ratios, clamped, sum_of_rows, total_of

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
    policies = Policies(log_prob, sampler_log_prob, mask)
    rows = policies.each_row(sums_of_ratios)
    enforce([policies.rule(rows["wrong"])])
    of_rows = ratio_of_rows(level, rows["total"], rows["tokens"], policies.dtype)
    made = policies.each_row(partial(weigh, bound=bound, low=low, high=high), of_rows)
    if normalise == "none":
        return made["weight"]
    return normalised(made["weight"], mean_of(**share_of_mean(level, made["weight"], rows["tokens"])))


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
        ValueError: `low` is below 0 or above `high`, `high` is not above 0, or one of them is no number.
    """
    numbers = all(bound is None or isinstance(bound, int | float) for bound in (low, high))
    if not numbers or not (low is None or low >= 0) or not (high is None or high > 0):
        raise ValueError(f"bounds of a ratio: low ≥ 0 and high > 0, or None; got {low!r} and {high!r}")
    if low is not None and high is not None and not low <= high:
        raise ValueError(f"low must be ≤ high; got {low!r} and {high!r}")


def sums_of_ratios(ratio: Ratios) -> dict[str, Tensor]:
    """(N,) each: log ρ added up over a row, its tokens, and whether one of them is wrong."""
    return {"total": ratio.total, "tokens": ratio.tokens, "wrong": ratio.wrong.any(-1)}


def ratio_of_rows(level: str, total: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
    """(N, 1) the ratios of rows, before any bound; None where each token has its own.

    Args:
        level: token, sequence, mean.
        total: (N,) float64, log ρ added up over the row, or its rollout.
        tokens: (N,) int64, of the same.
        dtype: to which they are rounded.
    """
    if level == "token":
        return None
    log = total / tokens.clamp_min(1) if level == "mean" else total
    return clamped(log).exp().to(dtype).unsqueeze(-1)


def outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bool: below `low` or above `high`, in the ratio's own precision."""
    below = torch.zeros_like(ratio, dtype=torch.bool) if low is None else ratio < low
    return below if high is None else below | (ratio > high)


def bounded(ratio: Tensor, bound: str, low: float | None, high: float | None) -> Tensor:
    """Ratios with what `bound` makes of those outside."""
    if bound == "none" or (low is None and high is None):
        return ratio
    return ratio.clamp(low, high) if bound == "truncate" else ratio.masked_fill(outside(ratio, low, high), 0)


def weigh(
    ratio: Ratios, of_rows: Tensor | None, *, bound: str, low: float | None, high: float | None
) -> dict[str, Tensor]:
    """(N, T) weights, 0 out of the mask; (N,) float64, how many ratios are out of bounds.

    Args:
        ratio: of tokens.
        of_rows: (N, 1), those of :func:`ratio_of_rows`.
        bound: what becomes of those outside.
        low: of the ratio.
        high: of the ratio.
    """
    # `excess + 1` would lose a small one
    found = ratio.clamped.exp().to(ratio.dtype) if of_rows is None else of_rows
    weight = torch.where(ratio.mask, bounded(found, bound, low, high), 0.0)
    return {"weight": weight, "outside": (outside(found, low, high) & ratio.mask).sum(-1).double()}


def share_of_mean(level: str, weight: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """What rows have in the mean weight: (N,) float64 `weight`, (N,) int64 `count`.

    Each token's weight counts once, or where rows have one weight, that of each row with a token.

    Args:
        level: token, sequence, mean.
        weight: (N, T), 0 out of the mask.
        tokens: (N,) int64, in the mask.
    """
    if level == "token":
        return {
            "weight": in_blocks(lambda some: {"sum": sum_of_rows(some.double())}, weight)["sum"],
            "count": tokens,
        }
    return {"weight": weight_of_rows(weight), "count": (tokens > 0).long()}


def weight_of_rows(weight: Tensor) -> Tensor:
    """(N,) float64: the weight that the tokens of a row in the mask have in common; 0 where it has none."""
    return weight.amax(-1).double() if weight.shape[-1] else weight.sum(-1).double()


def mean_of(weight: Tensor, count: Tensor) -> Tensor:
    """Scalar float64 to divide weights by: their mean, 1 where that is next to nothing."""
    mean = total_of(weight) / count.sum().clamp_min(1)
    return torch.where(mean > NOTHING, mean, 1.0)


def normalised(weight: Tensor, mean: Tensor) -> Tensor:
    """(N, T) weights over their mean."""
    return in_blocks(lambda some: {"weight": (some.double() / mean).to(some.dtype)}, weight)["weight"]

"""How far two recorded policies are apart, of tokens and of rows."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.transforms.checks import enforce
from headrace.transforms.ids import reduce_by
from headrace.transforms.options import one_of

from .policies import Policies
from .ratios import Ratios, over_units, sum_of_rows

Estimator = Literal["k1", "k2", "k3"]
Over = Literal["token", "sum", "mean", "max"]


def divergence(
    log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    estimator: Estimator = "k3",
    level: Over = "token",
) -> Tensor:
    """Estimate KL(μ ‖ π_old) from what μ sampled.

    With d = log μ − log π_old of a token, clamped to ±20 (http://joschu.net/blog/kl-approx.html)::

        k1  d
        k2  d² / 2
        k3  e^(−d) − 1 + d

    Of a row the ``sum``, ``mean`` or ``max`` over its tokens in the mask, never clamped; 0 of a row that has
    none. Computed in float64 and rounded once. One device read, for the check.

    Args:
        log_prob: (N, T) float, log π_old: the trainer's policy at the start of the step.
        sampler_log_prob: (N, T) float, log μ: the policy that sampled.
        mask: (N, T) bool; outside of it nothing is read, and a token's divergence is 0.
        estimator: k1, k2, k3.
        level: of each token, or over those of a row.

    Returns:
        (N, T) for ``token``, else (N,), in the dtype of the log-probabilities, at least float32, without a
        gradient.

    Raises:
        ValueError: an option that is none.
        BatchError: shapes differ; a log-probability in the mask is not finite, with its rows.

    Example:
        >>> trainer, sampler = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
        >>> mask = torch.tensor([[True, True]])
        >>> divergence(trainer, sampler, mask, estimator="k1").tolist()
        [[-0.5, 1.0]]
        >>> divergence(trainer, sampler, mask, estimator="k2", level="max").tolist()
        [0.5]
    """
    check_divergence(estimator, level)
    policies = Policies(log_prob, sampler_log_prob, mask)

    def of_some(ratio: Ratios) -> dict[str, Tensor]:
        found = of_tokens(ratio, estimator)
        if level != "token":
            found = over_rows(row_part(found, ratio, level), ratio.tokens, None, level)
        return {"found": found.to(ratio.dtype), "wrong": ratio.wrong.any(-1)}

    made = policies.each_row(of_some)
    enforce([policies.rule(made["wrong"])])
    return made["found"]


def check_divergence(estimator: str, level: str) -> None:
    """Check the options of a divergence.

    Raises:
        ValueError: one of them is none.
    """
    one_of("estimator", estimator, get_args(Estimator))
    one_of("level", level, get_args(Over))


def of_tokens(ratio: Ratios, estimator: str) -> Tensor:
    """(N, T) float64, 0 out of the mask."""
    if estimator == "k1":
        return -ratio.clamped
    return ratio.clamped.square() / 2 if estimator == "k2" else ratio.excess - ratio.clamped


def row_part(values: Tensor, ratio: Ratios, level: str) -> Tensor:
    """(N,) float64: what a row brings into its rollout, its sum or the largest."""
    return _peaks(values, ratio.mask) if level == "max" else sum_of_rows(values)


def over_rows(part: Tensor, tokens: Tensor, first: Tensor | None, level: str) -> Tensor:
    """(N,) float64: the sum, mean or largest over the tokens of each row's rollout; 0 of none.

    Args:
        part: (N,) float64, of rows (:func:`row_part`).
        tokens: (N,) int64, of the rollout.
        first: (N,) int64, the first row of each row's rollout; None: each row is one.
        level: sum, mean, max.
    """
    if level == "max":
        peaks = part if first is None else reduce_by(first, part, "amax")
        return torch.where(peaks == float("-inf"), 0.0, peaks)
    total = over_units(part, first)
    return total if level == "sum" else total / tokens.clamp_min(1)


def _peaks(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], float("-inf"))
    return values.masked_fill(~mask, float("-inf")).amax(-1)

"""What the weights of a batch say of themselves, and how far its two policies are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.transforms.ids import is_first

from .divergence import of_tokens
from .importance import sums_of_ratios
from .ratios import Ratios, clamped, over_units


def sums_of_rows(ratio: Ratios) -> dict[str, Tensor]:
    """What each row adds to the numbers of the batch, of its ratios; (N,) each."""
    return {
        **sums_of_ratios(ratio),
        "k1": of_tokens(ratio, "k1").sum(-1),
        "k3": of_tokens(ratio, "k3").sum(-1),
        "chi2": (ratio.excess * (ratio.excess + 2)).sum(-1),
    }


def sums_of_weights(weight: Tensor) -> dict[str, Tensor]:
    """The same of its weights (N, T), 0 out of the mask; (N,) float64 each."""
    w = weight.double()
    return {
        "weight": w.sum(-1),
        "squares": w.square().sum(-1),
        "largest": w.amax(-1) if w.shape[-1] else w.sum(-1),
    }


def diagnose(rows: Mapping[str, Tensor], first: Tensor | None) -> dict[str, Tensor]:
    """The numbers of a batch, by token and by sequence: a row, or a rollout.

    With w the weights of n tokens, or each sequence's mean of them, d = log μ − log π_old of a token or added
    up over a sequence, clamped to ±20, and ρ = e^(−d)::

        weight_mean    Σ w / n                       weight_max  the largest w
        ess            (Σ w)² / (n Σ w²)             the effective sample size, a share; 0 where no weight is
        out_of_bounds  share outside of the bounds   of a sequence the share of its tokens
        kl_k1, kl_k3   Σ d / n, Σ (ρ − 1 + d) / n    estimates of KL(μ ‖ π_old)
        chi2           Σ ρ² / n − 1                  of χ²(π_old ‖ μ)

    Sequences without a token in the loss are in none of them.

    Args:
        rows: (M,) by name, of :func:`sums_of_rows` and :func:`sums_of_weights`, and how many tokens are
            `outside`.
        first: (M,) int64, the first row of each row's rollout; None: a sequence is a row.
    """
    size = rows["tokens"].sum()
    by_token = {
        "weight_mean": _share(rows["weight"].sum(), size),
        "weight_max": _largest(rows["largest"]),
        "ess": _effective(rows["weight"].sum(), rows["squares"].sum(), size),
        "out_of_bounds": _share(rows["outside"].sum(), size),
    }
    tokens = over_units(rows["tokens"], first)
    there = (tokens > 0) & (True if first is None else is_first(first))
    size = there.sum()
    weight = over_units(rows["weight"], first) / tokens.clamp_min(1) * there
    outside = over_units(rows["outside"], first) / tokens.clamp_min(1) * there
    by_sequence = {
        "weight_mean": _share(weight.sum(), size),
        "weight_max": _largest(weight),
        "ess": _effective(weight.sum(), weight.square().sum(), size),
        "out_of_bounds": _share(outside.sum(), size),
    }
    return _both(by_token, by_sequence) | distance(rows, first)


def distance(rows: Mapping[str, Tensor], first: Tensor | None) -> dict[str, Tensor]:
    """``kl_k1``, ``kl_k3`` and ``chi2`` of :func:`diagnose`, by token and by sequence, which need no weights.

    Args:
        rows: (M,) by name, of :func:`sums_of_rows`.
        first: (M,) int64, the first row of each row's rollout; None: a sequence is a row.
    """
    by_token = {
        {"k1": "kl_k1", "k3": "kl_k3"}.get(name, name): _share(rows[name].sum(), rows["tokens"].sum())
        for name in ("k1", "k3", "chi2")
    }
    there = (over_units(rows["tokens"], first) > 0) & (True if first is None else is_first(first))
    d, size = -clamped(over_units(rows["total"], first)) * there, there.sum()
    by_sequence = {
        "kl_k1": _share(d.sum(), size),
        "kl_k3": _share(((-d).expm1() + d).sum(), size),
        "chi2": _share((-2 * d).expm1().sum(), size),
    }
    return _both(by_token, by_sequence)


def _both(by_token: Mapping[str, Tensor], by_sequence: Mapping[str, Tensor]) -> dict[str, Tensor]:
    both = {"token": by_token, "sequence": by_sequence}
    return {f"{name}_{by}": value for by, numbers in both.items() for name, value in numbers.items()}


def _share(total: Tensor, size: Tensor) -> Tensor:
    return total / size.clamp_min(1)


def _largest(values: Tensor) -> Tensor:
    return values.amax() if len(values) else values.sum()


def _effective(total: Tensor, squares: Tensor, size: Tensor) -> Tensor:
    return torch.where(squares > 0, total.square() / (size * squares), 0.0)

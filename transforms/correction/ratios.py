"""Log-ratios of the trainer's policy and the one that sampled: of tokens, rows and rollouts.

μ is the policy that sampled, π_old the trainer's at the start of the step, ρ = π_old / μ. Both are recorded
columns: all here is data, and nothing has a gradient. Shapes are (N, T) by row and token; what is not in the
mask is never read and counts as a log-ratio of 0. Computed in float64, rounded once.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from headrace.transforms.ids import sum_by
from headrace.transforms.sums import sum_by_in_any_order, sum_in_any_order

LARGEST = 20.0  # a log-ratio beyond it says no more: e^20 is 485 million
Span = Literal["sample", "rollout"]


class Ratios:
    """log ρ of recorded log-probabilities, and what follows from it, computed where it is asked for.

    Args:
        log_prob: (N, T) float, log π_old.
        sampler_log_prob: (N, T) float, log μ.
        mask: (N, T) bool, tokens in the loss. What is not finite there counts as 0.

    Attributes:
        token: (N, T) float64: log π_old − log μ, 0 out of the mask.
        mask: (N, T) bool.
        wrong: (N, T) bool, tokens in the loss of which it is not known, which a rule refuses.
        dtype: what results are rounded to: that of the log-probabilities, at least float32.

    """

    def __init__(self, log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor):
        self.dtype, self.mask = rounded_to(log_prob, sampler_log_prob), mask
        ratio = log_prob.detach().double() - sampler_log_prob.detach().double()
        finite = ratio.isfinite()
        self.wrong = mask & ~finite
        self.token = ratio.masked_fill_(~(mask & finite), 0.0)

    @cached_property
    def tokens(self) -> Tensor:
        """(N,) int64: how many of a row are in the mask."""
        return self.mask.sum(-1)

    @cached_property
    def total(self) -> Tensor:
        """(N,) float64: log ρ added up over a row, the same bits in whatever order, with whatever padding."""
        return sum_of_rows(self.token)

    @cached_property
    def clamped(self) -> Tensor:
        """(N, T) float64: log ρ within ±20."""
        return clamped(self.token)

    @cached_property
    def excess(self) -> Tensor:
        """(N, T) float64: ρ − 1, of the clamped log-ratio."""
        return self.clamped.expm1()


def rounded_to(log_prob: Tensor, sampler_log_prob: Tensor) -> torch.dtype:
    """What results are rounded to: the dtype of the log-probabilities, at least float32."""
    return torch.promote_types(torch.promote_types(log_prob.dtype, sampler_log_prob.dtype), torch.float32)


def sum_of_rows(values: Tensor) -> Tensor:
    """(N,) the sums of (N, T) float64, which follow from each row's numbers alone. No device read."""
    if values.numel() == 0:
        return values.sum(-1)
    return sum_in_any_order(
        values,
        lambda part: part.sum(-1),
        peak=lambda: values.abs().amax(-1, keepdim=True),
        terms=torch.full((1,), values.shape[-1], device=values.device),
    )


def over_units(values: Tensor, first: Tensor | None) -> Tensor:
    """(N,) per row, the sum over the rows of its unit; integers as they are, floats in any order.

    Args:
        values: (N,) int64 or float64.
        first: (N,) int64, the first row of each row's unit; None: each row is one.
    """
    if first is None or len(values) == 0:
        return values
    if not values.is_floating_point():
        return sum_by(first, values)
    return sum_by_in_any_order(first, values)


def total_of(values: Tensor) -> Tensor:
    """Scalar float64: the sum of (M,) float64, which does not depend on their order."""
    if len(values) == 0:
        return values.sum()
    terms = (values != 0).sum()
    return sum_in_any_order(values, torch.sum, peak=lambda: values.abs().amax(), terms=terms)


def clamped(log: Tensor) -> Tensor:
    """Log-ratios within ±20."""
    return log.clamp(-LARGEST, LARGEST)

"""Ratios of two recorded policies at the tokens in the loss, and the distance of the policies.

μ is the policy that sampled, π_old the trainer's policy at the start of the step, and ρ = π_old / μ. Both
policies are recorded columns, so nothing here has a gradient. Shapes are (B, T), on the device of the batch.
Tokens outside of the mask are never read and count as a log-ratio of 0. Results are computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.table import BatchError, Ids, Rows
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.tensordicts import count_true
from headrace.transforms.table.tokens import (
    check_lengths,
    finite_inside,
    first_token,
    in_blocks,
    plain_sum,
    read_mask,
    read_tokens,
    unless_all,
    zero_outside,
)

LARGEST = 20.0  # log-ratios are clamped to ±20; e^20 is 485 million
Span = Literal["sample", "rollout"]


class Ratios:
    """log ρ of some rows, and functions of log ρ, which are computed when they are read.

    Args:
        log_prob: (B, T) float, log π_old.
        sampler_log_prob: (B, T) float, log μ.
        mask: (B, T) bool, tokens in the loss.

    Attributes:
        mask: (B, T) bool.
        dtype: dtype of the results: that of the log-probabilities, at least float32.
    """

    def __init__(self, log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor):
        self.dtype, self.mask = rounded_to(log_prob, sampler_log_prob), mask
        self._pair = log_prob, sampler_log_prob

    def log(self) -> Tensor:
        """(B, T) float64: log π_old − log μ, undefined out of the mask. Each call makes a new tensor."""
        trainer, sampler = self._pair
        return trainer.to(torch.float64, copy=True).sub_(sampler.double())

    @cached_property
    def token(self) -> Tensor:
        """(B, T) float64: log π_old − log μ, 0 out of the mask."""
        return zero_outside(self.log(), self.mask)

    @cached_property
    def rounded(self) -> Tensor:
        """(B, T): log π_old − log μ, computed in the dtype of the results, clamped, 0 out of the mask."""
        trainer, sampler = self._pair
        return clamped(zero_outside(trainer.to(self.dtype) - sampler.to(self.dtype), self.mask))

    @cached_property
    def clamped(self) -> Tensor:
        """(B, T) float64: log ρ, clamped to ±20."""
        return clamped(self.token)

    @cached_property
    def excess(self) -> Tensor:
        """(B, T) float64: ρ − 1, from the clamped log-ratio."""
        return self.clamped.expm1()

    def of_rows(self) -> dict[str, Tensor]:
        """(B,) each: sums over the tokens of a row, only for the metrics of :func:`distance`."""
        excess = self.excess
        return {
            "total": plain_sum(self.token),
            "k1": 0.0 - plain_sum(self.clamped),  # 0, not −0, if the policies are equal
            "k3": plain_sum(excess - self.clamped),
            "chi2": plain_sum(excess.square()) + 2 * plain_sum(excess),
        }

    def unknown(self) -> dict[str, Tensor]:
        """(B,) each: the first token with a log-probability that is not finite, or −1; and its two values."""
        trainer, sampler = self._pair
        wrong = self.mask & ~(trainer.isfinite() & sampler.isfinite())
        names = "unknown", "trainer", "sampler"
        return dict(zip(names, first_token(wrong, trainer, sampler), strict=True))


class Policies:
    """The columns of two policies, from which :class:`Ratios` are computed, some rows at a time.

    Args:
        log_prob: (B, T) float, log π_old.
        sampler_log_prob: (B, T) float, log μ.
        mask: (B, T) bool.
        names: names of the columns in messages.
        in_loss: (B,) bool, rows in the loss; None: all rows.

    Raises:
        BatchError: shapes differ or are not (B, T), or the mask is not bool.
    """

    def __init__(
        self,
        log_prob: Tensor,
        sampler_log_prob: Tensor,
        mask: Tensor,
        names: Sequence[NestedKey] = ("log_prob", "sampler_log_prob", "mask"),
        in_loss: Tensor | None = None,
    ):
        columns = log_prob, sampler_log_prob, mask
        if len({column.shape for column in columns}) > 1 or mask.ndim != 2:
            shapes = zip(names, (tuple(column.shape) for column in columns), strict=True)
            raise BatchError(
                "the log-probabilities of both policies and the mask must have one shape (N, T); found "
                + ", ".join(f"{name!r} {shape}" for name, shape in shapes)
            )
        if mask.dtype is not torch.bool:
            raise BatchError(
                f"the loss mask must be bool, True trains; found {mask.dtype}: convert it with `mask != 0`"
            )
        self.log_prob, self.sampler_log_prob, self.mask = log_prob.detach(), sampler_log_prob.detach(), mask
        self.in_loss, self.dtype = in_loss, rounded_to(log_prob, sampler_log_prob)

    @classmethod
    def read(cls, batch: TensorDictBase, reader: Any, in_loss: Tensor | None) -> Policies:
        """Read the columns of a batch.

        Args:
            batch: TensorDict ``[B]``, dense or ragged.
            reader: a stage or criterion with `old_log_prob_key`, `sampler_log_prob_key` and `loss_mask_key`.
            in_loss: (B,) bool, rows in the loss; None: all rows.

        Raises:
            MissingKeyError: a column is missing.
            BatchError: the columns differ in length, or the mask is not bool.
        """
        name, options = type(reader).__name__, ("old_log_prob_key", "sampler_log_prob_key")
        keys, mask_key = [getattr(reader, option) for option in options], reader.loss_mask_key
        pairs = zip(keys, options, strict=True)
        old, sampler = (read_tokens(batch, key, reader=name, option=option) for key, option in pairs)
        mask = read_mask(batch, mask_key, reader=name, option="loss_mask_key")
        check_lengths(batch, keys, mask_key, reader=name)
        return cls(old, sampler, mask, [*keys, mask_key], unless_all(in_loss))

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The columns that every computation reads."""
        return self.log_prob, self.sampler_log_prob, self.mask

    def each_row(
        self, function: Callable[..., Mapping[str, Tensor]], *more: Tensor | None
    ) -> dict[str, Tensor]:
        """Apply a function of :class:`Ratios`, and of the columns `more`, to all rows, in blocks of rows."""

        def of_some(
            log_prob: Tensor, sampler: Tensor, mask: Tensor, in_loss: Tensor | None, *more: Tensor
        ) -> Mapping[str, Tensor]:
            mask = mask if in_loss is None else mask & in_loss.unsqueeze(-1)
            return function(Ratios(log_prob, sampler, mask), *more)

        return in_blocks(of_some, *self.columns, self.in_loss, *more)

    def counted(self) -> dict[str, Tensor]:
        """(B,) each: the number of ``tokens`` in the loss, and whether all have finite log-probabilities."""
        tokens = count_true(self.mask)
        tokens = tokens if self.in_loss is None else tokens * self.in_loss
        known = finite_inside(self.log_prob, self.mask) & finite_inside(self.sampler_log_prob, self.mask)
        return {"tokens": tokens, "known": known | (tokens == 0)}

    def require_known(self, rows: Rows, found: Mapping[str, Tensor]) -> None:
        """Require finite log-probabilities at all tokens in the loss.

        Args:
            rows: the M rows.
            found: by name, (M,), from :meth:`counted`.

        Raises:
            BatchError: a log-probability is not finite; the message lists rows and tokens.
        """
        if bool(found["known"].all()):
            return
        first = rows.measured(**self.each_row(Ratios.unknown))

        def describe(row: int) -> str:
            ids = [f"{role} {rows.name(role, row)}" for role in ("group", "rollout") if rows.has(role)]
            known = f" ({', '.join(ids)})" if ids else ""
            both = (
                f"{float(first['trainer'][row]):g} (trainer) and {float(first['sampler'][row]):g} (sampler)"
            )
            return f"{both} at row {rows.at(row)}{known}, token {int(first['unknown'][row])}"

        rows.require(
            first["unknown"] < 0,
            "tokens in the loss must have a finite log-probability under both policies; found {found}. "
            "Record both for every token that trains, or take these rows out before this stage: "
            "SampleFilter(criterion=Finite(key=...))",
            describe,
        )


def rounded_to(log_prob: Tensor, sampler_log_prob: Tensor) -> torch.dtype:
    """The dtype of the results: that of the log-probabilities, at least float32."""
    return torch.promote_types(torch.promote_types(log_prob.dtype, sampler_log_prob.dtype), torch.float32)


def clamped(log: Tensor) -> Tensor:
    """Clamp log-ratios to ±20."""
    return log.clamp(-LARGEST, LARGEST)


def over_units(values: Tensor, rollouts: Ids | None) -> Tensor:
    """Sum (M,) values over the rows of each rollout, (n,). Unchanged if `rollouts` is None."""
    return values if rollouts is None else rollouts.sum(values)


def distance(found: Mapping[str, Tensor], rollouts: Ids | None) -> dict[str, Tensor]:
    """Estimate the distance of the two policies, per token and per sequence.

    d = log μ − log π_old of a token, or its sum over a sequence, clamped to ±20. ρ = e^(−d). n is the
    number of tokens or sequences::

        kl_k1  Σ d / n              an estimate of KL(μ ‖ π_old)
        kl_k3  Σ (ρ − 1 + d) / n    another estimate (http://joschu.net/blog/kl-approx.html)
        chi2   Σ ρ² / n − 1         an estimate of χ²(π_old ‖ μ)

    Sequences without a token in the loss are left out. The order of the rows changes no bit of the results.
    Padding may change the rounding of a sum over tokens.

    Args:
        found: by name, (M,), from :meth:`Ratios.of_rows`.
        rollouts: the rows of a rollout are one sequence; None: each row is a sequence.
    """
    tokens = found["tokens"].sum().clamp_min(1)
    has_tokens = over_units(found["tokens"], rollouts) > 0
    d = clamped(0.0 - over_units(found["total"], rollouts)) * has_tokens
    sequences = has_tokens.sum().clamp_min(1)
    return {
        "kl_k1_token": add_up(found["k1"]) / tokens,
        "kl_k3_token": add_up(found["k3"]) / tokens,
        "chi2_token": add_up(found["chi2"]) / tokens,
        "kl_k1_sequence": add_up(d) / sequences,
        "kl_k3_sequence": add_up((-d).expm1() + d) / sequences,
        "chi2_sequence": add_up((-2 * d).expm1()) / sequences,
    }

"""What two recorded policies say of the tokens in the loss, and how far they are apart.

μ is the policy that sampled, π_old the trainer's at the start of the step, ρ = π_old / μ. Both are recorded
columns: all here is data, and nothing has a gradient. Shapes are (B, T) by row and token, on the device of
the batch; what is not in the mask is never read and counts as a log-ratio of 0. Computed in float64, rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.ids import Ids, add_up
from headrace.transforms.rows import Rows
from headrace.transforms.tokens import (
    check_lengths,
    first_token,
    in_blocks,
    read_loss_mask,
    read_tokens,
    sum_of_tokens,
)

LARGEST = 20.0  # a log-ratio beyond it says no more: e^20 is 485 million
Span = Literal["sample", "rollout"]


class Ratios:
    """log ρ of some rows, and what follows from it, computed where it is asked for.

    Args:
        log_prob: (B, T) float, log π_old.
        sampler_log_prob: (B, T) float, log μ.
        mask: (B, T) bool, tokens in the loss. What is not finite there counts as 0.

    Attributes:
        token: (B, T) float64: log π_old − log μ, 0 out of the mask.
        mask: (B, T) bool.
        dtype: what results are rounded to: that of the log-probabilities, at least float32.
    """

    def __init__(self, log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor):
        self.dtype, self.mask = rounded_to(log_prob, sampler_log_prob), mask
        self._pair = log_prob, sampler_log_prob
        ratio = log_prob.detach().double() - sampler_log_prob.detach().double()
        finite = ratio.isfinite()
        self._wrong = mask & ~finite
        self.token = ratio.masked_fill_(~(mask & finite), 0.0)

    @cached_property
    def clamped(self) -> Tensor:
        """(B, T) float64: log ρ within ±20."""
        return clamped(self.token)

    @cached_property
    def excess(self) -> Tensor:
        """(B, T) float64: ρ − 1, of the clamped log-ratio."""
        return self.clamped.expm1()

    def of_rows(self) -> dict[str, Tensor]:
        """(B,) each: how many tokens a row has, and sums over them by which :func:`distance` measures.

        Also the first token of which one policy is not known, −1 where all are, and what both say of it
        (:func:`require_known`).
        """
        d, more = -self.clamped, self.excess
        sums = sum_of_tokens(torch.stack([self.token, d, more + d, more * (more + 2)]))
        found = {"tokens": self.mask.sum(-1), **dict(zip(("total", "k1", "k3", "chi2"), sums, strict=True))}
        names = "unknown", "trainer", "sampler"
        return found | dict(zip(names, first_token(self._wrong, *self._pair), strict=True))


class Policies:
    """The columns of two policies, which :class:`Ratios` are computed of, some rows at a time.

    Args:
        log_prob: (B, T) float, log π_old.
        sampler_log_prob: (B, T) float, log μ.
        mask: (B, T) bool.
        names: what the columns are called in messages.

    Raises:
        BatchError: shapes differ, or are not (B, T); the mask is not bool.
    """

    def __init__(
        self,
        log_prob: Tensor,
        sampler_log_prob: Tensor,
        mask: Tensor,
        names: Sequence[NestedKey] = ("log_prob", "sampler_log_prob", "mask"),
    ):
        columns = log_prob, sampler_log_prob, mask
        if len({column.shape for column in columns}) > 1 or mask.ndim != 2:
            shapes = zip(names, (tuple(column.shape) for column in columns), strict=True)
            raise BatchError(
                "a token has a log-probability under both policies and one mask, (N, T) each; found "
                + ", ".join(f"{name!r} {shape}" for name, shape in shapes)
            )
        if mask.dtype is not torch.bool:
            raise BatchError(
                f"a loss mask is bool, True trains; found {mask.dtype}: convert it by `mask != 0`"
            )
        self.log_prob, self.sampler_log_prob, self.mask = log_prob.detach(), sampler_log_prob.detach(), mask
        self.dtype = rounded_to(log_prob, sampler_log_prob)

    @classmethod
    def read(cls, batch: TensorDictBase, reader: Any, in_loss: Tensor | None) -> Policies:
        """Read the columns of a batch.

        Args:
            batch: TensorDict ``[B]``, dense or ragged.
            reader: has `old_log_prob_key`, `sampler_log_prob_key` and `loss_mask_key`.
            in_loss: (B,) bool, rows in the loss; None: all are.

        Raises:
            MissingKeyError: a column is not there.
            BatchError: they are not of the same tokens; the mask is not bool.
        """
        name, options = type(reader).__name__, ("old_log_prob_key", "sampler_log_prob_key")
        keys, mask_key = [getattr(reader, option) for option in options], reader.loss_mask_key
        pairs = zip(keys, options, strict=True)
        old, sampler = (read_tokens(batch, key, reader=name, option=option) for key, option in pairs)
        mask = read_loss_mask(batch, mask_key, in_loss, reader=name)
        check_lengths(batch, keys, mask_key, reader=name)
        return cls(old, sampler, mask, [*keys, mask_key])

    def each_row(
        self, function: Callable[..., Mapping[str, Tensor]], *more: Tensor | None
    ) -> dict[str, Tensor]:
        """What a function of the :class:`Ratios` of some rows, and of their `more`, says of all rows."""

        def of_some(log_prob: Tensor, sampler: Tensor, mask: Tensor, *more: Tensor) -> Mapping[str, Tensor]:
            return function(Ratios(log_prob, sampler, mask), *more)

        return in_blocks(of_some, self.log_prob, self.sampler_log_prob, self.mask, *more)


def require_known(rows: Rows, found: Mapping[str, Tensor]) -> None:
    """Every token in the loss has finite log-probabilities.

    Args:
        rows: M of them.
        found: (M,) by name, of :meth:`Ratios.of_rows`.

    Raises:
        BatchError: one has not, with its row.
    """

    def describe(row: int) -> str:
        ids = [f"{role} {rows.name(role, row)}" for role in ("group", "rollout") if rows.has(role)]
        known = f" ({', '.join(ids)})" if ids else ""
        said = f"{float(found['trainer'][row]):g} (trainer) and {float(found['sampler'][row]):g} (sampler)"
        return f"{said} at row {rows.at(row)}{known}, token {int(found['unknown'][row])}"

    rows.require(
        found["unknown"] < 0,
        "tokens in the loss have a finite log-probability under both policies; found {found}. Record both "
        "for every token that trains, or take those rows out before: "
        "SampleFilter(criterion=Finite(key=...))",
        describe,
    )


def rounded_to(log_prob: Tensor, sampler_log_prob: Tensor) -> torch.dtype:
    """What results are rounded to: the dtype of the log-probabilities, at least float32."""
    return torch.promote_types(torch.promote_types(log_prob.dtype, sampler_log_prob.dtype), torch.float32)


def clamped(log: Tensor) -> Tensor:
    """Log-ratios within ±20."""
    return log.clamp(-LARGEST, LARGEST)


def over_units(values: Tensor, rollouts: Ids | None) -> Tensor:
    """(M,) → (n,): what rows add to the sequences that they are of, each row one where `rollouts` is None."""
    return values if rollouts is None else rollouts.everyone.sum(values)


def distance(found: Mapping[str, Tensor], rollouts: Ids | None) -> dict[str, Tensor]:
    """How far two policies are apart, by token and by sequence: a row, or a rollout.

    With d = log μ − log π_old of a token, or added up over a sequence, clamped to ±20, and ρ = e^(−d)::

        kl_k1  Σ d / n              an estimate of KL(μ ‖ π_old)
        kl_k3  Σ (ρ − 1 + d) / n    another (http://joschu.net/blog/kl-approx.html)
        chi2   Σ ρ² / n − 1         of χ²(π_old ‖ μ)

    Sequences without a token in the loss are in none of them. Each number follows from the set of rows: ranks
    and orders change no bit of it.

    Args:
        found: (M,) by name, of :meth:`Ratios.of_rows`.
        rollouts: which rows are one sequence; None: each row is.
    """
    tokens = found["tokens"].sum().clamp_min(1)
    there = over_units(found["tokens"], rollouts) > 0
    d = -clamped(over_units(found["total"], rollouts)) * there
    sequences = there.sum().clamp_min(1)
    return {
        "kl_k1_token": add_up(found["k1"]) / tokens,
        "kl_k3_token": add_up(found["k3"]) / tokens,
        "chi2_token": add_up(found["chi2"]) / tokens,
        "kl_k1_sequence": add_up(d) / sequences,
        "kl_k3_sequence": add_up((-d).expm1() + d) / sequences,
        "chi2_sequence": add_up((-2 * d).expm1()) / sequences,
    }

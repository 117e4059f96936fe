"""The divergence of two recorded policies, and the criterion that rejects rows or tokens by divergence."""

from __future__ import annotations

import math
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import ColumnNames, Rows, TakesColumns
from headrace.transforms.table.options import describe_options, takes_options
from headrace.transforms.table.tensordicts import count_true
from headrace.transforms.table.tokens import in_loss_there, read_advantage, sum_of_tokens

from .importance import check_bounds, outside
from .ratios import Policies, Ratios, Span, distance, over_units

Estimator = Literal["k1", "k2", "k3"]
Over = Literal["token", "sum", "mean", "max"]
Bounded = Literal["token", "sum", "mean", "max", "every"]
Judged = Literal["all", "negative"]


@takes_options
def divergence(
    log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    estimator: Estimator = "k3",
    level: Over = "token",
) -> Tensor:
    """Estimate KL(μ ‖ π_old) from tokens that μ sampled.

    With d = log μ − log π_old of a token, clamped to ±20 (http://joschu.net/blog/kl-approx.html)::

        k1  d
        k2  d² / 2
        k3  e^(−d) − 1 + d

    The divergence of a row is the ``sum``, ``mean`` or ``max`` over its tokens in the mask. This result is
    not clamped. A row without tokens gets 0. Results are computed in float64 and rounded once.

    Args:
        log_prob: (N, T) float, log π_old: the trainer's policy at the start of the step.
        sampler_log_prob: (N, T) float, log μ: the policy that sampled.
        mask: (N, T) bool; tokens outside of it are not read and get 0.
        estimator: k1, k2, k3.
        level: ``token``, or the reduction over the tokens of a row.

    Returns:
        (N, T) for ``token``, else (N,), in the dtype of the log-probabilities, at least float32, without a
        gradient.

    Raises:
        ValueError: an option has an unknown value.
        BatchError: shapes differ, or a log-probability in the mask is not finite; the message lists the rows.

    Example:
        >>> trainer, sampler = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
        >>> mask = torch.tensor([[True, True]])
        >>> divergence(trainer, sampler, mask, estimator="k1").tolist()
        [[-0.5, 1.0]]
        >>> divergence(trainer, sampler, mask, estimator="k2", level="max").tolist()
        [0.5]
    """
    policies = Policies(log_prob, sampler_log_prob, mask)
    rows = Rows.of(row=torch.arange(len(mask)))
    policies.require_known(rows, rows.measured(**policies.counted()))

    def of_some(ratio: Ratios) -> dict[str, Tensor]:
        found = of_tokens(ratio, estimator)
        if level != "token":
            found = over_tokens(found, ratio.mask, level)
            tokens = ratio.mask.sum(-1)
            found = torch.where(tokens > 0, found / tokens.clamp_min(1) if level == "mean" else found, 0.0)
        return {"found": found.to(ratio.dtype)}

    return policies.each_row(of_some)["found"]


def of_tokens(ratio: Ratios, estimator: str) -> Tensor:
    """(B, T) float64: the divergence of each token, 0 out of the mask."""
    if estimator == "k1":
        return -ratio.clamped
    return ratio.clamped.square() / 2 if estimator == "k2" else ratio.excess - ratio.clamped


def over_tokens(values: Tensor, mask: Tensor, level: str) -> Tensor:
    """(B,) float64: the sum of (B, T) `values`; under ``max`` the largest in the mask, −∞ without tokens."""
    if level != "max":
        return sum_of_tokens(values)
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], float("-inf"))
    return values.masked_fill(~mask, float("-inf")).amax(-1)


class Diverged(
    TakesColumns,
    columns=("old_log_prob", "sampler_log_prob", "loss_mask", "advantage", "rollout"),
    needed=("rollout",),
):
    """Keep rows, or tokens, whose :func:`divergence` is within bounds. Reason: ``diverged``.

    ::

        k1      log low ≤ D ≤ log high    low and high bound μ / π_old, the inverse of an importance weight
        k2, k3  D ≤ high

        token            D is the divergence of each token
        sum, mean, max   D is the sum, mean or largest over the tokens of the row
        every            a row stays only if D of every token is within bounds

    Bounds are inclusive. With k1 and only `high`, low is 1 / high. low = 0 means no lower bound, and high =
    null no upper bound. ``max`` with k1 compares the row's largest μ / π_old with both bounds: a row stays if
    no token is above `high` and at least one token is ≥ `low`. To reject a row if ρ = π_old / μ of any token
    is below a or above b (SkyRL's ``outlier_token_is_threshold_low`` and ``_high``), use
    ``Diverged(estimator="k1", level="every", low=1 / b, high=1 / a)``. With k2 and k3, which have no `low`,
    ``every`` equals ``max``.

    Rows without a token in the loss stay. Use ``token`` with TokenFilter, and the other levels with
    SampleFilter before the advantage. There ``exclude`` and ``drop`` take the reward of a rejected row out of
    the baseline of its group, and ``mask`` leaves this reward in. A pipeline refuses the filter after the
    advantage, where every action would leave this reward in. Rejected tokens are not in the denominator of
    the loss, except with TokenFilter (``denominator="all"``).

    Geometric-mean rejection is ``estimator="k1"`` with ``level="mean"`` (https://richardli.xyz/rl-collapse).
    ``judges="negative"`` gives the off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556). This mask
    needs the sign of the advantage, so put the filter after the advantage. With several ranks, the tokens of
    a rollout on all ranks count. The stage measures KL and χ² of all rows before it rejects any.

    Args:
        estimator: k1, k2, k3.
        level: what the bounds apply to: each ``token``, the ``sum``, ``mean`` or ``max`` over a row, or
            ``every`` token of a row.
        low: for k1, the lower bound of μ / π_old, ≥ 0; null: 1 / high.
        high: upper bound, of μ / π_old for k1, of the divergence for k2 and k3; null: none, for k1 with low.
        unit: a row (``sample``), or all rows of a ``rollout``, which then stay or leave together.
        judges: ``all`` rows, or only those whose advantage is ``negative``.
        names: other names of columns, such as `old_log_prob_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a log-probability in the mask is not finite, or shapes differ.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict({("old_log_probs", "full"): torch.tensor([[-1.0], [-1.0]])}, batch_size=[2])
        >>> td["log_probs", "full"] = torch.tensor([[-1.1], [-3.0]])
        >>> td["masks", "all_assistant_mask"] = torch.ones(2, 1, dtype=torch.bool)
        >>> Diverged(estimator="k1", level="mean", high=2.0)(td).tolist()
        [True, False]
    """

    reason = "diverged"
    within_groups = True

    def __init__(
        self,
        *,
        estimator: Estimator = "k3",
        level: Bounded = "mean",
        low: float | None = None,
        high: float | None,
        unit: Span = "sample",
        judges: Judged = "all",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.unit = unit
        self.judges = judges
        self.estimator, self.level, self.low, self.high = estimator, level, low, high
        self._low, self._high = _bounds(estimator, low, high)
        if level == "token" and unit == "rollout":
            raise ValueError(
                "level='token' needs unit='sample'; unit='rollout' is for sum, mean, max and every"
            )
        self.in_keys: tuple[NestedKey, ...] = (
            self.old_log_prob_key,
            self.sampler_log_prob_key,
            self.loss_mask_key,
            *([self.advantage_key] if judges == "negative" else []),
            *([self.rollout_key] if unit == "rollout" else []),
        )
        self.before_baseline = judges == "all"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool, for SampleFilter. With ``level="token"`` (B, T) bool, which SampleFilter refuses."""
        out = self._outside(rows, rows.tokens())
        if out.ndim == 2 and out.shape[1] == 1:
            out = rows.measured(out=out[:, 0])["out"].bool()
        return ~out

    def of_tokens(self, rows: Rows, batch: TensorDictBase) -> Tensor:
        """(B, T) bool, True where a token stays, for TokenFilter; (B, 1) for the levels of rows.

        Args:
            rows: the table.
            batch: TensorDict ``[B]``, this rank's rows that have not left.
        """
        out = self._outside(rows, batch)
        return ~(out if out.ndim == 2 else rows.to_batch(out).unsqueeze(-1))

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool, True where the row stays; with ``level="token"`` (N, T) bool."""
        rows = Rows.read(batch, keys=self.in_keys).seen_by(self)
        keep = self.of_tokens(rows, rows.tokens())
        return keep if self.level == "token" or keep.shape[-1] > 1 else keep[:, 0]

    def _outside(self, rows: Rows, batch: TensorDictBase) -> Tensor:
        """What is out of bounds: (M,) bool for rows of the table, (B, T) bool for tokens of the batch.

        With ``judges="negative"`` (B, 1) bool for rows of the batch.
        """
        by_token = self.level == "token"
        policies = Policies.read(batch, self, in_loss_there(rows))

        def of_some(ratio: Ratios) -> dict[str, Tensor]:
            if by_token or self.level == "every":
                values = -ratio.rounded if self.estimator == "k1" else of_tokens(ratio, self.estimator)
                out = ratio.mask & outside(values.to(ratio.dtype), self._low, self._high)
                return {"out": out} if by_token else {"part": count_true(out)}
            return {"part": over_tokens(of_tokens(ratio, self.estimator), ratio.mask, self.level)}

        made = policies.each_row(lambda ratio: of_some(ratio) | ratio.of_rows())
        out = made.pop("out", torch.empty(0))
        found = rows.measured(**policies.counted(), **made)
        policies.require_known(rows, found)
        rollouts = rows.with_excluded.rollouts if self.unit == "rollout" else None
        for name, value in distance(found, rollouts).items():
            rows.metric(name, value)
        if self.level == "every":
            out = over_units(found["part"], rollouts) > 0
        elif not by_token:
            tokens, part = over_units(found["tokens"], rollouts), found["part"]
            if self.level == "max":
                total = part if rollouts is None else rollouts.max(part)
            else:
                total = over_units(part, rollouts)
                total = total / tokens.clamp_min(1) if self.level == "mean" else total
            out = (tokens > 0) & outside(total.to(policies.dtype), self._low, self._high)
        if rollouts is not None:
            out = rollouts.spread(out)
        if self.judges == "negative":
            keys, reader = (self.advantage_key, self.loss_mask_key), type(self).__name__
            credit = read_advantage(batch, keys[0], policies.mask, keys[1], reader=reader, rows=rows)
            out = (out if by_token else rows.to_batch(out).unsqueeze(-1)) & (credit < 0)
        return out


def _bounds(estimator: str, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """Compute the bounds of the divergence D from the options.

    Raises:
        ValueError: no bound is given, or the estimator does not have a given bound.
    """
    if estimator == "k1":
        check_bounds(low, high)
        if low is None and high is None:
            raise ValueError("k1 needs low or high, bounds of μ / π_old")
        if low is None and high is not None and high < 1:
            raise ValueError(f"k1 with only high sets low = 1 / high, so high must be ≥ 1; got {high!r}")
        lowest = 1 / high if low is None and high is not None else low
        return -math.inf if not lowest else math.log(lowest), None if high is None else math.log(high)
    if low is not None or high is None or not high > 0:
        raise ValueError(f"{estimator} needs high > 0 and has no low; got {low!r} and {high!r}")
    return None, high

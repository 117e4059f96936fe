"""Bring the advantages of a whole batch to mean 0 and standard deviation 1."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Ids, Rows
from headrace.transforms.table.checks import describe_rollout
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.options import takes_options, within
from headrace.transforms.table.schema import COUNTED, REWARD
from headrace.transforms.table.tensordicts import column_of, count_true
from headrace.transforms.table.tokens import (
    advantage_dtype,
    advantage_is_per_row,
    read_advantage,
    read_loss_mask,
    sum_of_tokens,
    write_tokens,
    zero_outside,
)

from .baselines import with_eps
from .by_token import require_finite

WhitenEpsMode = Literal["add", "clamp", "variance"]
Per = Literal["token", "sample", "rollout"]


@takes_options
def whiten(
    values: Tensor,
    weights: Tensor,
    *,
    eps: float = 1e-8,
    eps_mode: WhitenEpsMode = "variance",
) -> Tensor:
    """Subtract the weighted mean and divide by the weighted standard deviation.

    With W = Σ w_i (REINFORCE++, arXiv:2501.03262, section 3.2; GDPO, arXiv:2601.05242)::

        μ = Σ w_i A_i / W      σ² = Σ w_i (A_i − μ)² / (W − 1)

        variance  (A_i − μ) / √(σ² + ε)
        add       (A_i − μ) / (σ + ε)
        clamp     (A_i − μ) / max(σ, ε)

    If all values are equal the result is exactly 0. If the sum of squares is not finite, the results are NaN.
    Statistics are float64. Sums do not depend on the row order.

    Args:
        values: (N,) float, one per row.
        weights: (N,) ≥ 0, how often a row counts: its tokens in the loss, or 1. A row with weight 0 is not
            counted and becomes 0.
        eps: ε ≥ 0.
        eps_mode: how ε is added, see the equations.

    Returns:
        (N,) in the dtype of `values`.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]), eps=0.0).tolist()
        [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    if len(values) == 0:
        return values
    x, w = values.double(), weights.double()
    batch = Ids(torch.zeros(len(x), dtype=torch.int64, device=x.device), w > 0)
    total = w.sum()
    deviation = x - batch.sum(w * x) / total.clamp_min(1)
    variance = batch.sum(w * deviation.square()) / (total - 1).clamp_min(1)
    divisor = divisor_of(variance, eps, eps_mode)
    is_zero = (batch.max(x) == batch.min(x)) | (w == 0) | (divisor == 0)
    divisor = divisor.where(divisor.isfinite(), torch.nan)  # else all results would be 0
    return torch.where(is_zero, 0.0, deviation / divisor).to(values.dtype)


def divisor_of(variance: Tensor, eps: float, eps_mode: WhitenEpsMode) -> Tensor:
    """The divisor of :func:`whiten` for σ²."""
    return (variance + eps).sqrt() if eps_mode == "variance" else with_eps(variance.sqrt(), eps, eps_mode)


class BatchWhitening(BatchTransform, columns=("advantage", "loss_mask", "rollout")):
    """Whiten the advantage over the batch (:func:`whiten`), after the group-relative advantage.

    An advantage per token, such as that of GAE, is whitened over the tokens in the loss with ``per="token"``.
    Tokens out of the loss get 0.

    Excluded rows, rows without a reward and rows without a token get 0. Rows that a filter masked
    (``SampleFilter(action="mask")``) count with their original length.

    With ``per="rollout"`` the statistics are over one row of each rollout, so a rollout of three rows counts
    once. All its rows must have the same advantage. If their advantages differ, as after TurnDiscount, the
    stage raises an error.

    Reads and writes `advantage_key`. Reads ``("headrace", "reward")`` if it exists, `loss_mask_key` with
    ``per="token"``, and `rollout_key` with ``per="rollout"``.

    Args:
        per: count each ``token`` in the loss, each ``sample`` or each ``rollout`` once.
        eps: ε ≥ 0.
        eps_mode: ``variance``, ``add``, ``clamp``.
        names: other names of columns, such as `advantage_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: an advantage is not finite, or is per token without ``per="token"``; or, with
            ``per="rollout"``, rows of a rollout have different advantages. The message lists the rows or
            rollouts.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"advantage": [1.0, 3.0, 3.0], "rollout_id": [4, 5, 5]}, batch_size=[3])
        >>> BatchWhitening(per="rollout")(td)["advantage"].tolist()
        [-0.7071067690849304, 0.7071067690849304, 0.7071067690849304]
    """

    def __init__(
        self,
        *,
        per: Per = "token",
        eps: float = 1e-8,
        eps_mode: WhitenEpsMode = "variance",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.per = per
        tokens = self.loss_mask_key if per == "token" else None
        rollouts = self.rollout_key if per == "rollout" else None
        super().__init__([self.advantage_key, COUNTED, tokens, rollouts], [self.advantage_key])
        self.eps, self.eps_mode = within("eps", eps, 0), eps_mode

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Tokens in the loss mask, with ``per="token"``."""
        return [(self.loss_mask_key, None)] if self.per == "token" else []

    def decide(self, rows: Rows) -> None:
        """Rewrite an advantage per row now, and an advantage per token when rows are gathered."""
        if not advantage_is_per_row(rows) and advantage_dtype(rows) is not None:
            self._of_tokens(rows)
            return
        of_rollouts = self.per == "rollout"
        if of_rollouts:
            require_one_each(rows)
        some = rows.voters if of_rollouts else rows
        credit = some.number("advantage").double()
        weights = some.lengths if self.per == "token" else torch.ones_like(credit, dtype=torch.int64)
        if some.counted is not None:
            weights = weights * some.counted
        if some.has(REWARD):  # rows without a reward are not counted
            weights = weights * ~some[REWARD].isnan()
        white = whiten(credit, weights, eps=self.eps, eps_mode=self.eps_mode)
        for values in (credit, white):
            some.require(
                values.isfinite(),
                "whitening needs finite advantages with a finite sum of squares; found {found}",
                lambda row: f"{float(credit[row])} at row {some.at(row)}",
            )
        rows["advantage"] = rows.from_voters(white) if of_rollouts else white

    def _of_tokens(self, rows: Rows) -> None:
        """Whiten an advantage per token over the tokens in the loss mask of the rows that count."""
        if self.per != "token":
            raise BatchError(
                f"the advantage is one per token, and per={self.per!r} needs one per row. Set {{per=token}}"
            )
        batch, known = rows.tokens(), torch.ones(len(rows), dtype=torch.bool)
        if rows.counted is not None:
            known = rows.counted
        if rows.has(REWARD):
            known = known & ~rows[REWARD].isnan()
        credit, inside = self._read(batch, rows.to_batch(known))
        require_finite(rows, {"the advantage": credit}, inside)
        credit = zero_outside(credit, inside)
        found = rows.measured(
            sums=sum_of_tokens(credit),
            tokens=count_true(inside),
            low=torch.where(inside, credit, torch.inf).amin(1) if credit.shape[1] else credit.sum(1),
            high=torch.where(inside, credit, -torch.inf).amax(1) if credit.shape[1] else credit.sum(1),
        )
        total, some = found["tokens"].sum(), found["tokens"] > 0
        mean = float(add_up(found["sums"]) / total.clamp_min(1))
        squares = sum_of_tokens(zero_outside(credit - mean, inside).square())
        variance = add_up(rows.measured(squares=squares)["squares"]) / (total - 1).clamp_min(1)
        divisor = float(divisor_of(variance, self.eps, self.eps_mode))
        flat = not bool(some.any()) or bool(found["low"][some].min() == found["high"][some].max())
        if not math.isfinite(divisor) or not math.isfinite(mean):
            raise BatchError("whitening needs advantages with a finite sum of squares; scale the rewards")
        if flat or divisor == 0:
            mean, divisor = 0.0, math.inf
        write = partial(self._write, mean=mean, divisor=divisor)
        rows.when_gathered(write, [self.advantage_key], known=known)

    def _read(self, batch: TensorDictBase, known: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) float64, a copy of the advantage, and (B, T) bool, the tokens in the loss of known rows."""
        reader, like = type(self).__name__, self.loss_mask_key
        inside = read_loss_mask(batch, like, known, reader=reader)
        credit = read_advantage(batch, self.advantage_key, inside, like, reader=reader)
        return credit.to(torch.float64, copy=True), inside

    def _write(
        self, batch: TensorDictBase, numbers: dict[str, Tensor], *, mean: float, divisor: float
    ) -> None:
        """Rewrite the advantage of gathered rows; 0 at tokens out of the loss."""
        credit, inside = self._read(batch, numbers["known"])
        dtype = column_of(batch, self.advantage_key)
        dtype = dtype[0].dtype if isinstance(dtype, list) else dtype.dtype
        white = zero_outside((credit - mean) / divisor, inside).to(dtype)
        write_tokens(batch, self.advantage_key, white.unsqueeze(-1), self.loss_mask_key)


def require_one_each(rows: Rows) -> None:
    """Require one advantage for each rollout, equal on all its rows.

    Raises:
        BatchError: rows of a rollout differ; the message lists the rollouts.
    """
    credit, rollouts = rows.number("advantage"), rows.rollouts
    first = credit[rollouts.spread(rollouts.first)]
    rows.require(
        (credit == first) | (credit.isnan() & first.isnan()),
        "with per='rollout' all rows of a rollout need the same advantage; it differs in {found}. Put "
        "BatchWhitening before the stage that gives each row its own advantage, or set {per=sample}, which "
        "counts each row",
        lambda row: describe_rollout(rows, row, credit),
        unit=rollouts,
    )

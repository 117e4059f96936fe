"""Advantages of a whole batch brought to mean 0 and standard deviation 1."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchTransform, ColumnNames, Ids, Rows
from headrace.transforms.table.options import takes_options, within
from headrace.transforms.table.schema import COUNTED, REWARD

from .baselines import with_eps

WhitenEpsMode = Literal["add", "clamp", "variance"]
Per = Literal["token", "sample"]


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

    If all values are equal the result is exactly 0. Statistics are float64. Sums do not depend on the row
    order.

    Args:
        values: (N,) float, one per row.
        weights: (N,) ≥ 0, how often a row counts: its tokens in the loss, or 1. A row with weight 0 is not
            counted and becomes 0.
        eps: ε ≥ 0.
        eps_mode: how ε is added, as above.

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
    divisor = (variance + eps).sqrt() if eps_mode == "variance" else with_eps(variance.sqrt(), eps, eps_mode)
    is_zero = (batch.max(x) == batch.min(x)) | (w == 0) | (divisor == 0)
    return torch.where(is_zero, 0.0, deviation / divisor).to(values.dtype)


class BatchWhitening(BatchTransform, columns=("advantage", "loss_mask")):
    """Whiten the advantage over the batch (:func:`whiten`), after the group-relative advantage.

    Excluded rows, rows without a reward and rows without a token get 0. Rows that a filter masked
    (``SampleFilter(action="mask")``) count with their original length.

    Reads and writes `advantage_key`. Reads ``("headrace", "reward")`` if it exists, and `loss_mask_key` with
    ``per="token"``.

    Args:
        per: count each ``token`` in the loss, or each ``sample`` once.
        eps: ε ≥ 0.
        eps_mode: ``variance``, ``add``, ``clamp``.
        names: other names of columns, such as `advantage_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: an advantage is not finite.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"advantage": torch.tensor([1.0, 3.0]).view(2, 1, 1)}, batch_size=[2])
        >>> BatchWhitening(per="sample")(td)["advantage"].flatten().tolist()
        [-0.7071067690849304, 0.7071067690849304]
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
        super().__init__([self.advantage_key, COUNTED, tokens], [self.advantage_key])
        self.eps, self.eps_mode = within("eps", eps, 0), eps_mode

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Tokens in the loss mask, with ``per="token"``."""
        return [(self.loss_mask_key, None)] if self.per == "token" else []

    def decide(self, rows: Rows) -> None:
        """Rewrite the advantage."""
        credit = rows.number("advantage").double()
        weights = rows.lengths if self.per == "token" else torch.ones_like(credit, dtype=torch.int64)
        if rows.counted is not None:
            weights = weights * rows.counted
        if rows.has(REWARD):  # rows without a reward are not counted
            weights = weights * ~rows[REWARD].isnan()
        white = whiten(credit, weights, eps=self.eps, eps_mode=self.eps_mode)
        for values in (credit, white):
            rows.require(
                values.isfinite(),
                "whitening needs finite advantages with a finite sum of squares; found {found}",
                lambda row: f"{float(credit[row])} at row {rows.at(row)}",
            )
        rows["advantage"] = white

"""Advantages of a whole batch brought to mean 0 and standard deviation 1."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule
from headrace.transforms.distributed import population_of
from headrace.transforms.options import nested_key, one_of, within
from headrace.transforms.schema import COUNTED, REWARD, has_key
from headrace.transforms.sums import sum_in_any_order

from .baselines import with_eps

WhitenEpsMode = Literal["add", "clamp", "variance"]
Per = Literal["token", "sample"]


def whiten(
    values: Tensor, weights: Tensor, *, ddof: int = 1, eps: float = 1e-8, eps_mode: WhitenEpsMode = "variance"
) -> Tensor:
    """Subtract the weighted mean and divide by the weighted standard deviation.

    With W = Σ w_i (REINFORCE++, arXiv:2501.03262, section 3.2; GDPO, arXiv:2601.05242)::

        μ = Σ w_i A_i / W      σ² = Σ w_i (A_i − μ)² / (W − ddof)

        variance  (A_i − μ) / √(σ² + ε)
        add       (A_i − μ) / (σ + ε)
        clamp     (A_i − μ) / max(σ, ε)

    Values that are all equal become exactly 0. Statistics are float64, by sums that do not depend on the
    order of the rows. No device read.

    Args:
        values: (N,) float, one a row.
        weights: (N,) ≥ 0, how often a row counts: its tokens in the loss, or 1. A row of weight 0 is out of
            the statistics and becomes 0.
        ddof: 1 or 0.
        eps: ε ≥ 0.
        eps_mode: how ε enters.

    Returns:
        (N,) in the dtype of `values`.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]), eps=0.0).tolist()
        [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    one_of("ddof", ddof, (0, 1))
    one_of("eps_mode", eps_mode, get_args(WhitenEpsMode))
    if len(values) == 0:
        return values
    x, w = values.double(), weights.double()
    total = w.sum()
    deviation = x - _sum(w * x, w) / total.clamp_min(1)
    variance = _sum(w * deviation.square(), w) / (total - ddof).clamp_min(1)
    divisor = (variance + eps).sqrt() if eps_mode == "variance" else with_eps(variance.sqrt(), eps, eps_mode)
    high, low = (torch.where(w > 0, x, end) for end in (float("-inf"), float("inf")))
    nothing = (high.amax() == low.amin()) | (w == 0) | (divisor == 0)
    return torch.where(nothing, 0.0, deviation / divisor).to(values.dtype)


def _sum(values: Tensor, weights: Tensor) -> Tensor:
    """Scalar: the sum over the rows that count, which follows from them alone."""
    return sum_in_any_order(values, torch.sum, peak=lambda: values.abs().amax(), terms=(weights > 0).sum())


class BatchWhitening(BatchTransform):
    """Whiten the advantage over the batch (:func:`whiten`), after the groups were compared.

    Rows that are out of the statistics, have no reward or no token get 0; those that a filter silenced
    (``SampleFilter(action="mask")``) count as long as they were. No device read.

    Reads and writes `advantage_key`; reads ``("headrace", "reward")`` if there, and `loss_mask_key` where
    `per` is ``token``.

    Args:
        per: what is counted: every ``token`` in the loss, or every ``sample`` once.
        ddof: 1 or 0.
        eps: ε ≥ 0.
        eps_mode: ``variance``, ``add``, ``clamp``.
        advantage_key: (N,) with any trailing ones, float.
        loss_mask_key: (N, T) bool.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: an advantage is not finite.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"advantage": torch.tensor([1.0, 3.0]).view(2, 1, 1)}, batch_size=[2])
        >>> BatchWhitening(per="sample", ddof=0)(td)["advantage"].flatten().tolist()
        [-1.0, 1.0]
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(
        self,
        *,
        per: Per = "token",
        ddof: int = 1,
        eps: float = 1e-8,
        eps_mode: WhitenEpsMode = "variance",
        advantage_key: NestedKey = "advantage",
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
    ):
        self.advantage_key, self.loss_mask_key = nested_key(advantage_key), nested_key(loss_mask_key)
        self.per = one_of("per", per, get_args(Per))
        tokens = self.loss_mask_key if per == "token" else None
        super().__init__([self.advantage_key, COUNTED, tokens], [self.advantage_key])
        self.ddof = one_of("ddof", ddof, (0, 1))
        self.eps, self.eps_mode = within("eps", eps, 0, float("inf")), eps_mode
        one_of("eps_mode", eps_mode, get_args(WhitenEpsMode))

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Rewrite the advantage."""
        credit = self.column(batch, "advantage_key")
        once = torch.ones_like(credit, dtype=torch.int64)
        weights = self.lengths(batch) if self.per == "token" else once
        weights = weights * batch.get(COUNTED, once)
        if has_key(batch, REWARD):  # who has none is in no statistic
            weights = weights * ~batch.get(REWARD).reshape(-1).isnan()
        people = population_of(batch, every=True)
        everyone = people.take({"values": credit, "weights": weights})
        white = people.put_back(whiten(**everyone, ddof=self.ddof, eps=self.eps, eps_mode=self.eps_mode))
        batch.set(self.advantage_key, white.view_as(batch.get(self.advantage_key)))
        return Outcome(batch, rules=[_finite(credit, credit), _finite(white, credit)])


def _finite(values: Tensor, credit: Tensor) -> Rule:
    """An advantage is finite, and so is what is measured of it."""
    return Rule(
        ~values.isfinite(),
        lambda row: f"{float(credit[row])} at row {row}",
        "every advantage must be finite to be whitened, and so must the sum of squares; found {found}",
    )

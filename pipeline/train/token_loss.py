"""Define TorchRL's GRPOLoss with all terms per token, so that all of them can be weighted."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.objectives.llm import GRPOLoss


class TokenGRPOLoss(GRPOLoss):
    """GRPOLoss with KL terms per token, like its other terms: (N, T, 1), 0 outside the loss mask.

    With ``aggregation="none"`` GRPOLoss returns the policy and entropy terms per token, but averages its KL
    terms over all positions of the micro-batch, padding included. That average depends on the micro-batches.
    Here the KL terms are per token, by the estimator k3 of http://joschu.net/blog/kl-approx.html::

        coeff · (exp(d) − 1 − d),   d = log π_ref − log π

    Args:
        arguments: positional arguments of GRPOLoss.
        options: keyword arguments of GRPOLoss. `aggregation` must be ``none`` or left out.

    Raises:
        ValueError: `aggregation` has another value.

    Example:
        >>> from headrace.pipeline.reverse import DigitPolicy
        >>> TokenGRPOLoss(DigitPolicy(), masking_strategy="generic", kl_to_ref_coeff=0.1).aggregation
        'none'
    """

    def __init__(self, *arguments: Any, **options: Any):
        if options.pop("aggregation", "none") != "none":
            raise ValueError("TokenGRPOLoss needs aggregation='none'; leave it out, and use weighted_loss")
        super().__init__(*arguments, aggregation="none", **options)

    def _kl_to_ref(
        self,
        tensordict: TensorDictBase,
        key: NestedKey = ("next", "ref_log_probs"),
        ref_log_prob: Tensor | None = None,
        coeff: float | None = None,
        mask: Tensor | None = None,
        dist: Any = None,
    ) -> tuple[Tensor, Tensor]:
        current = tensordict.get("_cur_log_prob")
        if ref_log_prob is None:
            side = self.ref_log_prob_padding_side
            ref_log_prob = tensordict.get(key, None, as_padded_tensor=True, padding_side=side)
        if ref_log_prob is None:
            raise KeyError(f"the KL term needs {key!r}, (N, T) log-probabilities")
        if ref_log_prob.ndim == current.ndim + 1:
            ref_log_prob = ref_log_prob.squeeze(-1)
        if ref_log_prob.shape != current.shape:
            raise ValueError(
                f"reference log-probabilities must have the policy's shape, {tuple(current.shape)}; {key!r} "
                f"has {tuple(ref_log_prob.shape)}"
            )
        inside = torch.ones_like(current, dtype=torch.bool) if mask is None else mask
        gap = torch.where(inside, ref_log_prob, 0.0) - torch.where(inside, current, 0.0)
        penalty = (gap.expm1() - gap).unsqueeze(-1)
        return (self.kl_to_ref_coeff if coeff is None else coeff) * penalty, penalty

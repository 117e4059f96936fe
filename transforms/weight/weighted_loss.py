"""A loss of per-token terms, summed by weight."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError, MissingKeyError
from headrace.transforms.schema import has_key, key_names


def weighted_loss(
    terms: TensorDictBase, batch: TensorDictBase, *, weight_key: NestedKey = "loss_weight"
) -> Tensor:
    """Sum the terms of a loss over tokens, each with its row's weight.

    ::

        L = Σ_k Σ_i w_i Σ_t ℓ_kit,   ℓ_k the entries named loss_*, 0 for tokens out of the loss

    Sums of L over the micro-batches and ranks of an optimiser step are the step's loss.

    Args:
        terms: entries named ``loss_*`` (N, T) or (N, T, 1), as ``GRPOLoss(aggregation="none")`` returns them.
        batch: TensorDict ``[N]`` with the weights.
        weight_key: (N,), or (N, T) where the batch is packed; written by :class:`LossWeight`.

    Returns:
        A scalar.

    Raises:
        MissingKeyError: the batch has no weights.
        BatchError: a term is no per-token tensor of these rows, since it was averaged already.

    Example:
        >>> from tensordict import TensorDict
        >>> terms = TensorDict({"loss_objective": torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]])})
        >>> batch = TensorDict({"loss_weight": torch.tensor([0.25, 0.5])}, batch_size=[2])
        >>> float(weighted_loss(terms, batch))
        2.25
    """
    if not has_key(batch, weight_key):
        raise MissingKeyError(
            f"weighted_loss needs the key {weight_key!r} (weight_key), written by LossWeight after the "
            f"split; the batch has {key_names(batch)}. Where weights are folded into the advantage, or the "
            "loss makes means of its own, add them up by headrace.pipeline.total_loss: optimise(..., "
            "reduce=total_loss)"
        )
    weight = batch.get(weight_key)
    if weight.numel() == len(batch):
        weight = weight.reshape(-1)
    losses = {
        key: value for key, value in terms.items() if key.startswith("loss_") and isinstance(value, Tensor)
    }
    total = torch.zeros((), dtype=weight.dtype, device=weight.device)
    for key, value in losses.items():
        if value.ndim < 2 or value.shape[: weight.ndim] != weight.shape:
            raise BatchError(
                f"weights are for per-token terms, ({len(batch)}, T) or ({len(batch)}, T, 1); {key!r} is "
                f"{tuple(value.shape)}. Set aggregation='none' on GRPOLoss; its KL terms stay means of their "
                "micro-batch all the same: use headrace.pipeline.TokenGRPOLoss for those"
            )
        total = total + (value * weight.reshape(*weight.shape, *[1] * (value.ndim - weight.ndim))).sum()
    if not losses:
        raise BatchError(f"a loss has entries named loss_*; found {sorted(map(str, terms.keys()))}")
    return total

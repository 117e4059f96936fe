"""Several rewards of one rollout, as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .errors import BatchError

Several = Literal["sum", "decoupled"]
SEVERAL = ("sum", "decoupled")
Missing = Literal["raise", "skip"]
MISSING = ("raise", "skip")


def advantage_of_several(
    reward: Tensor,
    advantage: Callable[..., Tensor],
    *,
    weights: Sequence[float] | None = None,
    several: Several = "sum",
    missing: Missing = "raise",
    **columns: Tensor,
) -> Tensor:
    """Make one advantage of K rewards a row.

    ::

        sum        A( Σ_k w_k r_k )
        decoupled  Σ_k w_k A(r_k)       (GDPO, arXiv:2601.05242: no reward drowns in another's scale)

    Args:
        reward: (N, K) float; NaN is a reward that is missing.
        advantage: takes ``reward`` (M,) and `columns` (M,) and returns (M,).
        weights: w, K numbers; None: all 1.
        several: how they become one.
        missing: ``raise`` hands NaN on to `advantage`, which refuses it. Under ``skip`` a missing reward
            leaves its own column's statistics only (in a ``sum`` it adds 0), and a row with no reward at all
            is out of all of them, with an advantage of 0. One device read a column.
        columns: (N,) tensors that go with the rows.

    Returns:
        (N,) in the dtype of `reward`.

    Raises:
        BatchError: not as many weights as columns.

    Example:
        >>> centred = lambda reward: reward - reward.mean()
        >>> advantage_of_several(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), centred, weights=[1, 3]).tolist()
        [-3.0, 3.0]
    """
    factors = [1.0] * reward.shape[1] if weights is None else [float(w) for w in weights]
    if len(factors) != reward.shape[1]:
        raise BatchError(
            f"each reward column needs a weight; got {len(factors)} for {reward.shape[1]} columns"
        )
    if several == "sum":
        total = sum(w * column for w, column in zip(factors, _filled(reward, missing), strict=True))
        reward, factors = total[:, None], [1.0]
    parts = [w * _over_present(reward[:, k], advantage, missing, columns) for k, w in enumerate(factors)]
    return torch.stack(parts).sum(0)


def _filled(reward: Tensor, missing: str) -> list[Tensor]:
    """The columns, with 0 for NaN where some other reward of the row is there."""
    if missing == "skip":
        unscorable = reward.isnan().all(1, keepdim=True)
        reward = torch.where(reward.isnan() & ~unscorable, 0.0, reward)
    return list(reward.unbind(1))


def _over_present(
    reward: Tensor, advantage: Callable[..., Tensor], missing: str, columns: dict[str, Tensor]
) -> Tensor:
    if missing == "raise":
        return advantage(reward=reward, **columns)
    rows = (~reward.isnan()).nonzero().flatten()
    part = {name: column.index_select(0, rows) for name, column in columns.items()}
    credit = advantage(reward=reward.index_select(0, rows), **part)
    return torch.zeros_like(reward).index_copy_(0, rows, credit)

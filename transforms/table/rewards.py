"""Rewards as tensors, and the weighted sum of several rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .errors import LISTED, BatchError, listing
from .options import takes_options
from .schema import FLOAT

EXACT = 2**53  # whole numbers up to this one are exact in float64
INEXACT = (
    "rewards that are whole numbers must be at most 2^53, beyond which float64 does not tell them apart; "
    "found {found}. Subtract an offset, or scale them"
)
Several = Literal["sum", "decoupled"]
Missing = Literal["raise", "skip", "mask"]


def as_rewards(reward: Tensor | Sequence[float]) -> Tensor:
    """Convert rewards to an (N,) floating-point tensor. Integers and lists become float64.

    Raises:
        BatchError: a reward is None (the message lists the rows), text, complex, or a whole number beyond
            2^53; or a row has several numbers.
    """
    if not isinstance(reward, Tensor):
        missing = [row for row, value in enumerate(reward) if value is None]
        if missing:
            raise BatchError(f"every row needs a reward; None at rows {listing(map(str, missing))}")
        if texts := [row for row, value in enumerate(reward) if isinstance(value, str)]:
            raise BatchError(
                f"every reward must be a number; found {reward[texts[0]]!r} at row {texts[0]}. Are these ids?"
            )
        large = [value for value in reward if isinstance(value, int) and abs(value) > EXACT]
        reward = torch.tensor(reward, dtype=torch.float64)
    else:
        if reward.is_complex():
            raise BatchError(f"every reward must be a real number; found {reward.dtype}")
        large = reward[reward.abs() > EXACT].tolist() if reward.dtype is torch.int64 else []
    if large:
        raise BatchError(INEXACT, found=listing(map(str, large[:LISTED]), of=len(large)))
    if not reward.is_floating_point():
        reward = reward.double()
    if reward.ndim == 0 or reward.numel() != reward.shape[0]:
        raise BatchError(f"each row needs one reward, (N,) or (N, 1, ...); got {tuple(reward.shape)}")
    return reward.detach().reshape(-1)


def credit_dtype(reward: Tensor | Sequence[float] | torch.dtype) -> torch.dtype:
    """The dtype of the advantage for rewards (or their dtype): the same dtype, but at least float32."""
    dtype = reward if isinstance(reward, torch.dtype) else getattr(reward, "dtype", FLOAT)
    return dtype if dtype.is_floating_point and dtype.itemsize > FLOAT.itemsize else FLOAT


@takes_options
def weighted_reward(rewards: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Add up the rewards of each row: ``R = Σ_k w_k r_k``.

    A missing reward (NaN) adds nothing. If all K are missing, the sum is NaN. Sums are computed in float64
    and rounded once. Nothing is read from a device.

    Args:
        rewards: (N, K) float.
        weights: w, K numbers; None: all 1.

    Returns:
        (N,) in the dtype of `rewards`.

    Raises:
        BatchError: the number of weights is not K.

    Example:
        >>> nan = float("nan")
        >>> weighted_reward(torch.tensor([[1.0, 4.0], [3.0, nan], [nan, nan]]), [1.0, 0.5]).tolist()
        [3.0, 3.0, nan]
    """
    factors = factors_of(weights, rewards.shape[1])
    if factors == [1.0]:
        return rewards[:, 0]
    missing = rewards.isnan()
    total = torch.zeros_like(rewards[:, 0], dtype=torch.float64)
    for factor, column in zip(factors, rewards.masked_fill(missing, 0.0).unbind(1), strict=True):
        total = total + factor * column.double()
    return total.to(rewards.dtype).masked_fill(missing.all(1), float("nan"))


def factors_of(weights: Sequence[float] | None, columns: int) -> list[float]:
    """The K weights as floats; 1 for each column if `weights` is None.

    Raises:
        BatchError: the number of weights is not K.
    """
    factors = [1.0] * columns if weights is None else [float(weight) for weight in weights]
    if len(factors) != columns:
        raise BatchError(f"each reward column needs a weight; got {len(factors)} for {columns} columns")
    return factors

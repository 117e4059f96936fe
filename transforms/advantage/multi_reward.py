"""Several rewards of one rollout, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace.transforms.checks import Rule
from headrace.transforms.errors import BatchError
from headrace.transforms.rows import SomeRows

Several = Literal["sum", "decoupled"]
Missing = Literal["raise", "skip"]


class CompareInGroups(Protocol):
    """What makes an advantage (M,) of one reward a row (M,), and says what does not hold of the rows."""

    def __call__(self, reward: Tensor, **columns: Tensor) -> tuple[Tensor, list[Rule]]:
        """`columns` are (M,) each."""


def compare_rewards(
    reward: Tensor,
    compare: CompareInGroups,
    *,
    weights: Sequence[float] | None = None,
    several: Several = "sum",
    missing: Missing = "raise",
    **columns: Tensor,
) -> tuple[Tensor, list[Rule]]:
    """Make one advantage of K rewards a row.

    ::

        sum        A( Σ_k w_k r_k )
        decoupled  Σ_k w_k A(r_k)       (GDPO, arXiv:2601.05242: no reward drowns in another's scale)

    Args:
        reward: (N, K) float; NaN is a reward that is missing.
        compare: A, from a reward (M,) and `columns` (M,) to an advantage (M,) and rules.
        weights: w, K numbers; None: all 1.
        several: how they become one.
        missing: ``raise`` hands NaN on to `compare`, which refuses it. Under ``skip`` a missing reward
            leaves its own column's statistics only (in a ``sum`` it adds 0), and a row with no reward at all
            is out of all of them, with an advantage of 0. One device read a column.
        columns: (N,) tensors that go with the rows.

    Returns:
        The advantage, (N,) in the dtype of `reward`, and the rules of all columns.

    Raises:
        BatchError: not as many weights as columns.

    Example:
        >>> centre = lambda reward: (reward - reward.mean(), [])
        >>> compare_rewards(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), centre, weights=[1, 3])[0].tolist()
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
    parts, rules = [], []
    for factor, column in zip(factors, reward.unbind(1), strict=True):
        present = SomeRows(~column.isnan() if missing == "skip" else None)
        credit, found = compare(present.take(column), **_take_all(present, columns))
        parts.append(factor * present.put_back(credit))
        rules += present.rules(found)
    return torch.stack(parts).sum(0), rules


def _take_all(rows: SomeRows, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: rows.take(column) for name, column in columns.items()}


def _filled(reward: Tensor, missing: Missing) -> list[Tensor]:
    """The columns, with 0 for NaN where some other reward of the row is there."""
    if missing == "skip":
        unscorable = reward.isnan().all(1, keepdim=True)
        reward = torch.where(reward.isnan() & ~unscorable, 0.0, reward)
    return list(reward.unbind(1))

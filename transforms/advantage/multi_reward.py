"""Several rewards of one rollout, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace.transforms.checks import Rule
from headrace.transforms.rewards import Missing, factors_of, weighted_reward
from headrace.transforms.rows import SomeRows

from .layout import fit_rule

Several = Literal["sum", "decoupled"]


class CompareInGroups(Protocol):
    """What makes an advantage (M,) of one reward a row (M,), and says what does not hold of the rows."""

    def __call__(self, reward: Tensor, **columns: Tensor) -> tuple[Tensor, list[Rule]]:
        """`columns` are (M,) each."""


def compare_rewards(
    reward: Tensor,
    compare: CompareInGroups,
    *,
    weights: Sequence[float] | None = None,
    missing: Missing = "raise",
    **columns: Tensor,
) -> tuple[Tensor, list[Rule]]:
    """Compare each of K rewards by itself, and add the advantages up: ``Σ_k w_k A(r_k)``.

    No reward drowns in another's scale (GDPO, arXiv:2601.05242).

    Args:
        reward: (N, K) float; NaN is a reward that is missing.
        compare: A, from a reward (M,) and `columns` (M,) to an advantage (M,) and rules.
        weights: w, K numbers; None: all 1.
        missing: ``raise`` hands NaN on to `compare`, which refuses it. Under ``skip`` a missing reward
            leaves its own column's statistics only, and a row with no reward at all is out of all of them,
            with an advantage of 0. One device read a column.
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
    factors = factors_of(weights, reward.shape[1])
    credits, rules = [], []
    for factor, column in zip(factors, reward.unbind(1), strict=True):
        present = SomeRows(~column.isnan() if missing == "skip" else None)
        others = {name: present.take(values) for name, values in columns.items()}
        credit, column_rules = compare(present.take(column.double()), **others)
        credits.append(factor * present.put_back(credit))
        rules += present.rules(column_rules)
    credit = torch.stack(credits).sum(0)
    return credit.to(reward.dtype), [*rules, fit_rule(credit, reward.dtype)]


def weighed_rule(
    reward: Tensor,
    rewards: Tensor | None,
    rollouts: Tensor | None,
    weights: Sequence[float] | None,
    several: Several,
) -> Rule:
    """The rollout's one reward is what these weights make of its rewards, bit by bit.

    Else filters, shaping and the report would go by another reward than the one that is trained.

    Args:
        reward: (N,) float.
        rewards: (N, K) float; None: the reward is the only one.
        rollouts: (N,) int64; None: each row is one.
        weights: w, K numbers; None: all 1.
        several: what is to be done with them, for the message.
    """
    expected = weighted_reward(reward[:, None] if rewards is None else rewards, weights)
    differs = (reward != expected) & ~(reward.isnan() & expected.isnan())

    def describe(row: int) -> str:
        who = row if rollouts is None else int(rollouts[row])
        return f"{float(reward[row]):g} in place of {float(expected[row]):g} for rollout {who}"

    todo = {
        "sum": "Give the weights to FanOutCollapse, and none to the advantage",
        "decoupled": "Give FanOutCollapse the same weights, and shape no reward where each is compared by "
        "itself: what a stage adds to their sum would be lost",
    }
    return Rule(
        differs,
        describe,
        "a rollout's reward, which filters and the report go by, must be its rewards by the weights of the "
        f"advantage; found {{found}}. {todo[several]}",
    )

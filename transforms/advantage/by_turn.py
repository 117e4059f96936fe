"""A turn's return, measured against those of the same turn of the others in its group."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.transforms.checks import (
    Rule,
    as_rewards,
    credit_dtype,
    enforce,
    identity_rules,
    reward_rules,
    same_length,
)
from headrace.transforms.ids import as_ids, first_row
from headrace.transforms.options import one_of, within

from .baselines import BASELINES, Formula
from .grouping import ById
from .layout import fit_rule

TurnBaseline = Literal["leave_one_out", "mean"]
Alone = Literal["return", "zero"]


def turn_advantage(
    reward: Tensor,
    has_turn: Tensor,
    group_id: Tensor,
    rollout_id: Tensor | None = None,
    *,
    outcome: Tensor | None = None,
    discount: float = 1.0,
    baseline: TurnBaseline = "leave_one_out",
    alone: Alone = "return",
) -> Tensor:
    """Measure each turn's return against that of the same turn of the others in the group.

    For turn k of rollout i, with m the rollouts of the group that have a turn k::

        G_ik = Σ_{l≥k} γ^{l−k} r_il

        leave_one_out    A_ik = G_ik − Σ_{j≠i} G_jk / (m − 1)
        mean             A_ik = G_ik − Σ_j G_jk / m

    What the others return from turn k on does not depend on what rollout i does there: leave_one_out is
    unbiased, for any number of turns, if a rollout that is alone at a turn keeps its return. In its place 0
    is a bias against going on where others stop. A mean that includes the rollout itself makes its credit
    (m − 1)/m of what it should be, the less the later the turn. Statistics are float64, by sums that do not
    depend on the order of the rows, and rounded once. One device read, for the checks.

    Args:
        reward: (N, K) float, r of each turn that a row has; what else is in it is not read.
        has_turn: (N, K) bool; each turn of a rollout is on one of its rows.
        group_id: (N,) integers ≥ 0: which rollouts are compared.
        rollout_id: (N,) integers ≥ 0: which rows are one rollout. None: each row is one.
        outcome: (N,) float, paid at a rollout's last turn; its rows agree on it. None: nothing is.
        discount: γ in [0, 1], per turn.
        baseline: what a return is measured from.
        alone: what a rollout gets at a turn that no other of its group has: its ``return``, or ``zero``,
            which is a bias.

    Returns:
        (N, K) in the dtype of `reward`, 0 where a row does not have the turn.

    Raises:
        BatchError: a negative id, a rollout in two groups, a turn on two rows, a number that is not finite.

    Example:
        >>> reward = torch.tensor([[0.0, 4.0], [0.0, 2.0], [3.0, 0.0]])
        >>> has_turn = torch.tensor([[True, True], [True, True], [True, False]])
        >>> turn_advantage(reward, has_turn, torch.tensor([0, 0, 0])).tolist()
        [[1.5, 2.0], [-1.5, -2.0], [0.0, 0.0]]
    """
    groups = as_ids(group_id, "group_id")
    rollouts = torch.arange(len(groups), device=groups.device) if rollout_id is None else rollout_id
    rollouts = as_ids(rollouts, "rollout_id")
    paid = None if outcome is None else as_rewards(outcome)
    same_length(reward=reward, has_turn=has_turn, group_id=groups, rollout_id=rollouts, outcome=paid)
    compare = TurnFormula(discount, baseline, alone)
    credit, rules = compare(reward.detach(), has_turn, groups, rollouts, paid)
    enforce([*rules, fits_rule(credit, credit_dtype(reward), rollouts)])
    return credit.to(credit_dtype(reward))


class TurnFormula:
    """The options of :func:`turn_advantage`, checked, and its arithmetic."""

    def __init__(self, discount: float, baseline: TurnBaseline, alone: Alone):
        self.discount = within("discount", discount, 0, 1)
        self.baseline = one_of("baseline", baseline, get_args(TurnBaseline))
        self.alone = one_of("alone", alone, get_args(Alone))

    def __call__(
        self, reward: Tensor, has_turn: Tensor, groups: Tensor, rollouts: Tensor, outcome: Tensor | None
    ) -> tuple[Tensor, list[Rule]]:
        """(N, K) float64, and what must hold of the rows. No device read."""
        if has_turn.numel() == 0:
            return reward.double(), []
        reward = reward.double().masked_fill(~has_turn, 0.0)
        first = first_row(rollouts)
        rows = torch.zeros_like(has_turn, dtype=torch.int64).index_add_(0, first, has_turn.long())
        rules = identity_rules(rollouts, groups, first)
        rules += [_finite(reward, rollouts), _once(has_turn & (rows.index_select(0, first) > 1), rollouts)]
        if outcome is not None:
            rules += reward_rules(outcome, rollouts, first, siblings_agree=True)
            reward = reward + _at_last_turn(outcome, rows, first, has_turn)
        returns = _to_go(reward, first, self.discount)
        return self._compare(returns, has_turn, first_row(groups)).masked_fill(~has_turn, 0.0), rules

    def _compare(self, returns: Tensor, has_turn: Tensor, group_first: Tensor) -> Tensor:
        """(N, K), each return against those of its group's at the same turn."""
        turns = returns.shape[1]
        label = group_first[:, None] * turns + torch.arange(turns, device=returns.device)
        grouping = ById(returns.flatten(), label.flatten(), label.numel(), has_turn.flatten())
        credit = BASELINES[self.baseline](grouping, Formula(self.baseline, scale="none")).view_as(returns)
        lone = grouping.spread(grouping.count == 1).view_as(returns)
        return torch.where(lone, returns, credit) if self.alone == "return" else credit.masked_fill(lone, 0.0)


def _at_last_turn(outcome: Tensor, rows: Tensor, first: Tensor, has_turn: Tensor) -> Tensor:
    """(N, K): a rollout's outcome at its last turn, on the row that has it; `rows` (N, K) at first rows."""
    number = torch.arange(rows.shape[1], device=rows.device)
    last = torch.where(rows > 0, number, -1).amax(1).index_select(0, first)
    return torch.where(has_turn & (number == last[:, None]), outcome.double()[:, None], 0.0)


def _to_go(reward: Tensor, first: Tensor, discount: float) -> Tensor:
    """(N, K): the discounted return of each row's rollout from each turn on."""
    returns = torch.zeros_like(reward).index_add_(0, first, reward)  # of a turn, which is on one row, exact
    for turn in range(reward.shape[1] - 2, -1, -1):
        returns[:, turn] += discount * returns[:, turn + 1]
    return returns.index_select(0, first)


def _finite(reward: Tensor, rollouts: Tensor) -> Rule:
    return Rule(
        ~reward.isfinite().all(1),
        lambda row: f"{reward[row].tolist()} at row {row} (rollout {int(rollouts[row])})",
        "every turn's reward must be finite; found {found}. Score those turns, or take the rollouts out "
        "before this stage with SampleFilter(action='exclude')",
    )


def _once(twice: Tensor, rollouts: Tensor) -> Rule:
    return Rule(
        twice.any(1),
        lambda row: (
            f"turn {int(twice[row].int().argmax())} of rollout {int(rollouts[row])} also on a row other than "
            f"{row}"
        ),
        "a turn of a rollout is on one row; found {found}. Tokens of an earlier turn that a row repeats as "
        "context have the turn index -1",
    )


def fits_rule(credit: Tensor, dtype: torch.dtype, rollouts: Tensor) -> Rule:
    """Each advantage of a row fits into the dtype that it is rounded to."""
    largest = credit.abs().amax(1) if credit.numel() else credit.new_zeros(len(rollouts))
    return fit_rule(largest, dtype)

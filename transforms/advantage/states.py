"""Groups within a group: the steps of a group's rollouts that started from the same state."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import set_rule
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import as_ids, first_row, first_row_of_pairs, sum_by
from headrace.transforms.options import nested_key, one_of
from headrace.transforms.schema import COUNTED, RETURN, read_written, require
from headrace.transforms.sums import sum_by_in_any_order

from .baselines import EpsMode, Formula, Scale
from .by_turn import Alone
from .group_relative import compare_in_groups

StateBaseline = Literal["mean", "leave_one_out"]


def state_groups(group_id: Tensor, state_id: Tensor) -> Tensor:
    """Number the pairs of group and state: rows of one group in one state share a number.

    Args:
        group_id: (N,) integers.
        state_id: (N,) integers, any labels; equal ones in two groups are two states.

    Returns:
        (N,) int64 ≥ 0, fit to be group ids. No device read.

    Example:
        >>> import torch
        >>> ids = state_groups(torch.tensor([0, 0, 0, 1]), torch.tensor([7, 5, 7, 7]))
        >>> [int(i) for i in first_row(ids)]
        [0, 1, 0, 3]
    """
    return first_row(group_id) * len(group_id) + first_row(state_id)


def leave_rollouts_out(centred: Tensor, state_first: Tensor, own: Tensor) -> Tensor:
    """From deviations about a state's mean, those about the mean of the other rollouts' steps there.

    With d the deviations, which add up to 0 over a state of n steps, m of them of rollout i::

        G_i − Σ_{j of others} G_j / (n − m) = d_i + Σ_{j of i} d_j / (n − m)

    Args:
        centred: (N,) float64, d, or d over a scale.
        state_first: (N,) int64, the first row of each row's state.
        own: (N,) int64, the first row of each row's pair of state and rollout.

    Returns:
        (N,), 0 where no other rollout is. No device read.

    Example:
        >>> import torch
        >>> state, own = torch.tensor([0, 0, 0]), torch.tensor([0, 1, 1])
        >>> leave_rollouts_out(torch.tensor([2.0, -2.0, 0.0], dtype=torch.float64), state, own).tolist()
        [3.0, -4.0, -2.0]
    """
    mine = sum_by(own, torch.ones_like(own))
    others = sum_by(state_first, torch.ones_like(own)) - mine
    total = sum_by_in_any_order(own, centred)
    return (centred + total / others.clamp_min(1)).masked_fill(others == 0, 0.0)


class StateAdvantage(BatchTransform):
    """Add each step's advantage among the steps of its group that started from the same state.

    GiGPO (arXiv:2505.10978, eq. 8 to 10): with G the return from a step on, and the steps of the group's
    rollouts that share an anchor state as the group to compare with, ::

        A ← A + ω · (G − b) / s        s as `scale` says

        mean            b = mean(G in the state)
        leave_one_out   b = mean(G in the state of the other rollouts)

    Every step counts, also two of one rollout. A mean that includes the step itself makes its credit
    (m − 1)/m of what it should be among m steps; leave_one_out is unbiased, if a rollout that is alone in a
    state keeps its return. With the turn's number as `state_key`, segments are compared turn by turn. One
    device read, for the checks.

    Reads `advantage_key`, ``("headrace", "return")``, `group_key`, `state_key`, and `rollout_key` where it
    matters whose steps they are; writes `advantage_key`.

    Args:
        weight: ω.
        baseline: ``mean``, or ``leave_one_out`` of one's own rollout.
        alone: what a rollout adds for a state that no other was in: ``zero``, as GiGPO has it, a bias; or
            its ``return``. Under ``mean`` with ``zero``, steps of one rollout are compared as any others.
        scale: ``group``, ``none``, …, as GroupRelativeAdvantage has it, within a state.
        ddof: 1 or 0.
        eps: ε ≥ 0.
        eps_mode: how ε enters.
        state_key: (N,) or (N, 1) int, the anchor state; any labels.
        advantage_key: (N,) with any trailing ones, float.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a negative id.

    Example:
        >>> StateAdvantage(weight=0.5)
        StateAdvantage(weight=0.5)
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(
        self,
        *,
        weight: float = 1.0,
        baseline: StateBaseline = "mean",
        alone: Alone = "zero",
        scale: Scale = "none",
        ddof: int = 1,
        eps: float = 1e-6,
        eps_mode: EpsMode = "add",
        state_key: NestedKey = "state_id",
        advantage_key: NestedKey = "advantage",
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
    ):
        self.state_key, self.group_key = nested_key(state_key), nested_key(group_key)
        self.advantage_key = nested_key(advantage_key)
        self.rollout_key = nested_key(rollout_key)
        self.baseline = one_of("baseline", baseline, get_args(StateBaseline))
        self.alone = one_of("alone", alone, get_args(Alone))
        if (baseline, scale) == ("leave_one_out", "leave_one_out"):
            raise ValueError(
                "scale='leave_one_out' differs from step to step of a rollout, whose steps leave_one_out "
                "adds up: give another scale, or baseline='mean'"
            )
        rollouts = [self.rollout_key] if self._asks_whose and rollout_key is not None else []
        built_on = (self.state_key, self.group_key, RETURN, COUNTED, *rollouts)
        super().__init__([self.advantage_key, *built_on], [self.advantage_key])
        self.final_keys = built_on
        self.weight, self.scale, self.ddof, self.eps, self.eps_mode = weight, scale, ddof, eps, eps_mode
        self.formula = Formula("mean", scale, ddof, eps, eps_mode)

    @property
    def _asks_whose(self) -> bool:
        """Whether it matters which steps are one rollout's."""
        return (self.baseline, self.alone) != ("mean", "zero")

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Unless the scale is of the batch."""
        return self.formula.within_groups

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add to the advantage."""
        credit = require(batch, self.advantage_key, reader=type(self).__name__, option="advantage_key")
        states = as_ids(self.column(batch, "state_key"), "state_id")
        returns = read_written(batch, RETURN, reader=type(self).__name__, writer="RewardsToGo")
        people = population_of(batch)
        ids = {"groups": self.ids(batch, "group")}
        if self._asks_whose:
            ids["rollouts"] = self.ids(batch, "rollout")
        everyone = people.take({"returns": returns, "states": states}, ids)
        groups, returns = everyone["groups"], everyone["returns"].double()
        steps = state_groups(groups, everyone["states"])
        within, rules = compare_in_groups(returns, steps, formula=self.formula)
        rules.append(set_rule(groups, "group_id", "rows without an id would be compared with one another"))
        if self._asks_whose:
            rollouts = everyone["rollouts"]
            rules.append(set_rule(rollouts, "rollout_id", "rows without an id would be one rollout's"))
            within = self._by_rollout(within, returns, first_row(steps), rollouts)
        more = self.weight * people.put_back(within).double().view_as(credit)
        batch.set(self.advantage_key, (credit + more).to(credit.dtype))
        return Outcome(batch, rules=people.rules(rules))

    def _by_rollout(self, centred: Tensor, returns: Tensor, state_first: Tensor, rollouts: Tensor) -> Tensor:
        """What steps are worth where it matters whose they are."""
        own = first_row_of_pairs(state_first, rollouts)
        if self.baseline == "leave_one_out":
            centred = leave_rollouts_out(centred, state_first, own)
        if self.alone == "zero":
            return centred
        steps = torch.ones_like(own)
        return torch.where(sum_by(state_first, steps) == sum_by(own, steps), returns, centred)

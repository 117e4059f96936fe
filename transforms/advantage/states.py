"""Advantages of steps, compared with other steps of the group that start in the same state."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.checks import require_rewards
from headrace.transforms.columns import ColumnNames
from headrace.transforms.ids import Ids
from headrace.transforms.options import has_effect
from headrace.transforms.rows import Rows
from headrace.transforms.schema import COUNTED, RETURN
from headrace.transforms.stage import BatchTransform

from .baselines import Ddof, EpsMode, Formula, Grouped, Scale, advantage_in_groups
from .by_turn import Alone
from .group_relative import require_fit, require_range

StateBaseline = Literal["mean", "leave_one_out"]


def state_groups(group_id: Tensor, state_id: Tensor) -> Tensor:
    """Number the pairs of group and state. Rows of one group in one state get the same number.

    Args:
        group_id: (N,) integers.
        state_id: (N,) integers, any labels; equal labels in two groups are two states.

    Returns:
        (N,) int64 ≥ 0, which can be used as group ids.

    Example:
        >>> state_groups(torch.tensor([0, 0, 0, 1]), torch.tensor([7, 5, 7, 7])).tolist()
        [1, 0, 1, 2]
    """
    return Ids(group_id).paired_with(Ids(state_id)).of


def leave_rollouts_out(centred: Tensor, states: Ids, own: Ids) -> Tensor:
    """Turn deviations from the state's mean into deviations from the mean of the other rollouts' steps.

    A state has n steps, m of them of rollout i. The deviations d add up to 0 over a state::

        G_i − Σ_{j of others} G_j / (n − m) = d_i + Σ_{j of i} d_j / (n − m)

    Args:
        centred: (N,) float64, d, or d divided by a scale.
        states: state of each row.
        own: pair of state and rollout of each row.

    Returns:
        (N,), 0 if no other rollout has a step in the state.

    Example:
        >>> states, own = Ids(torch.tensor([0, 0, 0])), Ids(torch.tensor([0, 1, 1]))
        >>> leave_rollouts_out(torch.tensor([2.0, -2.0, 0.0], dtype=torch.float64), states, own).tolist()
        [3.0, -4.0, -2.0]
    """
    others = states.spread(states.count) - own.spread(own.count)
    return (centred + own.spread(own.sum(centred)) / others.clamp_min(1)).masked_fill(others == 0, 0.0)


class StateAdvantage(BatchTransform, columns=("state", "advantage", "group", "rollout")):
    """Add the advantage of each step among the steps of its group that start in the same state.

    GiGPO (arXiv:2505.10978, eq. 8 to 10). G is the return from a step on. It is compared with the steps of
    the group's rollouts that have the same anchor state::

        A ← A + ω · (G − b) / s        s as `scale` says

        mean            b = mean(G in the state)
        leave_one_out   b = mean(G in the state of the other rollouts)

    Every step counts, also two steps of one rollout. A mean over m steps that includes the step itself makes
    its advantage (m − 1)/m of the unbiased one. ``leave_one_out`` with ``alone="return"`` is unbiased. If
    `state_key` is the number of the turn, segments are compared turn by turn.

    Reads `advantage_key`, ``("headrace", "return")``, `group_key` and `state_key`. Reads `rollout_key` unless
    `baseline` is ``mean`` and `alone` is ``zero``. Writes `advantage_key`.

    Args:
        weight: ω.
        baseline: ``mean``; or ``leave_one_out``, which leaves out the steps of the same rollout.
        alone: what is added for a state that only one rollout visits: ``zero``, as in GiGPO, which is biased;
            or its ``return``. With ``mean`` and ``zero``, steps of one rollout are compared like any others.
        scale: ``group``, ``none``, …, as in GroupRelativeAdvantage, within a state.
        ddof: 1 or 0, for a `scale`.
        eps: ε ≥ 0, for a `scale`.
        eps_mode: how ε is added, for a `scale`.
        names: other names of columns, such as `state_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: an id is negative.

    Example:
        >>> StateAdvantage(weight=0.5)
        StateAdvantage(weight=0.5)
    """

    def __init__(
        self,
        *,
        weight: float = 1.0,
        baseline: StateBaseline = "mean",
        alone: Alone = "zero",
        scale: Scale = "none",
        ddof: Ddof = 1,
        eps: float = 1e-6,
        eps_mode: EpsMode = "add",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.baseline = baseline
        self.alone = alone
        if (baseline, scale) == ("leave_one_out", "leave_one_out"):
            raise ValueError(
                "baseline='leave_one_out' needs one scale for all steps of a rollout in a state, which "
                "scale='leave_one_out' does not give: set another scale, or baseline='mean'"
            )
        rollouts = self.rollout_key if self._asks_whose else None
        built_on = (self.state_key, self.group_key, RETURN, COUNTED, rollouts)
        super().__init__([self.advantage_key, *built_on], [self.advantage_key])
        self.final_keys = tuple(self.in_keys[1:])
        self.weight, self.scale, self.ddof, self.eps, self.eps_mode = weight, scale, ddof, eps, eps_mode
        self.formula = Formula("mean", scale, ddof, eps, eps_mode)
        for option in ("ddof", "eps", "eps_mode"):
            has_effect(StateAdvantage, option, getattr(self, option), scale != "none", "scale")

    @property
    def _asks_whose(self) -> bool:
        """Whether the rollout of each step is needed."""
        return (self.baseline, self.alone) != ("mean", "zero")

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """False if the scale uses the whole batch."""
        return self.formula.within_groups

    def decide(self, rows: Rows) -> None:
        """Add the term to the advantage."""
        credit, some = rows.number("advantage"), rows.where(rows.counted)
        returns = some[RETURN]
        states = some.groups.paired_with(Ids(some.integers("state", "state_id")))
        require_rewards(some, returns, siblings_agree=False)
        require_range(some, returns, self.formula)
        steps = Grouped(returns, states)
        within = steps.unsorted(advantage_in_groups(steps, self.formula))
        if self._asks_whose:
            rollouts = some.ids("rollout", checked=False)
            some.require_set(rollouts, "rollout_id", "rows without an id would be taken for one rollout")
            own = states.paired_with(rollouts)
            if self.baseline == "leave_one_out":
                within = leave_rollouts_out(within, states, own)
            if self.alone == "return":
                lone = states.spread(states.count) == own.spread(own.count)
                within = torch.where(lone, returns, within)
        require_fit(some, within, rows.dtype(RETURN))
        rows["advantage"] = credit + rows.from_arrival(some.to_arrival(self.weight * within))

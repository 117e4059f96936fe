"""Groups within a group: the steps of a group's rollouts that started from the same state."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.ids import Ids
from headrace.transforms.options import has_effect, one_of
from headrace.transforms.required import require_rewards
from headrace.transforms.rows import Rows
from headrace.transforms.schema import COUNTED, RETURN
from headrace.transforms.stage import BatchTransform

from .baselines import EpsMode, Formula, Grouped, Scale, advantage_in_groups
from .by_turn import Alone
from .group_relative import require_fit, require_range

StateBaseline = Literal["mean", "leave_one_out"]


def state_groups(group_id: Tensor, state_id: Tensor) -> Tensor:
    """Number the pairs of group and state: rows of one group in one state share a number.

    Args:
        group_id: (N,) integers.
        state_id: (N,) integers, any labels; equal ones in two groups are two states.

    Returns:
        (N,) int64 ≥ 0, fit to be group ids.

    Example:
        >>> state_groups(torch.tensor([0, 0, 0, 1]), torch.tensor([7, 5, 7, 7])).tolist()
        [1, 0, 1, 2]
    """
    return Ids(group_id).paired_with(Ids(state_id)).of


def leave_rollouts_out(centred: Tensor, states: Ids, own: Ids) -> Tensor:
    """From deviations about a state's mean, those about the mean of the other rollouts' steps there.

    With d the deviations, which add up to 0 over a state of n steps, m of them of rollout i::

        G_i − Σ_{j of others} G_j / (n − m) = d_i + Σ_{j of i} d_j / (n − m)

    Args:
        centred: (N,) float64, d, or d over a scale.
        states: of the rows.
        own: pairs of state and rollout.

    Returns:
        (N,), 0 where no other rollout is.

    Example:
        >>> states, own = Ids(torch.tensor([0, 0, 0])), Ids(torch.tensor([0, 1, 1]))
        >>> leave_rollouts_out(torch.tensor([2.0, -2.0, 0.0], dtype=torch.float64), states, own).tolist()
        [3.0, -4.0, -2.0]
    """
    others = states.spread(states.count) - own.spread(own.count)
    return (centred + own.spread(own.sum(centred)) / others.clamp_min(1)).masked_fill(others == 0, 0.0)


class StateAdvantage(BatchTransform, columns=("state", "advantage", "group", "rollout")):
    """Add each step's advantage among the steps of its group that started from the same state.

    GiGPO (arXiv:2505.10978, eq. 8 to 10): with G the return from a step on, and the steps of the group's
    rollouts that share an anchor state as the group to compare with, ::

        A ← A + ω · (G − b) / s        s as `scale` says

        mean            b = mean(G in the state)
        leave_one_out   b = mean(G in the state of the other rollouts)

    Every step counts, also two of one rollout. A mean that includes the step itself makes its credit
    (m − 1)/m of what it should be among m steps; leave_one_out is unbiased, if a rollout that is alone in a
    state keeps its return. With the turn's number as `state_key`, segments are compared turn by turn.

    Reads `advantage_key`, ``("headrace", "return")``, `group_key`, `state_key`, and `rollout_key` where it
    matters whose steps they are; writes `advantage_key`.

    Args:
        weight: ω.
        baseline: ``mean``, or ``leave_one_out`` of one's own rollout.
        alone: what a rollout adds for a state that no other was in: ``zero``, as GiGPO has it, a bias; or
            its ``return``. Under ``mean`` with ``zero``, steps of one rollout are compared as any others.
        scale: ``group``, ``none``, …, as GroupRelativeAdvantage has it, within a state.
        ddof: 1 or 0, for a `scale`.
        eps: ε ≥ 0, for a `scale`.
        eps_mode: how ε enters, for a `scale`.
        names: other names of columns, such as `state_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a negative id.

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
        ddof: int = 1,
        eps: float = 1e-6,
        eps_mode: EpsMode = "add",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.baseline = one_of("baseline", baseline, get_args(StateBaseline))
        self.alone = one_of("alone", alone, get_args(Alone))
        if (baseline, scale) == ("leave_one_out", "leave_one_out"):
            raise ValueError(
                "scale='leave_one_out' differs from step to step of a rollout, whose steps leave_one_out "
                "adds up: give another scale, or baseline='mean'"
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
        """Whether it matters which steps are one rollout's."""
        return (self.baseline, self.alone) != ("mean", "zero")

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Unless the scale is of the batch."""
        return self.formula.within_groups

    def decide(self, rows: Rows) -> None:
        """Add to the advantage."""
        credit, some = rows.number("advantage"), rows.statistics
        returns = some[RETURN]
        states = some.groups.paired_with(Ids(some.integers("state", "state_id")))
        require_rewards(some, returns, siblings_agree=False)
        require_range(some, returns, self.formula, rows.dtype(RETURN))
        steps = Grouped(returns, states)
        within = steps.unsorted(advantage_in_groups(steps, self.formula))
        if self._asks_whose:
            rollouts = some.ids("rollout", checked=False)
            some.require_set(rollouts, "rollout_id", "rows without an id would be one rollout's")
            own = states.paired_with(rollouts)
            if self.baseline == "leave_one_out":
                within = leave_rollouts_out(within, states, own)
            if self.alone == "return":
                lone = states.spread(states.count) == own.spread(own.count)
                within = torch.where(lone, returns, within)
        require_fit(some, within, rows.dtype(RETURN))
        rows["advantage"] = credit + rows.from_statistics(self.weight * within)

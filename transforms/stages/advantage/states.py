"""Advantages of turns: a turn is compared with the turns of its group that start in its state."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchTransform, ColumnNames, Ids, Rows, require_rewards
from headrace.transforms.table.schema import COUNTED, RETURN

from .baselines import Formula, Grouped, Scale, advantage_in_groups
from .group_relative import require_fit, require_range


def state_groups(group_id: Tensor, state_id: Tensor) -> Tensor:
    """Number the pairs of group and state. Rows of one group in one state get the same number.

    Args:
        group_id: (N,) integers.
        state_id: (N,) integers, any labels; equal labels in two groups are two states.

    Returns:
        (N,) int64 ≥ 0, which can be used as group ids.

    Example:
        >>> import torch
        >>> state_groups(torch.tensor([0, 0, 0, 1]), torch.tensor([7, 5, 7, 7])).tolist()
        [1, 0, 1, 2]
    """
    return Ids(group_id).paired_with(Ids(state_id)).of


class StateAdvantage(BatchTransform, columns=("state", "advantage", "group")):
    """Add the advantage of each turn among the turns of its group that start in the same state.

    This is GiGPO (arXiv:2505.10978, eq. 8 to 10). The return G from a turn on is compared with the returns of
    all turns of the group in the same state::

        A ← A + ω · (G − mean(G in the state)) / s        s as `scale` says

    Every turn counts, also two turns of one rollout. As in GiGPO, the turn itself is in the mean, and the
    turn in a state that is visited once gets 0. This is a bias: for m turns in a state, the advantage is
    (m − 1)/m of the unbiased one. If `state_key` is the number of the turn, segments are compared turn by
    turn.

    Reads `advantage_key`, ``("headrace", "return")``, `group_key` and `state_key`. Writes `advantage_key`.

    Args:
        weight: ω.
        scale: ``group``, ``none``, …, as in GroupRelativeAdvantage, within a state.
        names: other names of columns, such as `state_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: an id is negative.

    Example:
        >>> StateAdvantage(weight=0.5)
        StateAdvantage(weight=0.5)
    """

    def __init__(self, *, weight: float, scale: Scale = "none", **names: Unpack[ColumnNames]):
        self.name_columns(names)
        built_on = (self.state_key, self.group_key, RETURN, COUNTED)
        super().__init__([self.advantage_key, *built_on], [self.advantage_key])
        self.final_keys = tuple(self.in_keys[1:])
        self.weight, self.scale, self.formula = weight, scale, Formula("mean", scale)

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
        require_fit(some, within, rows.dtype(RETURN))
        rows["advantage"] = credit + rows.from_arrival(some.to_arrival(self.weight * within))

"""Groups within a group: the steps of a group's rollouts that started from the same state."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import set_rule
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import as_ids, first_row
from headrace.transforms.options import nested_key
from headrace.transforms.schema import COUNTED, RETURN, read_written, require

from .baselines import EpsMode, Formula, Scale
from .group_relative import compare_in_groups


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


class StateAdvantage(BatchTransform):
    """Add each step's advantage among the steps of its group that started from the same state.

    GiGPO (arXiv:2505.10978, eq. 8 to 10): with G the return from a step on, and the steps of the group's
    rollouts that share an anchor state as the group to compare with, ::

        A ← A + ω · (G − mean(G in the state)) / s        s as `scale` says

    A state that one step alone was in adds 0. Every step counts, also two of one rollout. With the turn's
    number as `state_key`, segments are compared turn by turn. One device read, for the checks.

    Reads `advantage_key`, ``("headrace", "return")``, `group_key`, `state_key`; writes `advantage_key`.

    Args:
        weight: ω.
        scale: ``group``, ``none``, …, as GroupRelativeAdvantage has it, within a state.
        ddof: 1 or 0.
        eps: ε ≥ 0.
        eps_mode: how ε enters.
        state_key: (N,) or (N, 1) int, the anchor state; any labels.
        advantage_key: (N,) with any trailing ones, float.
        group_key: (N,) or (N, 1) int ≥ 0.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a negative group id.

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
        scale: Scale = "none",
        ddof: int = 1,
        eps: float = 1e-6,
        eps_mode: EpsMode = "add",
        state_key: NestedKey = "state_id",
        advantage_key: NestedKey = "advantage",
        group_key: NestedKey = "group_id",
    ):
        self.state_key, self.group_key = nested_key(state_key), nested_key(group_key)
        self.advantage_key = nested_key(advantage_key)
        built_on = (self.state_key, self.group_key, RETURN, COUNTED)
        super().__init__([self.advantage_key, *built_on], [self.advantage_key])
        self.final_keys = built_on
        self.weight, self.scale, self.ddof, self.eps, self.eps_mode = weight, scale, ddof, eps, eps_mode
        self.formula = Formula("mean", scale, ddof, eps, eps_mode)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add to the advantage."""
        credit = require(batch, self.advantage_key, reader=type(self).__name__, option="advantage_key")
        states = as_ids(self.column(batch, "state_key"), "state_id")
        returns = read_written(batch, RETURN, reader=type(self).__name__, writer="RewardsToGo")
        people = population_of(batch)
        everyone = people.take({"returns": returns, "states": states}, {"groups": self.ids(batch, "group")})
        groups = everyone["groups"]
        rule = set_rule(groups, "group_id", "rows without an id would be compared with one another")
        steps = state_groups(groups, everyone["states"])
        within, rules = compare_in_groups(everyone["returns"], steps, formula=self.formula)
        more = self.weight * people.put_back(within).double().view_as(credit)
        batch.set(self.advantage_key, (credit + more).to(credit.dtype))
        return Outcome(batch, rules=people.rules([rule, *rules]))

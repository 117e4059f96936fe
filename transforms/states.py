"""Groups within a group: the steps of a group's rollouts that started from the same state."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, nested_key, require, written_column
from .collapse import as_rewards
from .columns import COUNTED, RETURN
from .counted import over_counted
from .formula import EpsMode, Scale, check_options
from .ids import as_ids, first_row
from .relative import group_relative_advantage
from .rules import explain, set_rule
from .turns import rewards_to_go


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


class RewardsToGo(BatchTransform):
    """Write each segment's discounted return to the end of its rollout (:func:`rewards_to_go`).

    Reads `reward_key`, each segment's own reward, `rollout_key`, `turn_key` where it is given; writes
    ``("headrace", "return")`` (N,).

    Args:
        discount: γ in [0, 1], per segment.
        reward_key: (N,), (N, 1) or (N, 1, 1) float.
        rollout_key: (N,) or (N, 1) int ≥ 0.
        turn_key: (N,) or (N, 1) int that orders a rollout's segments; None: the order of the rows.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: two segments of a rollout have the same turn.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"rollout_id": [3, 3], ("next", "reward"): [0.0, 4.0]}, batch_size=[2])
        >>> RewardsToGo(discount=0.5)(td)["headrace", "return"].tolist()
        [2.0, 4.0]
    """

    def __init__(
        self,
        *,
        discount: float = 1.0,
        reward_key: NestedKey = ("next", "reward"),
        rollout_key: NestedKey = "rollout_id",
        turn_key: NestedKey | None = None,
    ):
        keys = [nested_key(k) for k in (reward_key, rollout_key, turn_key)]
        super().__init__([k for k in keys if k is not None], [RETURN])
        self.reward_key, self.rollout_key, self.turn_key = keys
        if not 0 <= discount <= 1:
            raise ValueError(f"discount must be in [0, 1]; got {discount}")
        self.discount = discount

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the return."""
        reward = as_rewards(self.column(batch, "reward_key"))
        rollouts = as_ids(self.column(batch, "rollout_key"), "rollout_id")
        turn = None if self.turn_key is None else as_ids(self.column(batch, "turn_key"), "turn")
        return batch.set(RETURN, rewards_to_go(reward, rollouts, turn, discount=self.discount))


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
        keys = [nested_key(k) for k in (state_key, advantage_key, group_key)]
        super().__init__([*keys, RETURN, COUNTED], [keys[1]])
        self.final_keys = (keys[0], keys[2], RETURN, COUNTED)
        self.state_key, self.advantage_key, self.group_key = keys
        self.weight, self.scale, self.ddof, self.eps, self.eps_mode = weight, scale, ddof, eps, eps_mode
        check_options(
            baseline="mean", scale=scale, ddof=ddof, eps=eps, eps_mode=eps_mode, singleton="zero", clip=None
        )

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Add to the advantage."""
        credit = require(batch, self.advantage_key, reader=type(self).__name__, option="advantage_key")
        states = as_ids(self.column(batch, "state_key"), "state_id")
        groups = as_ids(self.column(batch, "group_key"), "group_id")
        returns = written_column(batch, RETURN, reader=type(self).__name__, writer="RewardsToGo")
        within = over_counted(batch, self._within, returns=returns, groups=groups, states=states)
        return batch.set(self.advantage_key, credit + self.weight * within.view_as(credit))

    def _within(self, returns: Tensor, groups: Tensor, states: Tensor) -> Tensor:
        explain([set_rule(groups, "group_id", "an unset id would compare strangers with one another")])
        return group_relative_advantage(
            returns,
            state_groups(groups, states),
            scale=self.scale,
            ddof=self.ddof,
            eps=self.eps,
            eps_mode=self.eps_mode,
        )

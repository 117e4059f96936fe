"""Credit for the turns of a rollout, where turns are rows."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import (
    as_rewards,
    at_least_float32,
    end_rules,
    enforce,
    identity_rules,
    turn_rules,
)
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import as_ids, first_row, number_of, places_by_turn, sum_by
from headrace.transforms.options import nested_key, within
from headrace.transforms.schema import COUNTED, DONE, EXPECTED_SEGMENTS, RETURN, require


def turns_to_go(rollout_id: Tensor, turn: Tensor | None = None) -> Tensor:
    """How many of a rollout's segments come after each row.

    Args:
        rollout_id: (N,) integers: which rows are one rollout.
        turn: (N,) integers that order the segments of a rollout, without ties; None: the order of the rows.

    Returns:
        (N,) int64 ≥ 0, 0 on the last segment of each rollout. No device read but for the check of `turn`.

    Raises:
        BatchError: two segments of a rollout have the same turn, with the ids.

    Example:
        >>> turns_to_go(torch.tensor([5, 9, 5, 5])).tolist()
        [2, 0, 1, 0]
    """
    first, place = _places(rollout_id, turn)
    return sum_by(first, torch.ones_like(first)) - 1 - place


def rewards_to_go(
    reward: Tensor, rollout_id: Tensor, turn: Tensor | None = None, *, discount: float = 1.0
) -> Tensor:
    """The discounted return from each segment on: ``G_t = Σ_{u≥t} γ^{u−t} r_u`` over a rollout's segments.

    Accumulates in float64. One device read, for the largest number of segments.

    Args:
        reward: (N,) float, each segment's own.
        rollout_id: (N,) integers.
        turn: (N,) integers that order the segments of a rollout; None: the order of the rows.
        discount: γ in [0, 1], per segment.

    Returns:
        (N,) in the dtype of `reward`.

    Raises:
        BatchError: two segments of a rollout have the same turn, with the ids.

    Example:
        >>> rewards_to_go(torch.tensor([1.0, 7.0, 2.0]), torch.tensor([0, 4, 0]), discount=0.5).tolist()
        [2.0, 7.0, 2.0]
    """
    if len(reward) == 0:
        return reward
    first, place = _places(rollout_id, turn)
    turns = int(place.amax()) + 1
    line = number_of(first)  # one per rollout; turns that it does not have stay 0
    table = torch.zeros(len(first), turns, dtype=torch.float64, device=reward.device)
    table[line, place] = reward.double()
    for t in range(turns - 2, -1, -1):
        table[:, t] += discount * table[:, t + 1]
    return table[line, place].to(reward.dtype)


def _places(rollout_id: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """(N,) first row of each row's rollout, and (N,) place of each row among its rollout's, from 0."""
    first = first_row(rollout_id)
    enforce(turn_rules(rollout_id, first, turn))
    return first, places_by_turn(first, turn).place


class RewardsToGo(BatchTransform):
    """Write each segment's discounted return to the end of its rollout (:func:`rewards_to_go`).

    Reads `reward_key`, each segment's own reward, `rollout_key`, `turn_key` where it is given; writes
    ``("headrace", "return")`` (N,).

    Args:
        discount: γ in [0, 1], per segment.
        reward_key: (N,), (N, 1) or (N, 1, 1) float.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout.
        turn_key: (N,) or (N, 1) int that orders a rollout's segments; None: the order of the rows.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: two segments of a rollout have the same turn; a rollout ends twice.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"rollout_id": [3, 3], ("next", "reward"): [0.0, 4.0]}, batch_size=[2])
        >>> RewardsToGo(discount=0.5)(td)["headrace", "return"].tolist()
        [2.0, 4.0]
    """

    keeps_rows = True
    within_groups = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(
        self,
        *,
        discount: float = 1.0,
        reward_key: NestedKey = ("next", "reward"),
        rollout_key: NestedKey | None = "rollout_id",
        turn_key: NestedKey | None = None,
    ):
        self.reward_key = nested_key(reward_key)
        self.rollout_key, self.turn_key = nested_key(rollout_key), nested_key(turn_key)
        reads = [self.reward_key, self.rollout_key, self.turn_key, DONE, EXPECTED_SEGMENTS]
        super().__init__(reads, [RETURN])
        self.discount = within("discount", discount, 0, 1)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add the return."""
        reward = at_least_float32(as_rewards(self.column(batch, "reward_key")))
        if (counted := batch.get(COUNTED, None)) is not None:
            reward = reward.masked_fill(~counted, 0.0)  # who is out of the statistics pays nobody
        rollouts = self.ids(batch, "rollout")
        people, ends = population_of(batch, every=True), self.unseen_ends(batch)
        everyone = people.take({"reward": reward} | ends | _turn(self, batch), {"rollouts": rollouts})
        rollouts, turn = everyone["rollouts"], everyone.get("turn")
        returns = rewards_to_go(everyone["reward"], rollouts, turn, discount=self.discount)
        batch.set(RETURN, people.put_back(returns))
        first = first_row(rollouts)
        rules = identity_rules(rollouts, None, first)
        rules += end_rules(rollouts, first, **{name: everyone[name] for name in ends})
        return Outcome(batch, rules=people.rules(rules))


class TurnDiscount(BatchTransform):
    """Discount a rollout's advantage back over its segments: ``A_t · γ^(turns to go)``.

    Reads `rollout_key`, `turn_key` where it is given; reads and writes `advantage_key`.

    Args:
        discount: γ in [0, 1], per segment.
        advantage_key: (N,) with any trailing ones, float.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.
        turn_key: (N,) or (N, 1) int that orders a rollout's segments; None: the order of the rows.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as :func:`turns_to_go`.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"advantage": [1.0, 1.0], "rollout_id": [3, 3]}, batch_size=[2])
        >>> TurnDiscount(discount=0.5)(td)["advantage"].tolist()
        [0.5, 1.0]
    """

    keeps_rows = True
    within_groups = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(
        self,
        *,
        discount: float,
        advantage_key: NestedKey = "advantage",
        rollout_key: NestedKey | None = "rollout_id",
        turn_key: NestedKey | None = None,
    ):
        self.advantage_key = nested_key(advantage_key)
        self.rollout_key, self.turn_key = nested_key(rollout_key), nested_key(turn_key)
        super().__init__([self.advantage_key, self.rollout_key, self.turn_key], [self.advantage_key])
        self.discount = within("discount", discount, 0, 1)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Rewrite the advantage."""
        rollouts = self.ids(batch, "rollout")
        credit = require(batch, self.advantage_key, reader=type(self).__name__, option="advantage_key")
        people = population_of(batch, every=True)
        everyone = people.take(_turn(self, batch), {"rollouts": rollouts})
        rollouts = everyone["rollouts"]
        to_go = people.put_back(turns_to_go(rollouts, everyone.get("turn")))
        factor = torch.full_like(to_go, self.discount, dtype=torch.float64).pow(to_go)
        credit = (credit * factor.view(-1, *[1] * (credit.ndim - 1))).to(credit.dtype)
        return Outcome(
            batch.set(self.advantage_key, credit),
            rules=people.rules(identity_rules(rollouts, None, first_row(rollouts))),
        )


def _turn(stage: RewardsToGo | TurnDiscount, batch: TensorDictBase) -> dict[str, Tensor]:
    """What orders the segments of a rollout, where the batch says."""
    return {} if stage.turn_key is None else {"turn": as_ids(stage.column(batch, "turn_key"), "turn")}

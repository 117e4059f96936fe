"""Returns and discounts per turn, if each row is a turn of its rollout."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchTransform, ColumnNames, Ids, Rows, places_on_arrival
from headrace.transforms.table.ends import require_unseen_ends
from headrace.transforms.table.options import takes_options, within
from headrace.transforms.table.schema import FINISHED, RETURN, SEGMENTS
from headrace.transforms.table.tokens import change_advantage


def turns_to_go(rollout_id: Tensor, turn: Tensor | None = None) -> Tensor:
    """Count the segments of the rollout that come after each row.

    Args:
        rollout_id: (N,) integers; rows with the same id are one rollout.
        turn: (N,) integers, the order of a rollout's segments, without ties; None: the order of the rows.

    Returns:
        (N,) int64 ≥ 0, 0 on the last segment of each rollout.

    Raises:
        BatchError: two segments of a rollout have the same turn; the message lists the ids.

    Example:
        >>> turns_to_go(torch.tensor([5, 9, 5, 5])).tolist()
        [2, 0, 1, 0]
    """
    rollouts, place = places_on_arrival(Rows.of(rollout=rollout_id, turn=turn), checked=False)
    return (rollouts.spread(rollouts.count) - 1 - place).to(rollout_id.device)


@takes_options
def rewards_to_go(
    reward: Tensor, rollout_id: Tensor, turn: Tensor | None = None, *, discount: float = 1.0
) -> Tensor:
    """Compute the discounted return from each segment on: ``G_t = Σ_{u≥t} γ^{u−t} r_u``.

    The sum is over the segments of the rollout, in float64.

    Args:
        reward: (N,) float, the reward of each segment.
        rollout_id: (N,) integers.
        turn: (N,) integers, the order of a rollout's segments; None: the order of the rows.
        discount: γ in [0, 1], per segment.

    Returns:
        (N,) in the dtype of `reward`.

    Raises:
        BatchError: two segments of a rollout have the same turn; the message lists the ids.

    Example:
        >>> rewards_to_go(torch.tensor([1.0, 7.0, 2.0]), torch.tensor([0, 4, 0]), discount=0.5).tolist()
        [2.0, 7.0, 2.0]
    """
    if len(reward) == 0:
        return reward
    rollouts, place = places_on_arrival(Rows.of(rollout=rollout_id, turn=turn), checked=False)
    return _discounted(reward.cpu(), rollouts, place, discount).to(reward)


def _discounted(reward: Tensor, rollouts: Ids, place: Tensor, discount: float) -> Tensor:
    """(N,) float64: the returns of rows. `place` (N,) is the index of each row in its rollout."""
    rewards = torch.zeros(rollouts.n, int(place.amax()) + 1, dtype=torch.float64)
    rewards[rollouts.of, place] = reward.double()  # missing turns stay 0
    return returns_from(rewards, discount)[rollouts.of, place]


def returns_from(rewards: Tensor, discount: float) -> Tensor:
    """(n, K) returns of (n, K) rewards, one per turn: ``G_k = r_k + γ G_{k+1}``."""
    returns = rewards.clone()
    for turn in range(returns.shape[1] - 2, -1, -1):
        returns[:, turn] += discount * returns[:, turn + 1]
    return returns


class RewardsToGo(BatchTransform, columns=("reward", "rollout", "turn", "done", "expected_segments")):
    """Write the discounted return from each segment to the end of its rollout (:func:`rewards_to_go`).

    A row that an earlier stage dropped still counts as a segment, with reward 0.

    Reads `reward_key`, the reward of each segment, `rollout_key`, `turn_key` if it is set, and, like
    FanOutCollapse, ``("next", "done")``. Writes ``("headrace", "return")`` (N,).

    Args:
        discount: γ in [0, 1], per segment.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: two segments of a rollout have the same turn, a rollout ends twice, or some of its rows
            were dropped before this pipeline.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"rollout_id": [3, 3], ("next", "reward"): [0.0, 4.0]}, batch_size=[2])
        >>> RewardsToGo(discount=0.5)(td)["headrace", "return"].tolist()
        [2.0, 4.0]
    """

    within_groups = True

    def __init__(self, *, discount: float = 1.0, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        ends = [self.done_key, self.expected_segments_key]
        reads = [self.reward_key, self.rollout_key, self.turn_key, SEGMENTS, *ends]
        super().__init__(reads, [RETURN])
        self.discount = within("discount", discount, 0, 1)

    def decide(self, rows: Rows) -> None:
        """Write the return."""
        reward, dtype = rows.exactly(rows.number("reward")), rows.dtype("reward")
        if rows.has("done") and not rows.has(FINISHED):  # no gate has checked the ends
            require_unseen_ends(rows)
        if rows.counted is not None:
            reward = reward.masked_fill(~rows.counted, 0.0)  # rewards of excluded rows do not count
        rollouts, place = places_on_arrival(rows)
        returns = _discounted(rows.to_arrival(reward), rollouts, place, self.discount)
        dtype = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64
        rows.put(RETURN, rows.from_arrival(returns), dtype=dtype, ndim=1)


class TurnDiscount(BatchTransform, columns=("advantage", "rollout", "turn")):
    """Discount the advantage of a rollout over its segments: ``A_t · γ^(turns to go)``.

    Segments are counted as they arrived, including those that were dropped later.

    Reads `rollout_key`, and `turn_key` if it is set. Reads and writes `advantage_key`.

    Args:
        discount: γ in [0, 1], per segment.
        names: other names of columns, such as `advantage_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: as :func:`turns_to_go`; also if rows of a rollout were merged, or were dropped before this
            pipeline.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"advantage": [1.0, 1.0], "rollout_id": [3, 3]}, batch_size=[2])
        >>> TurnDiscount(discount=0.5)(td)["advantage"].tolist()
        [0.5, 1.0]
    """

    within_groups = True

    def __init__(self, *, discount: float, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        reads = [self.advantage_key, self.rollout_key, self.turn_key, SEGMENTS]
        super().__init__(reads, [self.advantage_key])
        self.discount = within("discount", discount, 0, 1)

    def decide(self, rows: Rows) -> None:
        """Rewrite the advantage."""
        rollouts, place = places_on_arrival(rows)
        to_go = rows.from_arrival(rollouts.spread(rollouts.count) - 1 - place)
        factor = torch.full_like(to_go, self.discount, dtype=torch.float64).pow(to_go)
        change_advantage(rows, lambda advantage, factor: advantage * factor, factor=factor)

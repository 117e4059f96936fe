"""Fan-out: the segments of one rollout get one reward and count once in the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import (
    BatchError,
    BatchTransform,
    ColumnNames,
    Missing,
    Rows,
    as_rewards,
    count_of,
    require_identity,
    require_rewards,
    weighted_reward,
)
from headrace.transforms.table.checks import describe_rollout, require_turns
from headrace.transforms.table.ends import require_unseen_ends
from headrace.transforms.table.ids import mean_of
from headrace.transforms.table.options import at_least, takes_options
from headrace.transforms.table.places import require_edge
from headrace.transforms.table.rewards import factors_of
from headrace.transforms.table.schema import (
    COUNTED,
    FINISHED,
    IN_LOSS,
    IS_FIRST_SEGMENT,
    LENGTH,
    REWARD,
    REWARDS,
    SEGMENTS,
)

Reduction = Literal["shared", "first", "last", "sum", "mean", "max"]


class Collapsed(NamedTuple):
    """The reward of each rollout, on each of its rows."""

    reward: Tensor
    """(N,) in the dtype of the given rewards."""
    is_first_segment: Tensor
    """(N,) bool, True on the first row of each rollout."""


@takes_options
def collapse_fan_out(
    reward: Tensor | Sequence[float],
    rollout_id: Tensor | Sequence[int],
    group_id: Tensor | Sequence[int] | None = None,
    *,
    reduce: Reduction = "shared",
    turn: Tensor | Sequence[int] | None = None,
) -> Collapsed:
    """Reduce the rewards of each rollout's segments to one reward, and mark the first segment.

    S(k) are the rows of rollout k, in row order or sorted by `turn`::

        shared   R_k = r_i, which must be the same for all i ∈ S(k)
        first    R_k = r_{min S(k)}        last   R_k = r_{max S(k)}
        sum      R_k = Σ_{i∈S(k)} r_i      mean   R_k = Σ_{i∈S(k)} r_i / |S(k)|      max  R_k = max r_i

    Sums are computed in float64, do not depend on the order of the rows, and are rounded once.

    Args:
        reward: (N,) floats, one per row.
        rollout_id: (N,) integers ≥ 0; rows with the same id are segments of one rollout, adjacent or not.
        group_id: (N,) integers ≥ 0, to check that no rollout is in two groups; None: not checked.
        reduce: one of the reductions above.
        turn: (N,) integers, the order of a rollout's segments, without ties; None: the order of the rows.

    Raises:
        BatchError: an id is negative, a rollout is in two groups, a turn occurs twice in a rollout, a reward
            is not finite, or the segments of a rollout differ under ``shared``. The message lists ids.

    Example:
        >>> collapse_fan_out([1.0, 2.0, 4.0], [5, 8, 5], reduce="sum").reward.tolist()
        [5.0, 2.0, 5.0]
    """
    reward = as_rewards(reward)
    rows = Rows.of(reward=reward, rollout=rollout_id, group=group_id, turn=turn)
    if len(reward) == 0:
        return Collapsed(reward, torch.empty_like(reward, dtype=torch.bool))
    require_identity(rows)
    collapsed = collapse_column(rows, rows["reward"], reduce)
    return Collapsed(collapsed.to(reward.dtype).to(reward.device), rows.rollouts.is_first.to(reward.device))


def collapse_column(rows: Rows, reward: Tensor, how: Reduction) -> Tensor:
    """Check (M,) float64 rewards of rows, and return (M,) float64, the reward of each row's rollout."""
    rollouts = rows.rollouts
    turn = rows.integers("turn", "turn") if rows.has("turn") else None
    if turn is not None:
        require_turns(rows, turn)
    require_rewards(rows, reward, siblings_agree=how == "shared")
    if rollouts.n == len(reward):
        return reward
    if how in ("first", "last") and turn is not None:
        edge = rollouts.min(turn) if how == "first" else rollouts.max(turn)
        chosen = rollouts.spread(edge) == turn
        return rollouts.spread(rollouts.max(torch.where(chosen, reward, float("-inf"))))
    if how in ("shared", "first"):
        return rollouts.spread(reward.index_select(0, rollouts.first))
    if how == "last":
        return rollouts.spread(reward[rollouts.max(torch.arange(len(reward))).clamp_min(0)])
    if how == "max":
        return rollouts.spread(rollouts.max(reward))
    total = rollouts.sum(reward)
    return rollouts.spread(total / rollouts.count if how == "mean" else total)


class FanOutCollapse(
    BatchTransform,
    columns=("reward", "rollout", "group", "turn", "done", "expected_segments", "loss_mask", "log_prob"),
    optional=("group",),
):
    """Give the segments of one rollout one reward, which counts once in its group (:func:`collapse_fan_out`).

    The batch keeps its rows. The stage only adds columns. Excluded rows (``SampleFilter(action="exclude")``)
    get the reward 0 and ``is_first_segment`` False.

    With several rewards per row, each reward column is reduced by itself. Their weighted sum ``R = Σ_k w_k
    r_k`` is the rollout's reward (:func:`weighted_reward`). All later stages and the report read this sum.

    Reads `reward_key`, `rollout_key`, `group_key`, `turn_key` if it is set, and ``("next", "done")`` if it
    exists and no gate has read it, to refuse a rollout that ends twice. Writes ``("headrace", "reward")``
    (N,), ``("headrace", "is_first_segment")`` (N,) bool and, with several rewards or weights,
    ``("headrace", "rewards")`` (N, K). Under ``mask`` the stage also writes what
    ``SampleFilter(action="exclude")`` writes.

    Args:
        reward: how the segments' rewards are reduced: shared, first, last, sum, mean or max.
        columns: K, the number of rewards per row.
        weights: w, (K,) weights of the reward columns; None: all 1.
        missing: what happens to a missing reward (NaN). ``raise`` an error. Under ``skip`` and ``mask`` the
            rollout's reward is computed from its other rewards. A rollout whose rewards are all missing is in
            no statistic. Under ``mask`` such a rollout is out of the loss, for the reason ``no_reward``.
            Under ``skip`` it trains with the advantage 0, so its tokens count in the mean of the loss. If a
            reward is missing on one segment of a rollout, it must be missing on all.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: as :func:`collapse_fan_out`. Under ``first`` or ``last``, also if this segment was taken
            out of a rollout and its other segments stay.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(
        ...     {"rollout_id": [0, 1, 1], "group_id": [0, 0, 0], ("next", "reward"): [1.0, 3.0, 3.0]},
        ...     batch_size=[3],
        ... )
        >>> FanOutCollapse()(td)["headrace", "is_first_segment"].tolist()
        [True, True, False]
    """

    within_groups = True

    def __init__(
        self,
        *,
        reward: Reduction = "shared",
        columns: int = 1,
        weights: Sequence[float] | None = None,
        missing: Missing = "raise",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        several = [] if columns == 1 and weights is None else [REWARDS]
        ends = [self.done_key, self.expected_segments_key]
        places = SEGMENTS if reward in ("first", "last") else None
        reads = [self.reward_key, self.rollout_key, self.group_key, self.turn_key, places, *ends]
        masks = [IN_LOSS, LENGTH, COUNTED] if missing == "mask" else []
        super().__init__(reads, [REWARD, *several, IS_FIRST_SEGMENT, *masks])
        if self.turn_key is not None and reward not in ("first", "last"):
            raise ValueError(f"turn_key is only read with reward='first' or 'last'; got it with {reward=}")
        self.reward = reward
        self.missing = missing
        if missing == "mask":
            self.reasons = {"no_reward": "excluded"}
        self.columns, self.weights = at_least("columns", columns, 1), weights
        factors_of(weights, columns)  # checks the number of weights

    @property
    def of_whole_rollouts(self) -> Literal["", "rewards", "places"]:  # type: ignore[override]
        """``rewards``, unless all rows of a rollout have the same reward already."""
        return "" if self.reward == "shared" else "rewards"

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """The columns of tokens of the rows that this stage masks."""
        return [(self.loss_mask_key, self.log_prob_key)] if self.missing == "mask" else []

    def decide(self, rows: Rows) -> None:
        """Write the rollouts' rewards and mark their first segments."""
        require_identity(rows)
        if rows.has("done") and not rows.has(FINISHED):  # no gate has checked the ends
            require_unseen_ends(rows)
        if self.reward in ("first", "last"):
            require_edge(rows, self.reward)
        value, width = rows["reward"], self.columns
        if value.shape[1:] != ((width,) if width > 1 else ()):
            needed = f"{width} numbers" if width > 1 else "one number"
            raise BatchError(
                f"{{reader}} needs {needed} per row in {{column}}, for {count_of(len(rows), 'row')}; found "
                f"{tuple(value.shape)}. If these are several rewards, set columns to their number",
                **rows.facts("reward"),
            )
        reward = rows.exactly(value).reshape(len(rows), width)  # (M, K)
        missing = None if self.missing == "raise" else reward.isnan()
        if missing is not None:
            rows.require(
                (missing[rows.rollouts.spread(rows.rollouts.first)] == missing).all(1),
                "a missing reward (NaN) must be missing on all segments of its rollout; found {found}",
                lambda row: describe_rollout(rows, row, reward),
                unit=rows.rollouts,
            )
            if self.missing == "mask":
                none = missing.all(1)
                rows.leave(none if rows.counted is None else none & rows.counted, "no_reward", "excluded")
            reward = reward.masked_fill(missing, 0.0)
        rewards = torch.stack([collapse_column(rows, column, self.reward) for column in reward.unbind(1)], 1)
        dtype = rows.dtype("reward")
        dtype = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64
        if self.reward in ("sum", "mean"):  # the other reductions return a reward that was checked already
            rows.require(
                (rewards.abs() <= torch.finfo(dtype).max).all(1),
                f"the sum of a rollout's rewards must be finite in {dtype}; found {{found}}. Give "
                "rewards of a larger dtype",
                lambda row: f"{rewards[row].tolist()} for rollout {rows.name('rollout', row)}",
            )
        if missing is not None:
            rewards = rewards.masked_fill(missing, float("nan"))
        # Rewards are rounded here, so that those equal in the batch are also equal in the table.
        rewards = rewards.to(dtype)
        total = rewards[:, 0] if REWARDS not in self.out_keys else weighted_reward(rewards, self.weights)
        total = total.double()
        if rows.counted is not None:  # excluded rows get 0
            total = total.masked_fill(~rows.counted, 0.0)
            rewards = rewards.masked_fill(~rows.counted[:, None], 0.0)
        rows.put(REWARD, total, dtype=dtype, ndim=1)
        if REWARDS in self.out_keys:
            rows.put(REWARDS, rewards.double(), dtype=dtype, ndim=2)
        rows.put(IS_FIRST_SEGMENT, rows.rollouts.is_first, dtype=torch.bool, ndim=1)
        of_rollouts = rows.to_voters(total)
        rows.metric("rollouts", len(of_rollouts))
        known = of_rollouts if missing is None else of_rollouts[~of_rollouts.isnan()]
        rows.metric("reward_mean", mean_of(known))

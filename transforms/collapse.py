"""The segments of one rollout count as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, Outcome
from .checks import (
    Rule,
    as_rewards,
    at_least_float32,
    describe_segments,
    end_rules,
    enforce,
    identity_rules,
    reward_rules,
    same_length,
    turn_rules,
)
from .distributed import population_of
from .errors import BatchError
from .ids import as_ids, first_row, is_first, last_row, reduce_by, sum_by
from .options import at_least, nested_key, one_of
from .rewards import Missing, factors_of, weighted_reward
from .schema import DONE, EXPECTED_SEGMENTS, IS_FIRST_SEGMENT, REWARD, REWARDS, require
from .sums import sum_by_in_any_order

Reduction = Literal["shared", "first", "last", "sum", "mean", "max"]


class Collapsed(NamedTuple):
    """One reward per rollout, written on each of its rows."""

    reward: Tensor
    """(N,) in the dtype of the rewards given."""
    is_first_segment: Tensor
    """(N,) bool, one row of each rollout, its first."""


def collapse_fan_out(
    reward: Tensor | Sequence[float],
    rollout_id: Tensor | Sequence[int],
    group_id: Tensor | Sequence[int] | None = None,
    *,
    reduce: Reduction = "shared",
    turn: Tensor | Sequence[int] | None = None,
) -> Collapsed:
    """Reduce the rewards of a rollout's segments to one, and mark its first segment.

    With S(k) the rows of rollout k, in row order or by `turn`::

        shared   R_k = r_i, which must be the same for all i ∈ S(k)
        first    R_k = r_{min S(k)}        last   R_k = r_{max S(k)}
        sum      R_k = Σ_{i∈S(k)} r_i      mean   R_k = Σ_{i∈S(k)} r_i / |S(k)|      max  R_k = max r_i

    Sums are float64, whatever the order of the rows, and rounded once. One device read, for the checks.

    Args:
        reward: (N,) floats, one a row.
        rollout_id: (N,) integers ≥ 0; rows that share one are its segments, adjacent or not.
        group_id: (N,) integers ≥ 0, to check that no rollout is in two groups; None: not checked.
        reduce: how segments' rewards become the rollout's.
        turn: (N,) integers that order the segments of a rollout, without ties; None: the order of the rows.

    Raises:
        BatchError: a negative id, a rollout in two groups, a turn twice in a rollout, a reward that is not
            finite, siblings that disagree under ``shared``. Each names the ids.

    Example:
        >>> collapse_fan_out([1.0, 2.0, 4.0], [5, 8, 5], reduce="sum").reward.tolist()
        [5.0, 2.0, 5.0]
    """
    one_of("reduce", reduce, get_args(Reduction))
    reward = as_rewards(reward)
    rollouts = as_ids(rollout_id, "rollout_id", device=reward.device)
    groups = None if group_id is None else as_ids(group_id, "group_id", device=reward.device)
    turns = None if turn is None else as_ids(turn, "turn", device=reward.device)
    same_length(reward=reward, rollout_id=rollouts, group_id=groups, turn=turns)
    if len(reward) == 0:
        return Collapsed(reward, torch.empty_like(reward, dtype=torch.bool))
    first = first_row(rollouts)
    rules = identity_rules(rollouts, groups, first)
    rules += reward_rules(reward, rollouts, first, siblings_agree=reduce == "shared")
    rules += turn_rules(rollouts, first, turns)
    enforce(rules)
    return Collapsed(reduce_rewards(reward, first, reduce, turns), is_first(first))


def reduce_rewards(reward: Tensor, first: Tensor, how: Reduction, turn: Tensor | None = None) -> Tensor:
    """The reduction alone: (N,) rewards and the first row of each row's rollout in, (N,) out. No read."""
    if how in ("first", "last") and turn is not None:
        chosen = reduce_by(first, turn, "amin" if how == "first" else "amax") == turn
        row = torch.where(chosen, torch.arange(len(first), device=first.device), -1)
        return reward.index_select(0, reduce_by(first, row, "amax"))
    if how in ("shared", "first"):
        return reward.index_select(0, first)
    if how == "last":
        return reward.index_select(0, last_row(first))
    if how == "max":
        return reduce_by(first, reward, "amax")
    number = sum_by(first, torch.ones_like(first)).double()
    total = sum_by_in_any_order(first, reward.double())
    return (total / number if how == "mean" else total).to(reward.dtype)


class FanOutCollapse(BatchTransform):
    """Give the segments of one rollout one vote and one reward (:func:`collapse_fan_out`).

    The batch keeps its shape: the stage adds columns. Rows that are out of the statistics
    (``SampleFilter(action="exclude")``) get a reward of 0 and False. One device read where there are such
    rows, else none.

    Of several rewards the segments' are reduced column by column, and then added up by weight: ``R = Σ_k w_k
    r_k`` is the rollout's one reward (:func:`weighted_reward`), which every later stage and the report read.

    Reads `reward_key`, `rollout_key`, `group_key`, and ``("next", "done")`` if it is there and no gate has
    read it: a rollout that ends twice is refused. Writes ``("headrace", "reward")`` (N,),
    ``("headrace", "is_first_segment")`` (N,) bool and, where there are several rewards or weights,
    ``("headrace", "rewards")`` (N, K).

    Args:
        reward: how segments' rewards become the rollout's: shared, first, last, sum, mean or max.
        columns: K, how many rewards a row has.
        weights: w, of the columns; None: all 1.
        missing: what a NaN reward does: ``raise``; or ``skip``: it adds nothing to the rollout's reward, NaN
            where there is no other. It must be NaN on all segments of its rollout.
        reward_key: (N,), (N, 1) or (N, 1, 1) float; (N, K) where there are several.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout.
        group_key: (N,) or (N, 1) int ≥ 0; None where a batch has no groups.
        turn_key: (N,) or (N, 1) int that orders a rollout's segments, for ``first`` and ``last``; None: the
            order of the rows.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as :func:`collapse_fan_out`.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(
        ...     {"rollout_id": [0, 1, 1], "group_id": [0, 0, 0], ("next", "reward"): [1.0, 3.0, 3.0]},
        ...     batch_size=[3],
        ... )
        >>> FanOutCollapse()(td)["headrace", "is_first_segment"].tolist()
        [True, True, False]
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True
    within_groups = True

    def __init__(
        self,
        *,
        reward: Reduction = "shared",
        columns: int = 1,
        weights: Sequence[float] | None = None,
        missing: Missing = "raise",
        reward_key: NestedKey = ("next", "reward"),
        rollout_key: NestedKey | None = "rollout_id",
        group_key: NestedKey | None = "group_id",
        turn_key: NestedKey | None = None,
    ):
        self.reward_key, self.turn_key = nested_key(reward_key), nested_key(turn_key)
        self.rollout_key, self.group_key = nested_key(rollout_key), nested_key(group_key)
        several = [] if columns == 1 and weights is None else [REWARDS]
        reads = [self.reward_key, self.rollout_key, self.group_key, self.turn_key, DONE, EXPECTED_SEGMENTS]
        super().__init__(reads, [REWARD, *several, IS_FIRST_SEGMENT])
        if turn_key is not None and reward not in ("first", "last"):
            raise ValueError(f"turn_key says which segment is first and last; got it with {reward=}")
        self.reward = one_of("reward", reward, get_args(Reduction))
        self.missing = one_of("missing", missing, get_args(Missing))
        self.columns, self.weights = at_least("columns", columns, 1), weights
        factors_of(weights, columns)  # as many as there are columns

    @property
    def of_whole_rollouts(self) -> Literal["", "rewards", "places"]:  # type: ignore[override]
        """Where rows have rewards of their own."""
        return "" if self.reward == "shared" else "rewards"

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add the columns."""
        people, ends = population_of(batch), self.unseen_ends(batch)
        turns = {} if self.turn_key is None else {"turn": as_ids(self.column(batch, "turn_key"), "turn")}
        everyone = people.take({"reward": self._rewards(batch)} | ends | turns, self._ids(batch))
        reward, turn = everyone["reward"], everyone.get("turn")
        rollouts, groups = everyone["rollouts"], everyone.get("groups")
        first = first_row(rollouts)
        missing = reward.isnan() if self.missing == "skip" else None
        known = reward if missing is None else reward.masked_fill(missing, 0.0)
        rules = identity_rules(rollouts, groups, first) + turn_rules(rollouts, first, turn)
        rules += end_rules(rollouts, first, **{name: everyone[name] for name in ends})
        if missing is not None:
            rules.append(_same_missing(reward, missing, rollouts, first))
        for column in known.unbind(1):
            rules += reward_rules(column, rollouts, first, siblings_agree=self.reward == "shared")
        reduced = [reduce_rewards(column, first, self.reward, turn) for column in known.unbind(1)]
        rewards = torch.stack(reduced, 1)
        if self.reward in ("sum", "mean"):  # else it is one of those that were looked at
            rules.append(_fits(rewards, rollouts))
        if missing is not None:
            rewards = rewards.masked_fill(missing, float("nan"))
        one = people.put_back(weighted_reward(rewards, self.weights))
        is_first_segment = people.put_back(is_first(first))
        batch.set(REWARD, one)
        if REWARDS in self.out_keys:
            batch.set(REWARDS, people.put_back(rewards))
        batch.set(IS_FIRST_SEGMENT, is_first_segment)
        measured = {
            "rollouts": is_first_segment.sum(),
            "reward_mean": _mean_of_rollouts(one, is_first_segment),
        }
        return Outcome(batch, measured=measured, rules=people.rules(rules))

    def _ids(self, batch: TensorDictBase) -> dict[str, Tensor]:
        rollouts = {"rollouts": self.ids(batch, "rollout")}
        return rollouts if self.group_key is None else rollouts | {"groups": self.ids(batch, "group")}

    def _rewards(self, batch: TensorDictBase) -> Tensor:
        """(N, K), at least float32."""
        value = require(batch, self.reward_key, reader=type(self).__name__, option="reward_key")
        if self.columns == 1:
            try:
                return at_least_float32(as_rewards(self.column(batch, "reward_key")))[:, None]
            except BatchError as err:
                raise BatchError(f"{err}. If they are several rewards, say how many: columns") from err
        if value.numel() != len(batch) * self.columns or value.shape[-1] != self.columns:
            raise BatchError(
                f"FanOutCollapse needs {self.columns} rewards a row (columns); found {tuple(value.shape)} in "
                f"{self.reward_key!r} for {len(batch)} rows"
            )
        value = value.detach().reshape(len(batch), self.columns)
        return at_least_float32(value) if value.is_floating_point() else value.double()


def _same_missing(reward: Tensor, missing: Tensor, rollouts: Tensor, first: Tensor) -> Rule:
    """The segments of a rollout agree on which of its rewards are missing."""
    return Rule(
        (missing.index_select(0, first) != missing).any(1),
        describe_segments(rollouts, reward),
        "a reward that is missing (NaN) is missing on all segments of its rollout; found {found}",
    )


def _fits(rewards: Tensor, rollouts: Tensor) -> Rule:
    """A sum of rewards that are finite is, too."""
    return Rule(
        ~rewards.isfinite().all(1),
        lambda row: f"{rewards[row].tolist()} for rollout {int(rollouts[row])}",
        f"the rewards of a rollout's segments must add up within {rewards.dtype}; found {{found}}. Give "
        "rewards of a larger dtype",
    )


def _mean_of_rollouts(reward: Tensor, is_first_segment: Tensor) -> Tensor:
    """Scalar float64: the mean over rollouts that have a reward; 0 where none has."""
    known = is_first_segment & ~reward.isnan()
    return torch.where(known, reward, 0.0).double().sum() / known.sum().clamp_min(1)

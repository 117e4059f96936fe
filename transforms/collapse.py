"""The segments of one rollout count as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, nested_key, one_of, require
from .columns import REWARD, SPEAKS
from .counted import over_counted
from .errors import BatchError, listing
from .ids import as_ids, first_row, is_first, last_row, reduce_by, sum_by
from .rules import broken, explain, identity_rules, reward_rules
from .several import MISSING, Missing

Reduction = Literal["shared", "first", "last", "sum", "mean", "max"]
REDUCTIONS = ("shared", "first", "last", "sum", "mean", "max")


class Collapsed(NamedTuple):
    """One reward per rollout, written on each of its rows."""

    reward: Tensor
    """(N,) in the dtype of the rewards given."""
    speaks: Tensor
    """(N,) bool, the first row of each rollout."""


def collapse_fan_out(
    reward: Tensor | Sequence[float],
    rollout_id: Tensor | Sequence[int],
    group_id: Tensor | Sequence[int] | None = None,
    *,
    reduce: Reduction = "shared",
) -> Collapsed:
    """Reduce the rewards of a rollout's segments to one, and let its first row speak for it.

    With S(k) the rows of rollout k in row order::

        shared   R_k = r_i for any i ∈ S(k), which must all agree
        first    R_k = r_min S(k)          last   R_k = r_max S(k)
        sum      R_k = Σ_{i∈S(k)} r_i      mean   R_k = Σ_{i∈S(k)} r_i / |S(k)|      max  R_k = max r_i

    Sums accumulate in float64 and are rounded once. One device read, for the checks.

    Args:
        reward: (N,) floats, one a row.
        rollout_id: (N,) integers ≥ 0; rows that share one are its segments, adjacent or not.
        group_id: (N,) integers ≥ 0, to check that no rollout is in two groups; None checks nothing.
        reduce: how segments' rewards become the rollout's.

    Raises:
        BatchError: a negative id, a rollout in two groups, a reward that is not finite, siblings that
            disagree under ``shared``. Each names the ids.

    Example:
        >>> collapse_fan_out([1.0, 2.0, 4.0], [5, 8, 5], reduce="sum").reward.tolist()
        [5.0, 2.0, 5.0]
    """
    one_of("reduce", reduce, REDUCTIONS)
    reward = as_rewards(reward)
    rollouts = as_ids(rollout_id, "rollout_id", device=reward.device)
    groups = None if group_id is None else as_ids(group_id, "group_id", device=reward.device)
    same_length(reward=reward, rollout_id=rollouts, group_id=groups)
    if len(reward) == 0:
        return Collapsed(reward, torch.empty_like(reward, dtype=torch.bool))
    first = first_row(rollouts)
    rules = identity_rules(rollouts, groups, first)
    rules += reward_rules(reward, rollouts, first, siblings_agree=reduce == "shared")
    if bool(broken(rules)):
        explain(rules)
    return Collapsed(reduce_rewards(reward, first, reduce), is_first(first))


def reduce_rewards(reward: Tensor, first: Tensor, how: Reduction) -> Tensor:
    """The reduction alone: (N,) rewards and the first row of each row's rollout in, (N,) out. No read."""
    if how in ("shared", "first"):
        return reward.index_select(0, first)
    if how == "last":
        return reward.index_select(0, last_row(first))
    if how == "max":
        return reduce_by(first, reward, "amax")
    total = sum_by(first, reward.double())
    if how == "mean":
        total = total / sum_by(first, torch.ones_like(total))
    return total.to(reward.dtype)


def as_rewards(reward: Tensor | Sequence[float]) -> Tensor:
    """Rewards as an (N,) floating-point tensor.

    Raises:
        BatchError: a None (the rows are named), or more than one number a row.
    """
    if not isinstance(reward, Tensor):
        missing = [row for row, value in enumerate(reward) if value is None]
        if missing:
            raise BatchError(f"every row needs a reward; None at rows {listing(map(str, missing))}")
        reward = torch.tensor(reward, dtype=torch.get_default_dtype())
    if not reward.is_floating_point():
        reward = reward.to(torch.get_default_dtype())
    if reward.ndim == 0 or reward.numel() != reward.shape[0]:
        raise BatchError(f"one reward a row is needed, (N,) or (N, 1, ...); got {tuple(reward.shape)}")
    return reward.reshape(-1)


def same_length(**columns: Tensor | None) -> None:
    """Raise unless all columns have the same number of rows, on the same device."""
    given = {name: column for name, column in columns.items() if column is not None}
    if len({(len(c), c.device) for c in given.values()}) > 1:
        found = ", ".join(f"{name} {len(c)} on {c.device}" for name, c in given.items())
        raise BatchError(f"columns must have one length and one device; found {found}")


class FanOutCollapse(BatchTransform):
    """Give the segments of one rollout one vote and one reward (:func:`collapse_fan_out`).

    The batch keeps its shape: the stage adds columns. Rows that are out of the statistics
    (``SampleFilter(action="exclude")``) are passed over. One device read, for the checks; one more where
    rows are excluded.

    Reads `reward_key`, `rollout_key`, `group_key`; writes ``("headrace", "reward")`` (N,) and
    ``("headrace", "speaks")`` (N,) bool.

    Args:
        reward: how segments' rewards become the rollout's: shared, first, last, sum, mean or max.
        columns: K, rewards per row; each is reduced by itself.
        missing: ``skip`` lets a NaN pass as a reward that is missing, on all segments of its rollout.
        reward_key: (N,), (N, 1) or (N, 1, 1) float; (N, K) where there are several.
        rollout_key: (N,) or (N, 1) int ≥ 0.
        group_key: (N,) or (N, 1) int ≥ 0; None where a batch has no groups.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as :func:`collapse_fan_out`.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(
        ...     {"rollout_id": [0, 1, 1], "group_id": [0, 0, 0], ("next", "reward"): [1.0, 3.0, 3.0]},
        ...     batch_size=[3],
        ... )
        >>> FanOutCollapse()(td)["headrace", "speaks"].tolist()
        [True, True, False]
    """

    def __init__(
        self,
        *,
        reward: Reduction = "shared",
        columns: int = 1,
        missing: Missing = "raise",
        reward_key: NestedKey = ("next", "reward"),
        rollout_key: NestedKey = "rollout_id",
        group_key: NestedKey | None = "group_id",
    ):
        keys = [nested_key(k) for k in (reward_key, rollout_key, group_key)]
        super().__init__([k for k in keys if k is not None], [REWARD, SPEAKS])
        self.reward_key, self.rollout_key, self.group_key = keys
        self.reward, self.missing = one_of("reward", reward, REDUCTIONS), one_of("missing", missing, MISSING)
        if columns < 1:
            raise ValueError(f"columns must be ≥ 1; got {columns}")
        if missing == "skip" and reward != "shared":
            raise ValueError(f"missing='skip' needs reward='shared': NaN has no {reward}")
        self.columns = columns

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the two columns."""
        columns = {"reward": self._rewards(batch), "rollout_id": self.column(batch, "rollout_key")}
        if self.group_key is not None:
            columns["group_id"] = self.column(batch, "group_key")
        table = over_counted(batch, self._collapse, **columns)
        reward, speaks = table[:, :-1], table[:, -1].bool()
        batch.set(REWARD, reward[:, 0] if self.columns == 1 else reward)
        batch.set(SPEAKS, speaks)
        rollouts = speaks.sum()
        there = speaks[:, None] & ~reward.isnan()
        mean = torch.where(there, reward, 0.0).double().sum(0) / there.sum(0).clamp_min(1)
        self.measured = {"rollouts": rollouts, "reward_mean": mean.mean()}
        return batch

    def _rewards(self, batch: TensorDictBase) -> Tensor:
        """(N, K)."""
        if self.columns == 1:
            return as_rewards(self.column(batch, "reward_key"))[:, None]
        value = require(batch, self.reward_key, reader=type(self).__name__, option="reward_key")
        if value.numel() != len(batch) * self.columns or value.shape[-1] != self.columns:
            raise BatchError(
                f"FanOutCollapse needs {self.columns} rewards a row (columns); found {tuple(value.shape)} in "
                f"{self.reward_key!r} for {len(batch)} rows"
            )
        return value.reshape(len(batch), self.columns)

    def _collapse(self, reward: Tensor, **ids: Tensor) -> Tensor:
        """(M, K + 1): each column reduced, and who speaks."""
        reduced = []
        for column in reward.unbind(1):
            gone = column.isnan() if self.missing == "skip" else torch.zeros_like(column, dtype=torch.bool)
            value, speaks = collapse_fan_out(torch.where(gone, 0.0, column), reduce=self.reward, **ids)
            if self.missing == "skip":  # siblings agree also on what is missing
                collapse_fan_out(gone.to(column.dtype), **ids)
            reduced.append(torch.where(gone, float("nan"), value))
        return torch.stack([*reduced, speaks.to(reward.dtype)], 1)

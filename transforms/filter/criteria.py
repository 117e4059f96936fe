"""Criteria for :class:`SampleFilter`: a batch in, (N,) bool out, True where the row stays.

Any callable of that form is one. Optional attributes help: `reason`, the word under which rows that go are
counted; `unit`, what stays or goes as one; `in_keys`, the columns it reads, by which a pipeline refuses an
order that cannot work; `before_baseline`, by which it refuses a place behind the advantage; and `rules`, from
a batch to what must hold of its rows. None of those here reads from the device, but RewardsVary
where rows are out of the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import as_ids, first_row, reduce_by
from headrace.transforms.options import at_least, describe_options, nested_key, within
from headrace.transforms.rows import flat_rows
from headrace.transforms.schema import (
    COUNTED,
    REWARD,
    STATUS_KEYS,
    Status,
    has_key,
    read_column,
    read_status,
    read_written,
    require,
)
from headrace.transforms.tokens import masked_tokens


class Criterion:
    """A criterion with a name and declared columns. Subclasses implement ``__call__``."""

    reason: str
    unit: str = "sample"
    in_keys: tuple[NestedKey, ...] = ()
    before_baseline: bool = False  # a row that fails is to be judged before rewards are compared
    spans_ranks: bool = True  # asked on every rank, also of no rows
    within_groups: bool = False  # what it says of a row follows from the rows of its group alone
    asks_in_loss: bool = False  # it looks at no token of rows that are out of the loss

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool, True where the row stays."""
        raise NotImplementedError

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """What must hold of the rows for the verdicts to mean anything. Not read here."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def _column(self, batch: TensorDictBase, option: str) -> Tensor:
        return read_column(batch, getattr(self, option), reader=type(self).__name__, option=option)

    def _reward(self, batch: TensorDictBase) -> Tensor:
        """The rollout's reward where the batch is collapsed, the row's own where it is not."""
        if has_key(batch, REWARD):
            return read_written(batch, REWARD, reader=type(self).__name__, writer="FanOutCollapse")
        reward = self._column(batch, "reward_key")
        return reward if reward.is_floating_point() else reward.double()  # small integers wrap


class RewardsVary(Criterion):
    """Groups whose rewards differ: ``max − min > tol`` over the rollouts in the statistics that have one.

    A group without spread has no advantage to learn from (DAPO's dynamic sampling, arXiv:2503.14476,
    section 3.2). Reason: ``zero_variance``.

    Args:
        tol: in units of the reward, ≥ 0.
        reward_key: (N,), (N, 1) or (N, 1, 1) float, where FanOutCollapse wrote no reward.
        group_key: (N,) or (N, 1) int.
    """

    within_groups = True
    reason = "zero_variance"
    asks_in_loss = True
    unit = "group"

    def __init__(
        self,
        *,
        tol: float = 0.0,
        reward_key: NestedKey = ("next", "reward"),
        group_key: NestedKey = "group_id",
    ):
        self.tol = within("tol", tol, 0, float("inf"))
        self.reward_key, self.group_key = nested_key(reward_key), nested_key(group_key)
        self.in_keys = (REWARD, self.reward_key, self.group_key)

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """Every row in the statistics has a group."""
        counted = batch.get(COUNTED, None)
        rule = set_rule(self._column(batch, "group_key"), "group_id", "rows without an id would be compared")
        return [rule if counted is None else rule._replace(bad=rule.bad & counted)]

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        people = population_of(batch)
        groups = as_ids(self._column(batch, "group_key"), "group_id")
        everyone = people.take({"reward": self._reward(batch).double()}, {"groups": groups})
        reward, first = everyone["reward"], first_row(everyone["groups"])
        low, high = (reward.masked_fill(reward.isnan(), end) for end in (float("inf"), float("-inf")))
        spread = reduce_by(first, high, "amax") - reduce_by(first, low, "amin")  # −∞: nobody has a reward
        return ~people.put_back(spread <= self.tol)


class RewardWithin(Criterion):
    """Rewards in ``[low, high]``; NaN is not. Reason: ``reward_bounds``.

    Args:
        low: least reward that stays.
        high: greatest reward that stays.
        reward_key: (N,), (N, 1) or (N, 1, 1) float, where FanOutCollapse wrote no reward.
    """

    within_groups = True
    reason = "reward_bounds"
    asks_in_loss = True

    def __init__(
        self,
        *,
        low: float = float("-inf"),
        high: float = float("inf"),
        reward_key: NestedKey = ("next", "reward"),
    ):
        if not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high, self.reward_key = low, high, nested_key(reward_key)
        self.in_keys = (REWARD, self.reward_key)

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        reward = self._reward(batch)
        return (reward >= self.low) & (reward <= self.high)


class Finite(Criterion):
    """Rows in which every number of one column is finite. Reason: ``non_finite``.

    Args:
        key: (N, ...) float, dense or ragged. The reward as collected by default: put the filter before
            FanOutCollapse, which refuses rewards that are not finite.
    """

    within_groups = True
    reason = "non_finite"

    def __init__(self, *, key: NestedKey = ("next", "reward")):
        self.key = nested_key(key)
        self.in_keys = (self.key,)

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        if isinstance(batch, LazyStackedTensorDict) and has_key(batch, self.key):  # it may be ragged
            return torch.stack([torch.isfinite(v).all() for v in batch.get(self.key, as_list=True)])
        value = require(batch, self.key, reader=type(self).__name__, option="key")
        return flat_rows(torch.isfinite(value)).all(-1)


class NotTruncated(Criterion):
    """Rows that were not cut off at a limit. Reason: ``truncated``.

    Rows that failed or were aborted stay: they are the gate's. A segment that was cut off goes alone, with
    ``SampleFilter(unit="rollout")`` with its whole rollout.

    Args:
        status_key: (N,) or (N, 1) :class:`Status`. None: ``("next", "status")`` if it is there, else
            ``status``, as everybody reads it.
        truncated_key: (N,) or (N, 1) bool, read in place of the status where it is given, such as
            ``("next", "truncated")``.
    """

    within_groups = True
    reason = "truncated"
    asks_in_loss = True

    def __init__(self, *, status_key: NestedKey | None = None, truncated_key: NestedKey | None = None):
        self.status_key, self.truncated_key = nested_key(status_key), nested_key(truncated_key)
        read = self.truncated_key or self.status_key
        self.in_keys = STATUS_KEYS if read is None else (read,)

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        if self.truncated_key is not None:
            return ~self._column(batch, "truncated_key").bool()
        name = type(self).__name__
        status = read_status(batch, self.status_key, reader=name)
        if status is None:
            status = require(batch, STATUS_KEYS[0], reader=name, option="status_key")
        return status != Status.TRUNCATED


class LengthWithin(Criterion):
    """Rows whose loss mask counts `low` to `high` tokens. Reason: ``length``.

    Args:
        low: least number of tokens that stays; 1 takes out rows whose mask is empty.
        high: greatest number that stays; None: no limit.
        loss_mask_key: (N, T) bool, dense or ragged.
    """

    within_groups = True
    reason = "length"

    def __init__(
        self,
        *,
        low: int = 0,
        high: int | None = None,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
    ):
        if high is not None and not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high, self.loss_mask_key = low, high, nested_key(loss_mask_key)
        self.in_keys = (self.loss_mask_key,)

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        name = type(self).__name__
        tokens = masked_tokens(batch, self.loss_mask_key, reader=name, option="loss_mask_key")
        keep = tokens >= self.low
        return keep if self.high is None else keep & (tokens <= self.high)


class Fresh(Criterion):
    """Rows whose policy is at most `max_staleness` versions behind. Reason: ``stale``.

    Args:
        current: the version that trains, or a callable that returns it; none is guessed from the rows, since
            all of them may be old. A number is for what is collected once: a job's version moves on. In YAML
            a callable is ``{_target_: your.module.version, _partial_: true}``.
        max_staleness: versions, ≥ 0.
        version_key: (N,) or (N, 1) int, the version that acted.
    """

    within_groups = True
    reason = "stale"
    asks_in_loss = True

    def __init__(
        self,
        *,
        current: int | Callable[[], int],
        max_staleness: int = 0,
        version_key: NestedKey = ("next", "policy_version"),
    ):
        if current is None:
            raise ValueError(
                "Fresh needs current: the version that trains, or a callable that returns it, such as a "
                "function of your trainer's count of updates"
            )
        self.current = current if callable(current) else at_least("current", current, 0)
        self.max_staleness = at_least("max_staleness", max_staleness, 0)
        self.version_key = nested_key(version_key)
        self.in_keys = (self.version_key,)

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """No row is newer than the version that trains: it would pass whatever its age."""
        version, current = self._version(batch), self._current()
        message = f"no row is newer than the version that trains, {current} (current); found {{found}}"
        return [Rule(version > current, lambda row: f"{int(version[row])} at row {row}", message)]

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool."""
        return self._current() - self._version(batch) <= self.max_staleness

    def _current(self) -> int:
        return int(self.current() if callable(self.current) else self.current)

    def _version(self, batch: TensorDictBase) -> Tensor:
        return self._column(batch, "version_key").long()

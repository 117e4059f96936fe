"""Criteria for :class:`SampleFilter`: the table in, (M,) bool out, True where the row stays.

A criterion implements ``decide(rows) -> keep``. Any other callable, from a batch to (N,) bool, is one too, at
the cost of one more read. Optional attributes help: `reason`, the word under which rows that go are counted;
`unit`, what stays or goes as one; `in_keys`, the columns it reads, by which a pipeline refuses an order that
cannot work; `before_baseline`, by which it refuses a place behind the advantage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames, TakesColumns
from headrace.transforms.options import (
    INF,
    LowerBound,
    UpperBound,
    at_least,
    describe_options,
    nested_key,
    within,
)
from headrace.transforms.rows import Rows
from headrace.transforms.schema import REWARD, STATUS_KEYS, Status
from headrace.transforms.tensordicts import flat_rows


class Criterion(TakesColumns):
    """A criterion with a name and declared columns. Subclasses implement :meth:`decide`.

    Example:
        >>> class Polite(Criterion):
        ...     reason, in_keys = "rude", ("tone",)
        ...     def decide(self, rows):
        ...         return rows["tone"] > 0
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import SampleFilter
        >>> td = TensorDict({"tone": [1.0, -1.0], "rollout_id": [4, 5]}, batch_size=[2])
        >>> SampleFilter(criterion=Polite(), action="drop")(td)["rollout_id"].tolist()
        [4]
    """

    reason: str
    unit: str = "sample"
    in_keys: tuple[NestedKey, ...] = ()
    before_baseline: bool = False  # a row that fails is to be judged before rewards are compared
    within_groups: bool = False  # what it says of a row follows from the rows of its group alone
    reads_tokens: bool = False  # and not the table alone

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool, True where the row stays. A subclass with a ``__call__`` of its own is given a batch."""
        if type(self).__call__ is Criterion.__call__:
            raise NotImplementedError(f"{type(self).__name__} implements decide(rows), or __call__(batch)")
        return rows.ask(self)

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool, of a batch by itself."""
        rows = Rows.read(batch, keys=self.in_keys).seen_by(self)
        return self.decide(rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"


class RewardsVary(Criterion, columns=("reward", "group")):
    """Groups whose rewards differ: ``max − min > tol`` over the rollouts in the statistics that have one.

    A group without spread has no advantage to learn from (DAPO's dynamic sampling, arXiv:2503.14476,
    section 3.2). Reason: ``zero_variance``.

    Args:
        tol: in units of the reward, ≥ 0.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "zero_variance"
    unit = "group"

    def __init__(
        self,
        *,
        tol: float = 0.0,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.tol = within("tol", tol, 0)
        self.in_keys = (REWARD, self.reward_key, self.group_key)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        reward, groups = rows.reward, rows.groups
        missing = reward.isnan()
        low, high = (reward.masked_fill(missing, end) for end in (float("inf"), float("-inf")))
        spread = groups.max(high) - groups.min(low)  # −∞: nobody has a reward
        vary = groups.spread(spread > self.tol)
        return vary if rows.counted is None else vary | ~rows.counted  # who has left judges nobody


class RewardWithin(Criterion, columns=("reward",)):
    """Rewards in ``[low, high]``; NaN is not. Reason: ``reward_bounds``.

    Args:
        low: least reward that stays; −∞: any.
        high: greatest reward that stays; ∞: any.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "reward_bounds"

    def __init__(
        self,
        *,
        low: LowerBound = -INF,
        high: UpperBound = INF,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        if not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high = low, high
        self.in_keys = (REWARD, self.reward_key)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        return (rows.reward >= self.low) & (rows.reward <= self.high)


class Finite(Criterion):
    """Rows in which every number of one column is finite. Reason: ``non_finite``.

    Args:
        key: (N, ...) float, dense or ragged. The reward as collected by default: put the filter before
            FanOutCollapse, which refuses rewards that are not finite.
    """

    within_groups = True
    reads_tokens = True
    reason = "non_finite"

    def __init__(self, *, key: NestedKey = ("next", "reward")):
        self.key = nested_key(key)
        self.in_keys = (self.key,)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        return rows.reduce(
            self.key,
            lambda column: flat_rows(torch.isfinite(column)).all(-1),
            name="all finite",
            option="key",
        )


class NotTruncated(Criterion, columns=("status", "truncated")):
    """Rows that were not cut off at a limit. Reason: ``truncated``.

    Rows that failed or were aborted stay: they are the gate's. A segment that was cut off goes alone, with
    ``SampleFilter(unit="rollout")`` with its whole rollout.

    Args:
        names: other names of columns, such as `status_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "truncated"

    def __init__(self, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        read = self.truncated_key or self.status_key
        self.in_keys = STATUS_KEYS if read is None else (read,)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        if self.truncated_key is not None:
            return ~rows.number("truncated").bool()
        if (status := rows.status) is None:
            raise rows.missing(STATUS_KEYS[0], "status_key")
        rows.require(
            status >= 0,
            "NotTruncated needs to know how each rollout ended; {count} row{s} have no status: {found}",
        )
        return status != Status.TRUNCATED


class LengthWithin(Criterion, columns=("loss_mask",)):
    """Rows whose loss mask counts `low` to `high` tokens. Reason: ``length``.

    Args:
        low: least number of tokens that stays; 1 takes out rows whose mask is empty.
        high: greatest number that stays; None: no limit.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "length"

    def __init__(
        self,
        *,
        low: int = 0,
        high: int | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        if high is not None and not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high = low, high
        self.in_keys = (self.loss_mask_key,)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        tokens = rows.masked_tokens
        keep = tokens >= self.low
        return keep if self.high is None else keep & (tokens <= self.high)


class Fresh(Criterion, columns=("version",)):
    """Rows whose policy is at most `max_staleness` versions behind. Reason: ``stale``.

    Args:
        current: the version that trains, or a callable that returns it; none is guessed from the rows, since
            all of them may be old. A number is for what is collected once: a job's version moves on. In YAML
            a callable is ``{_target_: your.module.version, _partial_: true}``.
        max_staleness: versions, ≥ 0.
        names: other names of columns, such as `version_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "stale"

    def __init__(
        self,
        *,
        current: int | Callable[[], int],
        max_staleness: int = 0,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.current = current if callable(current) else at_least("current", current, 0)
        self.max_staleness = at_least("max_staleness", max_staleness, 0)
        self.in_keys = (self.version_key,)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        version = rows.number("version").long()
        current = int(self.current() if callable(self.current) else self.current)
        rows.require(
            version <= current,
            f"no row is newer than the version that trains, {current} (current); found {{found}}",
            lambda row: f"{int(version[row])} at row {rows.at(row)}",
        )
        return current - version <= self.max_staleness

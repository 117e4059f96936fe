"""Criteria for :class:`SampleFilter`. They read the table and return (M,) bool, True where the row stays.

A criterion implements ``decide(rows) -> keep``. Any other callable from a batch to (N,) bool also works, but
costs one more device read. Optional attributes:

- `reason`: the name under which the ledger counts the rows that leave;
- `unit`: what stays or leaves together;
- `in_keys`: the columns that the criterion reads. A pipeline then refuses a wrong order of stages;
- `token_keys`: the token columns that the criterion reads, by ``rows.token_column``;
- `before_baseline`: if True, a pipeline refuses the filter after the advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import (
    COLUMNS,
    BatchError,
    ColumnNames,
    Rows,
    TakesColumns,
    check_kind,
    column_keys,
)
from headrace.transforms.table.options import (
    INF,
    LowerBound,
    UpperBound,
    at_least,
    describe_options,
    nested_key,
)
from headrace.transforms.table.rewards import Several
from headrace.transforms.table.schema import REWARD, REWARDS, STATUS_KEYS, Status
from headrace.transforms.table.table import Reduced
from headrace.transforms.table.tensordicts import column_of, flat_rows
from headrace.transforms.table.tokens import versions_of_rows


class Criterion(TakesColumns):
    """The base class of criteria. Subclasses implement :meth:`decide`.

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

    reason: str = ""  # empty: the name of the class
    unit: str = "sample"
    in_keys: tuple[NestedKey, ...] = ()
    before_baseline: bool = False  # it must run before the stages that compute a baseline
    within_groups: bool = False  # the result for a row depends only on rows of the same group
    token_keys: tuple[NestedKey, ...] = ()  # columns that it reads with rows.token_column

    def __init__(self, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        named = [key for key in column_keys(self).values() if key is not None]
        # `rows.reward` is the reward of a stage, if there is one.
        self.in_keys = (*self.in_keys, *named, *([REWARD] if "reward" in self._columns else []))

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool, True where the row stays. A subclass may implement ``__call__(batch)`` instead."""
        if type(self).__call__ is Criterion.__call__:
            raise NotImplementedError(f"{type(self).__name__} must implement decide(rows) or __call__(batch)")
        return ask(rows, self)

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Token counts that this criterion reads, declared like those of a stage."""
        return [(self.loss_mask_key, None)] if hasattr(self, "loss_mask_key") else []

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool: apply the criterion to a batch, outside a filter."""
        rows = Rows.read(batch, keys=self.in_keys).seen_by(self)
        return self.decide(rows.only_declared(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"


def ask(rows: Rows, criterion: Callable[[TensorDictBase], Any]) -> Any:
    """(M,) bool: the result of a user's criterion, which gets the batch with all decisions so far.

    A result that is not one bool per row is returned as it is, for the caller to refuse.
    """
    batch = rows.write()
    # A user's function may not expect a rank without rows.
    try:
        keep = criterion(batch) if len(batch) else torch.zeros(0, dtype=torch.bool)
    except KeyError as err:
        reward = REWARD if column_of(batch, REWARD) is not None else COLUMNS["reward"].default
        raise BatchError(
            f"a function gets the batch, where the reward is {reward!r}; "
            + str(err.args[0] if err.args else err)
        ) from err
    fits = isinstance(keep, Tensor) and keep.dtype is torch.bool and keep.numel() == len(rows.table.live)
    return rows.measured(asked=keep.reshape(-1))["asked"].bool() if fits else keep


class _FunctionCriterion(Criterion):
    """Wrap a callable, or an object with `decide`, and add the attributes of a criterion that it lacks."""

    def __init__(self, function: Callable[[TensorDictBase], Tensor]):
        self.function = function
        named = getattr(function, "func", function)  # the function inside a functools.partial
        self.reason = str(getattr(named, "reason", "") or getattr(named, "__name__", type(named).__name__))
        for name in ("unit", "in_keys", "before_baseline", "within_groups", "token_keys"):
            setattr(self, name, getattr(function, name, getattr(Criterion, name)))

    def decide(self, rows: Rows) -> Tensor:
        decide = getattr(self.function, "decide", None)
        if decide is None:
            return ask(rows, self.function)
        return decide(rows.seen_by(self.function, rows.stage).only_declared(self.function))

    def __repr__(self) -> str:
        return repr(self.function)


def as_criterion(criterion: Callable[[TensorDictBase], Tensor]) -> Criterion:
    """Return the criterion itself, or wrap any other callable as a criterion.

    Raises:
        ValueError: the callable is a class, a stage or a term.
    """
    check_kind(criterion, "criterion")
    return criterion if isinstance(criterion, Criterion) else _FunctionCriterion(criterion)


class RewardsVary(Criterion, columns=("reward", "group")):
    """Keep groups whose rewards differ: ``max > min``.

    The maximum and minimum are over the rollouts that have a reward and are not excluded. All advantages of a
    group with equal rewards are 0 (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2). Reason:
    ``zero_variance``.

    Args:
        several: the option `several` of the advantage. ``decoupled``: at least one of the K rewards of
            ``FanOutCollapse(columns=K)`` must differ, because each reward has an advantage of its own.
            ``sum``: the weighted sum of the rewards must differ.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "zero_variance"
    unit = "group"

    def __init__(self, *, several: Several = "sum", **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.several = several
        each = (REWARDS,) if several == "decoupled" else ()
        self.in_keys = (REWARD, *each, self.reward_key, self.group_key)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        groups, columns = rows.groups, [rows.reward]
        if self.several == "decoupled" and rows.has(REWARDS):
            columns = list(rows[REWARDS].unbind(1))
        found = torch.zeros(groups.n, dtype=torch.bool)
        for reward in columns:  # a missing reward is neither the highest nor the lowest
            highest, lowest = (
                groups.max(reward.nan_to_num(-INF, INF, -INF)),
                groups.min(reward.nan_to_num(INF, INF, -INF)),
            )
            found |= highest > lowest  # −∞ and ∞ if no rollout of the group has a reward
        differ = groups.spread(found)
        # Excluded rows stay: they are not in the maximum and minimum, and have a reason already.
        return differ if rows.counted is None else differ | ~rows.counted


class RewardWithin(Criterion, columns=("reward",)):
    """Keep rows whose reward is in ``[low, high]``. A NaN reward leaves. Reason: ``reward_bounds``.

    Args:
        low: lower bound of the reward; −∞: none.
        high: upper bound of the reward; ∞: none.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "reward_bounds"

    def __init__(self, *, low: LowerBound = -INF, high: UpperBound = INF, **names: Unpack[ColumnNames]):
        super().__init__(**names)
        if not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high = low, high

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        return (rows.reward >= self.low) & (rows.reward <= self.high)


class Finite(Criterion):
    """Keep rows in which all values of one column are finite. Reason: ``non_finite``.

    Args:
        key: key of the column, (N, ...) float, dense or ragged. The default is the collected reward. Put this
            filter before FanOutCollapse, which refuses rewards that are not finite.
    """

    within_groups = True
    reason = "non_finite"

    def __init__(self, *, key: NestedKey = ("next", "reward")):
        self.key = nested_key(key)
        self.in_keys = (self.key,)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        table, made = rows.table, Reduced("all finite", self.key)
        if table.is_late(self.key):
            table.settle()
        if made not in table.columns:
            if (column := column_of(table.batch, self.key)) is None:
                raise rows.missing(self.key, "key")
            ragged = [row[None] for row in column] if isinstance(column, list) else [column]
            table.measure(made, torch.cat([flat_rows(torch.isfinite(part)).all(-1) for part in ragged]))
        return rows[made]


class NotTruncated(Criterion, columns=("status", "truncated")):
    """Keep rows that were not cut off at a length limit. Reason: ``truncated``.

    Rows that failed or were aborted stay, because the gate handles them. Only the truncated segment leaves.
    With ``SampleFilter(unit="rollout")`` its whole rollout leaves.

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
            "NotTruncated needs the status of each rollout; found {count} row{s} without one: {found}",
        )
        return status != Status.TRUNCATED


class LengthWithin(Criterion, columns=("loss_mask",)):
    """Keep rows that have `low` to `high` tokens in the loss mask. Reason: ``length``.

    Args:
        low: lowest number of tokens; 1 takes out rows whose loss mask is empty.
        high: highest number of tokens; None: no limit.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "length"

    def __init__(self, *, low: int = 0, high: int | None = None, **names: Unpack[ColumnNames]):
        super().__init__(**names)
        if high is not None and not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.low, self.high = low, high

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        tokens = rows.count("loss_mask") * rows.in_loss
        keep = tokens >= self.low
        return keep if self.high is None else keep & (tokens <= self.high)


class Fresh(Criterion, columns=("version", "loss_mask")):
    """Keep rows whose policy version is at most `max_staleness` versions old. Reason: ``stale``.

    If the policy was updated while a row was sampled, the column may have a version for each token, (N, T),
    dense or ragged. Then the oldest sampled token decides::

        keep_i = min over sampled tokens t of row i: version_it ≥ current − max_staleness

    Sampled tokens are the tokens in the loss mask or, without a mask, in TorchRL's response. A row without a
    sampled token stays. Versions per token take one more device read.

    Args:
        current: version of the policy that trains, or a callable that returns it. In training use a callable,
            because the version changes with each update. In YAML a callable is
            ``{_target_: your.module.version, _partial_: true}``.
        max_staleness: number of versions, ≥ 0.
        names: other names of columns, such as `version_key` (:class:`ColumnNames`).
    """

    within_groups = True
    reason = "stale"

    def __init__(
        self, *, current: int | Callable[[], int], max_staleness: int = 0, **names: Unpack[ColumnNames]
    ):
        super().__init__(**names)
        self.current = current if callable(current) else at_least("current", current, 0)
        self.max_staleness = at_least("max_staleness", max_staleness, 0)

    def decide(self, rows: Rows) -> Tensor:
        """(M,) bool."""
        found = versions_of_rows(rows, self.version_key, self.loss_mask_key)
        if found is None:
            oldest = newest = rows.number("version").long()
            sampled = torch.ones_like(oldest)
        else:
            oldest, newest, _, sampled = found.unbind(1)
        current = int(self.current() if callable(self.current) else self.current)
        rows.require(
            newest <= current,
            f"no row may be newer than the policy version that trains, {current} (current); found {{found}}",
            lambda row: f"{int(newest[row])} at row {rows.at(row)}",
        )
        return (current - oldest <= self.max_staleness) | (sampled == 0)

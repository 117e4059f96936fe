"""Reward shaping: stages that change the reward before the advantage is computed."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Ids, Rows
from headrace.transforms.table.calls import accepts
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.options import INF, LowerBound, UpperBound, takes_options, within
from headrace.transforms.table.schema import REWARD

Form = Literal["bonus", "rescale"]
TO_WRITE = """a RewardShaping needs a method shape(self, reward, rollouts). Give an object of a subclass:

class Mine(RewardShaping):
    def shape(self, reward, rollouts):  # (V,) float64: a reward for each rollout
        return 2 * reward"""


@takes_options
def overlong_punishment(length: Tensor, *, max_length: int, cache: int) -> Tensor:
    """Compute the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).

    ::

        0                                L ≤ L_max − L_cache
        (L_max − L_cache − L)/L_cache    L_max − L_cache < L ≤ L_max
        −1                               L > L_max

    Args:
        length: (N,) L, number of tokens.
        max_length: L_max, number of tokens.
        cache: L_cache, number of tokens, in (0, L_max].

    Returns:
        (N,) float in [−1, 0], to be added to the reward; float64 if lengths are integers.

    Example:
        >>> overlong_punishment(torch.tensor([8, 10, 12]), max_length=10, cache=4).tolist()
        [-0.5, -1.0, -1.0]
    """
    over = (length if length.is_floating_point() else length.double()) - (max_length - cache)
    return -(over.clamp(0, cache) / cache)


@takes_options
def length_penalty(length: Tensor, *, coefficient: float) -> Tensor:
    """Compute a linear length penalty: ``−c · L``.

    Args:
        length: (N,) L, number of tokens.
        coefficient: c, reward per token, ≥ 0.

    Returns:
        (N,) float ≤ 0, to be added to the reward; float64 if lengths are integers.

    Example:
        >>> length_penalty(torch.tensor([4, 10]), coefficient=0.5).tolist()
        [-2.0, -5.0]
    """
    return -coefficient * (length if length.is_floating_point() else length.double())


@takes_options
def relative_length(
    reward: Tensor,
    length: Tensor,
    group_id: Tensor,
    rollout_id: Tensor | None = None,
    *,
    form: Form = "bonus",
    coefficient: float = 1.0,
) -> Tensor:
    """Compute a factor for each reward, from the rollout's length relative to its group.

    With the lengths L of a group::

        bonus    1 + c · min(max(1 − L_i/mean(L of successes), 0), 1) for a success, else 1
        rescale  1 / (1 + c · L_i/mean(L))                  (GR³, arXiv:2603.10535)

    A success is a rollout with the best reward of its group, if this reward is above 0. ``bonus`` is the
    shaping of prime-rl (``orchestrator/algo/advantage.py``). Short successes get up to 1 + c times their
    reward, and no reward becomes smaller. ``rescale`` divides each reward by a number that grows with the
    length of the rollout. A reward of 0 does not change.

    Lengths are added up as integers. A rollout counts once. A missing reward (NaN) is not counted.

    Args:
        reward: (N,) float, the reward of each row's rollout.
        length: (N,) int64, tokens of the row's rollout.
        group_id: (N,) int64.
        rollout_id: (N,) int64; None: each row is a rollout.
        form: ``bonus`` or ``rescale``.
        coefficient: c ≥ 0.

    Returns:
        (N,) float64 > 0.

    Example:
        >>> reward, length = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2, 6, 1])
        >>> relative_length(reward, length, torch.zeros(3, dtype=torch.int64)).tolist()
        [1.5, 1.0, 1.0]
    """
    groups, present = Ids(group_id), ~reward.isnan()
    among = present
    if form == "bonus":
        best = groups.spread(groups.max(torch.where(present, reward, float("-inf"))))
        among = present & (reward == best) & (best > 0)
    votes = among
    if rollout_id is not None:
        votes = among & Ids(groups.paired_with(Ids(rollout_id)).of, present).is_first
    counted = Ids(groups.of, votes)
    number, total = groups.spread(counted.count), groups.spread(counted.sum(length))
    share = length.double() * number / total.clamp_min(1)  # L_i over the mean
    if form == "rescale":
        return 1 / (1 + coefficient * share)
    return 1 + coefficient * torch.where(among & (total > 0), (1 - share).clamp(0, 1), 0.0)


class Rollouts(Rows):
    """One row of each rollout that counts in the statistics: a stage's :attr:`Rows.voters`.

    A column has the value of this row. `lengths` are those of the whole rollout.
    """

    _own = (*Rows._own, "rows")

    def __init__(self, rows: Rows):
        one = rows.voters
        super().__init__(one.table, one.names, one.reader, one.stage, one.index, one.declared)
        self.rows, self.reads = rows, one.reads

    @property
    def lengths(self) -> Tensor:
        """(V,) int64: tokens in the loss mask of all rows of the rollout, counted before rows were masked."""
        rows = self.rows.with_excluded
        rollouts = rows.ids("rollout", checked=False)
        return self.rows.to_voters(rollouts.spread(rollouts.sum(rows.lengths)))


class RewardShaping(BatchTransform, columns=("rollout",)):
    """Base class of the stages that change the reward of each rollout, between collapse and advantage.

    A subclass implements :meth:`shape`, which gets each rollout once, however many rows it has. Excluded
    rollouts keep their reward. A missing reward (NaN) stays missing.

    Reads and writes ``("headrace", "reward")`` (N,), which FanOutCollapse makes. Reads `rollout_key`, and the
    columns that the subclass declares, ``class Mine(RewardShaping, columns=("group", "loss_mask"))``.

    Args:
        names: other names of columns, such as `rollout_key` (:class:`ColumnNames`).

    Attributes:
        reads: keys of further columns that :meth:`shape` reads, so that a pipeline refuses a stage that
            writes them later.

    Example:
        >>> class Polite(RewardShaping):
        ...     reads = ("tone",)
        ...     def shape(self, reward, rollouts):
        ...         return reward + 0.5 * rollouts["tone"]
        >>> from headrace import load_pipeline
        >>> load_pipeline("grpo", stages={"polite": Polite()}, after={"polite": "collapse"}).order[:3]
        ['gate', 'collapse', 'polite']
    """

    reads: tuple[NestedKey, ...] = ()
    _to_write = TO_WRITE

    def __init_subclass__(cls, columns: Sequence[str] | None = None, **others: Any) -> None:
        own = None if columns is None else [*dict.fromkeys(["rollout", *columns])]
        super().__init_subclass__(columns=own, **others)

    def __init__(self, **names: Unpack[ColumnNames]):
        kind = type(self)
        if kind is RewardShaping:
            raise TypeError(TO_WRITE)
        if kind.shape is RewardShaping.shape or not accepts(self.shape, "reward", "rollouts"):
            methods = {name: each for name, each in vars(kind).items() if inspect.isfunction(each)}
            has = [f"{name}{inspect.signature(each)}" for name, each in methods.items() if name[0] != "_"]
            raise TypeError(f"{kind.__name__} defines {', '.join(has) or 'no method'}; {TO_WRITE}")
        self.name_columns(names)
        own = [getattr(self, f"{role}_key") for role in self._columns]
        super().__init__([REWARD, *own, *self.reads], [REWARD])

    @abstractmethod
    def shape(self, reward: Tensor, rollouts: Rollouts) -> Tensor:
        """(V,) float64: the new reward of each rollout.

        Args:
            reward: (V,) float64, one reward for each rollout; NaN: no reward.
            rollouts: one row of each rollout. ``rollouts["tone"]`` is a column, ``rollouts.lengths`` has the
                number of tokens of each rollout, and ``rollouts.groups`` its group.
        """

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Tokens in the loss mask, if the class has this column."""
        return [(self.loss_mask_key, None)] if "loss_mask" in self._columns else []

    def decide(self, rows: Rows) -> None:
        """Rewrite the reward."""
        every, rollouts = rows[REWARD], Rollouts(rows)
        reward = rows.to_voters(every)
        shaped = self.shape(reward, rollouts)
        if not isinstance(shaped, Tensor) or shaped.shape != reward.shape:
            found = tuple(shaped.shape) if isinstance(shaped, Tensor) else type(shaped).__name__
            raise BatchError(
                f"{{reader}}.shape must return one reward for each of {len(reward)} rollouts; it returned "
                f"{found}",
                reader=type(self).__name__,
            )
        known = ~reward.isnan()
        # Rewards are rounded here, so that those equal in the batch are also equal in the table.
        shaped = shaped.to(rows.dtype(REWARD)).double().masked_fill(~known, float("nan"))
        rollouts.require(
            shaped.isfinite() | ~reward.isfinite(),
            "{reader}.shape must return finite rewards; it returned {found}",
            lambda row: (
                f"{float(shaped[row])} for rollout_id {rollouts.name('rollout', row)}, whose reward "
                f"was {float(reward[row])}"
            ),
            reader=type(self).__name__,
        )
        changed = rows.from_voters(shaped)
        rows.put(REWARD, changed if rows.counted is None else torch.where(rows.counted, changed, every))
        rewarded = known.double().sum().clamp_min(1)
        rows.metric("reward_changed", (known & (shaped != reward)).sum() / rewarded)
        rows.metric("mean", add_up(torch.where(known, shaped - reward, 0.0)) / rewarded)


class RewardScale(RewardShaping):
    """Scale and shift the rollout's reward, then clip it: ``min(max(scale · R + bias, low), high)``.

    Reads `rollout_key`. Reads and writes ``("headrace", "reward")``.

    Args:
        scale: factor of the reward.
        bias: added after scaling.
        low: lower bound of the result; −∞: none.
        high: upper bound of the result; ∞: none.
        names: other names of columns, such as `rollout_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: there is no FanOutCollapse before this stage.

    Example:
        >>> RewardScale(scale=2.0, bias=-1.0)
        RewardScale(scale=2.0, bias=-1.0)
    """

    within_groups = True

    def __init__(
        self,
        *,
        scale: float = 1.0,
        bias: float = 0.0,
        low: LowerBound = -INF,
        high: UpperBound = INF,
        **names: Unpack[ColumnNames],
    ):
        super().__init__(**names)
        if not low <= high:
            raise ValueError(f"low must be ≤ high; got {low} and {high}")
        self.scale, self.bias, self.low, self.high = scale, bias, low, high

    def shape(self, reward: Tensor, rollouts: Rollouts) -> Tensor:
        """(V,)."""
        return (self.scale * reward + self.bias).clamp(self.low, self.high)


class OverlongPunishment(RewardShaping, columns=("loss_mask",)):
    """Add :func:`overlong_punishment` of the rollout's tokens to its reward.

    Reads `loss_mask_key`, ``("headrace", "length")`` if it exists, and `rollout_key`. Reads and writes
    ``("headrace", "reward")``.

    Args:
        max_length: L_max, tokens in the loss over all segments of a rollout.
        cache: L_cache, number of tokens, in (0, L_max].
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.

    Example:
        >>> OverlongPunishment(max_length=10, cache=4)
        OverlongPunishment(max_length=10, cache=4)
    """

    within_groups = True

    def __init__(self, *, max_length: int, cache: int, **names: Unpack[ColumnNames]):
        super().__init__(**names)
        if not 0 < cache <= max_length:
            raise ValueError(f"cache must be in (0, max_length]; got {cache} and {max_length}")
        self.max_length, self.cache = max_length, cache

    def decide(self, rows: Rows) -> None:
        """Rewrite the reward, and record the greatest length without punishment."""
        super().decide(rows)
        rows.metric("unpunished", self.max_length - self.cache)

    def shape(self, reward: Tensor, rollouts: Rollouts) -> Tensor:
        """(V,)."""
        return reward + overlong_punishment(rollouts.lengths, max_length=self.max_length, cache=self.cache)


class LengthPenalty(RewardShaping, columns=("loss_mask",)):
    """Add :func:`length_penalty` of the rollout's tokens to its reward.

    Reads `loss_mask_key`, ``("headrace", "length")`` if it exists, and `rollout_key`. Reads and writes
    ``("headrace", "reward")``.

    Args:
        coefficient: reward per token, ≥ 0.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.

    Example:
        >>> LengthPenalty(coefficient=0.01)
        LengthPenalty(coefficient=0.01)
    """

    within_groups = True

    def __init__(self, *, coefficient: float, **names: Unpack[ColumnNames]):
        super().__init__(**names)
        self.coefficient = within("coefficient", coefficient, 0)

    def shape(self, reward: Tensor, rollouts: Rollouts) -> Tensor:
        """(V,)."""
        return reward + length_penalty(rollouts.lengths, coefficient=self.coefficient)


class RelativeLength(RewardShaping, columns=("loss_mask", "group")):
    """Multiply the reward by :func:`relative_length` of the rollout's tokens in its group.

    Reads `loss_mask_key`, ``("headrace", "length")`` if it exists,
    `rollout_key` and `group_key`. Reads and writes ``("headrace", "reward")``.

    Args:
        coefficient: c ≥ 0.
        form: ``bonus``, ``rescale``.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a reward is negative under ``rescale``, which would raise this reward.

    Example:
        >>> RelativeLength(form="rescale", coefficient=0.33)
        RelativeLength(coefficient=0.33, form='rescale')
    """

    within_groups = True

    def __init__(self, *, coefficient: float, form: Form = "bonus", **names: Unpack[ColumnNames]):
        super().__init__(**names)
        self.form = form
        self.coefficient = within("coefficient", coefficient, 0)

    def shape(self, reward: Tensor, rollouts: Rollouts) -> Tensor:
        """(V,)."""
        if self.form == "rescale":
            rollouts.require(
                ~(reward < 0),
                "form='rescale' needs rewards ≥ 0, because it raises negative rewards of long rollouts; "
                "found {found}. Put RewardScale with a bias before this stage, or use form='bonus'",
                lambda row: f"{float(reward[row])} at row {rollouts.at(row)}",
            )
        return reward * relative_length(
            reward,
            rollouts.lengths,
            rollouts.groups.labels,
            form=self.form,
            coefficient=self.coefficient,
        )

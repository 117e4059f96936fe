"""The table that stages decide on: a few numbers per row, on the CPU. Tokens stay on their device.

A run reads the table once. Each stage reads and changes the table. Rows are gathered at the end::

    rows = Rows.read(batch)             # group_id, rollout_id, reward, ... as columns
    for stage in stages:
        stage.decide(rows.seen_by(stage))   # require, leave, write columns
    batch = rows.write()                # the batch with all decisions

A stage reads columns by role (``rows["reward"]``), ids (``rows.groups``, ``rows.rollouts``), one row of each
rollout in the statistics (``rows.voters``), and numbers that were computed from tokens (``rows.measured``).
It refuses the batch (``require``), takes rows out (``leave``), writes columns (``put``) and records numbers
of the batch (``metric``). It declares the roles that it reads as `columns`, and then has the options for
their keys.

An excluded row trains nothing and enters no statistic, so ``require`` and the sums of ``rows.groups`` and
``rows.rollouts`` skip it. In the view ``rows.with_excluded`` it is checked and counts like any other row.

>>> from tensordict import TensorDict
>>> from headrace.transforms import BatchTransform, Criterion
>>> class AboveMiddle(BatchTransform, columns=("reward", "group", "rollout", "advantage")):
...     reasons = {"low": "dropped"}  # why its rows leave
...     def __init__(self, *, low: float = 0.0, **names):
...         self.name_columns(names)  # sets self.reward_key, self.group_key, ...
...         reads = [("headrace", "reward"), self.reward_key, self.group_key, self.rollout_key]
...         super().__init__(in_keys=reads, out_keys=[self.advantage_key])
...         self.low = low
...     def decide(self, rows):
...         rows.require(rows.reward.isfinite(), "rewards must be finite; found {found}")
...         reward, groups = rows.voters.reward, rows.voters.groups
...         middle = groups.spread(groups.max(reward) + groups.min(reward)) / 2
...         rows.put("advantage", rows.from_voters(reward - middle), ndim=3)
...         rows.leave(rows.reward < self.low, "low", "dropped")  # the next stage does not see them
...         rows.metric("voters", len(rows.voters))
>>> batch = {"group_id": [1, 1, 1], "rollout_id": [4, 5, 5], ("next", "reward"): [0.0, 2.0, 2.0]}
>>> AboveMiddle(low=1.0)(TensorDict(batch, batch_size=[3]))["advantage"].flatten().tolist()
[1.0, 1.0]

A criterion of the filter returns the rows that stay:

>>> class Short(Criterion, columns=("loss_mask",)):
...     reason = "long"  # the name in the ledger
...     def __init__(self, *, most: int, **names):
...         super().__init__(**names)
...         self.most = most
...     def decide(self, rows):
...         return rows.lengths <= self.most  # (M,) bool

A baseline is an entry of ``BASELINES`` in ``advantage/baselines.py``: R − b, from the rewards of the voters,
sorted within each group (:class:`~headrace.transforms.stages.advantage.Grouped`). The stage handles ids,
fan-out, ranks and checks.

>>> above_smallest = lambda g, formula: g.reward - g.spread(g.smallest)  # spread: (P,) per group to (V,)

A view keeps its rows when some of them leave. The next stage gets a new view without these rows. Rows that
a view excludes are skipped at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .columns import COLUMNS, DEFAULTS, WRITERS
from .errors import BatchError, MissingKeyError, count_of, listing
from .fates import Effect
from .ids import Ids
from .labels import as_ids
from .options import nested_key
from .rewards import EXACT, INEXACT
from .schema import (
    COUNTED,
    FLOAT,
    IN_LOSS,
    INTO,
    LENGTH,
    OF_LENGTHS,
    REWARD,
    SEGMENTS,
    STATUS_KEYS,
    facts_of,
    no_lengths,
    not_written,
)
from .table import AHEAD, OF_THE_TABLE, Late, Table, TokenCount, Written
from .tensordicts import (
    ATTENTION,
    PROMPT,
    RESPONSE,
    column_of,
    device_of,
    flat_rows,
    number_column,
    read_packed,
    shallow_copy,
    write_column,
)

_NAMES = {"group": "group_id", "rollout": "rollout_id"}  # names of the id columns in messages
DESCRIBED = 100  # an error describes at most this many rows
OF_TOKENS_IS = "a token column is rows.token_column(KEY), and the batch with its tokens is rows.tokens()"


class Rows:
    """A view of the table: the rows that a stage sees, with columns under the names that the stage uses.

    M is the number of rows of this view, N ≥ M ≥ V, and N ≥ B. To convert values of other rows to the M rows
    and back, use:

    =================================================== ==================== ==================
    of                                                  to the M rows        from the M rows
    =================================================== ==================== ==================
    the N rows of the table (:attr:`on_arrival`)        :meth:`from_arrival` :meth:`to_arrival`
    the V first rows of their rollouts (:attr:`voters`) :meth:`from_voters`  :meth:`to_voters`
    the B rows of this rank's batch                     :meth:`from_batch`   :meth:`to_batch`
    =================================================== ==================== ==================

    :meth:`from_batch` takes one column, :meth:`measured` several with one exchange. :meth:`Table.measure`
    takes one, and also keeps the result as a column of the table.

    Args:
        table: the table, which all views share.
        names: key of each column, by role.
        reader: class name of the stage, for messages.
        stage: name of the stage in the pipeline; a prefix of its reasons and metrics.
        index: (M,) int64, table indices of the rows of this view; None: all rows.
        declared: roles whose key is an option of the stage; None: not known.
        all_count: excluded rows count and are checked like the others.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"group_id": [4, 4, 9], ("next", "reward"): [0.0, 2.0, 5.0]}, batch_size=[3])
        >>> rows = Rows.read(batch)
        >>> rows["reward"].tolist(), rows.groups.sum(rows["reward"]).tolist()
        ([0.0, 2.0, 5.0], [2.0, 5.0])
        >>> rows.leave(rows["reward"] > 4, "too_high", "dropped")
        >>> rows["doubled"] = 2 * rows["reward"]
        >>> rows.write()["doubled"].tolist()
        [0.0, 4.0]
    """

    def __init__(
        self,
        table: Table,
        names: Mapping[str, NestedKey | None],
        reader: str = "a stage",
        stage: str = "",
        index: Tensor | None = None,
        declared: Collection[str] | None = None,
        all_count: bool = False,
    ):
        self.table, self.names, self.reader, self.stage, self.index = table, names, reader, stage, index
        self.declared, self.all_count = declared, all_count

    reads: tuple[Any, Collection[Any]] | None = None  # the reader, and the keys it may read; None: any
    # The attributes of a view. No other can be set: it would look like a column.
    _own: tuple[str, ...] = ("table", "names", "reader", "stage", "index", "declared", "all_count", "reads")

    # -- columns -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.table.size if self.index is None else len(self.index)

    def has(self, role: Any) -> bool:
        """Whether the table or the batch has this column. If only the batch has it, this reads the device."""
        key, table = self.key(role), self.table
        if table.is_late(key):
            table.settle()
        if key not in table.columns:
            table.load([key])
        return key in table.columns

    def __getitem__(self, role: Any) -> Tensor:
        """(M,) or (M, K): a column, by its role or its key.

        Raises:
            MissingKeyError: the column is missing; the message lists the columns of the batch.
            BatchError: the stage or criterion has not declared the column.
        """
        if not self.has(role):
            raise self.missing(role)
        if self.reads is not None:
            self._refuse_undeclared(role, *self.reads)
        return self.from_arrival(self.table.columns[self.key(role)])

    if not TYPE_CHECKING:  # a type checker would take any name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property, whose own error says what is missing
                return object.__getattribute__(self, name)
            raise AttributeError(f"there is no rows.{name}; a column is rows[{name!r}]; {OF_TOKENS_IS}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._own:
            raise AttributeError(f"rows.{name} = … writes no column: call rows.put({name!r}, values)")
        super().__setattr__(name, value)

    def number(self, role: Any) -> Tensor:
        """(M,): a column of one number per row.

        Raises:
            MissingKeyError: the column is missing.
            BatchError: the column has several numbers per row.
        """
        column = self[role]
        if column.ndim > 1:
            raise BatchError(
                f"{{reader}} needs one number per row in {{column}}, for {count_of(len(self), 'row')}; found "
                f"{tuple(column.shape)}",
                **self.facts(role),
            )
        return column

    def integers(self, role: Any, name: str) -> Tensor:
        """(M,) int64: a column of one integer per row; `name` is its name in messages.

        Raises:
            MissingKeyError: the column is missing.
            BatchError: a value is not an integer.
        """
        return as_ids(self.number(role), name)

    @property
    def reward(self) -> Tensor:
        """(M,) float64: the rollout's reward if a stage has written it, else the row's collected reward."""
        return self[REWARD] if self.has(REWARD) else self.exactly(self.number("reward"))

    def exactly(self, rewards: Tensor) -> Tensor:
        """(M,) or (M, K) rewards as float64.

        Raises:
            BatchError: the rewards are texts, or a whole number is so large that float64 does not hold it.
        """
        if (texts := self.table.texts.get(self.key("reward"))) is not None:
            texts = [each for each in texts if each]
            names = dict(zip(as_ids(texts, "reward").tolist(), texts, strict=True))
            self.require(
                torch.zeros(len(self), dtype=torch.bool),
                "every reward must be a number; {column} has texts: {found}. Convert them with float(), or "
                "name the column that has the rewards",
                lambda row: (
                    f"{names.get(int(rewards[row]), '')!r} at row {self.at(row)}, "
                    f"rollout {self.name('rollout', row)}"
                ),
                "reward",
            )
        if rewards.dtype is torch.int64:
            per_row = rewards.reshape(len(self), -1)
            self.require(
                ((per_row >= -EXACT) & (per_row <= EXACT)).all(1),
                INEXACT,
                lambda row: f"{few(per_row[row])} at row {self.at(row)}",
            )
        return rewards.double()

    @property
    def status(self) -> Tensor | None:
        """(M,) int64: the :class:`Status` of each row; None if the batch has no status.

        Read from `status_key` if that is set, else from ``("next", "status")``, else from ``status``.
        """
        if self.key("status") is not None:
            return self.integers("status", "status")
        self.table.load(STATUS_KEYS)
        for key in STATUS_KEYS:
            if key in self.table.columns:
                return as_ids(self.from_arrival(self.table.columns[key]), "status")
        return None

    def dtype(self, role: Any) -> torch.dtype:
        """The dtype of a column in the batch, or the dtype in which it will be written."""
        key = self.key(role)
        written = self.table.written.get(key)
        return self.table.dtypes[key] if written is None else written.dtype

    def __setitem__(self, role: Any, values: Tensor) -> None:
        self.put(role, values)

    def put(
        self,
        role: Any,
        values: Tensor,
        *,
        dtype: torch.dtype | None = None,
        ndim: int | None = None,
        fill: float | None = None,
    ) -> None:
        """Write a column.

        Args:
            role: role or key of the column.
            values: (M,) or (M, K), for the rows of this view.
            dtype: dtype of the column in the batch. None: the dtype that it already has, else the dtype of
                `values`, with float32 in place of float64.
            ndim: number of dimensions of the column in the batch. None: as many as it already has, else as
                `values`.
            fill: value of a new column on rows outside of this view. None: NaN, or 0 for integers and bools.

        Raises:
            BatchError: `values` is not a tensor with one entry for each row; or the column is not in the
                `out_keys` of the stage.
        """
        table, key = self.table, cast(NestedKey, self.key(role))
        if not isinstance(values, Tensor) or values.shape[:1] != (len(self),):
            found = (
                f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            )
            raise BatchError(
                "{reader} must write {key} as a tensor, one entry for each of {count} rows; found {found}",
                reader=self.reader,
                key=repr(key),
                count=len(self),
                found=found,
            )
        writes = () if self.reads is None else (LENGTH, *getattr(self.reads[0], "out_keys", ()))
        if self.reads is not None and key not in map(nested_key, writes):
            raise BatchError(
                "{reader} writes {key} and does not declare it, so a pipeline could not refuse a stage that "
                "reads it earlier. Declare it: {key} must be in its out_keys",
                reader=type(self.reads[0]).__name__,
                key=repr(key),
            )
        column, written = table.columns.get(key), table.written.get(key)
        # 1. Dtype and dimensions in the batch: as written before, else as on arrival, else as in the values.
        if dtype is None:
            new = FLOAT if values.dtype is torch.float64 else values.dtype
            dtype = written.dtype if written else table.dtypes.get(key, new)
        if ndim is None:
            came = None if written or key not in table.dtypes else number_column(table.batch, key, raw=True)
            ndim = written.ndim if written else values.ndim if came is None else came.ndim
        # 2. Dtype in the table: bool, int64 or float64. float64 can hold the others.
        if values.dtype is not torch.bool:
            values = values.double() if values.is_floating_point() else values.long()
        if column is not None and column.dtype != values.dtype:
            kind = torch.float64 if torch.float64 in (column.dtype, values.dtype) else torch.int64
            column, values = column.to(kind), values.to(kind)
        # 3. Rows outside of this view keep their values.
        if self.index is None:
            column = values
        else:
            if column is None or column.shape[1:] != values.shape[1:]:
                nothing = float("nan") if values.is_floating_point() else 0
                column = values.new_full((table.size, *values.shape[1:]), nothing if fill is None else fill)
            column = column.index_copy(0, self.index, values)
        table.columns[key], table.written[key] = column, Written(dtype, ndim)

    # -- ids -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> Ids:
        """The group id of each row."""
        return self.ids("group")

    @property
    def rollouts(self) -> Ids:
        """The rollout id of each row."""
        return self.ids("rollout")

    def ids(self, role: str, *, checked: bool = True) -> Ids:
        """The ids of a column. Sums over them leave out excluded rows.

        If the key of the column is None, each row has its own id.

        Raises:
            MissingKeyError: the column is missing.
            BatchError: an id is missing (-1) or not an integer.
        """
        key, table = self.key(role), self.table
        if key is not None and not self.has(role):
            raise self.missing(role)
        if self.reads is not None:
            self._refuse_undeclared(role, *self.reads)
        # Numbering ids costs a sort. So the table keeps the ids of all its rows, and of the last other view,
        # until one of the tensors in `made_from` is replaced.
        made_from = table.columns.get(key), self.index, self.all_count or table.fates.counted, table.size
        slot = key, self.all_count, self.index is table.fates.index
        before, ids = table.ids.get(slot, (made_from, None))
        if ids is None or not all(map(is_, before, made_from)):
            labels = torch.arange(len(self)) if key is None else as_ids(self.number(role), f"{role}_id")
            ids = Ids(labels, self.counted)
            table.ids[slot] = made_from, ids
        if checked and ids.lowest < 0:
            why = "compared with one another" if role == "group" else f"taken for one {role}"
            self.require_set(ids, f"{role}_id", f"rows without an id would be {why}")
        return ids

    # -- decisions -----------------------------------------------------------------------------------------

    def require(
        self,
        ok: Tensor,
        message: str,
        describe: Callable[[int], str] | None = None,
        role: Any = None,
        unit: Ids | None = None,
        **facts: Any,
    ) -> None:
        """Refuse the batch unless (M,) bool `ok` is True for all rows that are not excluded.

        Args:
            ok: one bool per row of this view.
            message: what is required, ``{found}``, and what to do. ``{count}`` is the number of bad rows,
                ``{s}`` the plural s. ``{action=drop}`` is an option of this stage to set,
                ``{filter/action=drop}`` of another; the command shows it as an override.
            describe: a function that describes row i of this view; None: its row number. Equal descriptions
                are listed once.
            role: role or key of the column that the message names: ``{column}``.
            unit: ids. Of the bad rows with the same id, only the first is described.
            facts: what else the message names, by its field. Data must be a fact, because its text may have
                braces. With ``ids="group_id"`` or ``"rollout_id"`` the message says where these ids are
                stamped.

        Raises:
            BatchError: `ok` is False for some rows; the message describes them.
        """
        if bool(ok.all()):
            return
        if (counted := self.counted) is not None:
            ok = ok | ~counted
            if bool(ok.all()):
                return
        bad = (~ok).nonzero().flatten().tolist()
        describe = describe or (lambda row: f"row {self.at(row)}")
        shown = bad[:DESCRIBED]
        if unit is not None:
            first: dict[int, int] = {}
            for row, of in zip(shown, unit.of[shown].tolist(), strict=True):
                first.setdefault(of, row)
            shown = list(first.values())
        found = listing(dict.fromkeys(map(describe, shown)))
        if len(bad) > DESCRIBED:
            found += f" (the first {DESCRIBED} of {len(bad)} rows)"
        s = "" if len(bad) == 1 else "s"
        facts = {"ids": "", **facts} | ({} if role is None else self.facts(role))
        err = BatchError(message + "{stamped}", found=found, count=len(bad), s=s, **facts)
        err.more = self.table.ranks.note(self.table.starts[0])
        raise err

    def leave(
        self, rows: Tensor | None, reason: str, effect: Effect = "dropped", *, mask_tokens: bool = True
    ) -> None:
        """Take out the rows where (M,) bool `rows` is True, and record the reason in the ledger.

        Args:
            rows: the rows that leave. A row keeps its first reason. A masked row may still be dropped later.
                None: no row; the ledger lists the reason.
            reason: name of the reason.
            effect: ``masked``: out of the loss. ``excluded``: out of the loss and the statistics. ``dropped``
                or ``carried``: out of the batch.
            mask_tokens: whether to mask the tokens of these rows in the batch. False for rows without a token
                in the loss.

        Raises:
            BatchError: rows must be masked, but the batch has neither a loss mask nor log-probabilities.
            ValueError: the reason is registered with another effect.
        """
        fates, name = self.table.fates, self.reason_name(reason)
        fates.register(name, effect)
        if rows is None:
            return
        if effect in ("masked", "excluded") and mask_tokens:
            self.mask(rows)
            fates.masks = True
        fates.excludes |= effect == "excluded"
        if len(rows.nonzero()) == 0:
            return
        fates.leave(self.to_arrival(rows), name, effect)
        if effect == "excluded":
            self.__dict__.pop("voters", None)  # made again, from the new `fates.counted`

    def reason_name(self, reason: str) -> str:
        """The name of a reason in the ledger: ``<stage>/<reason>``."""
        return f"{self.stage}/{reason}" if self.stage else reason

    def mask(self, rows: Tensor) -> None:
        """Mask the tokens of (M,) bool `rows` when the batch is written, and note their number of tokens now.

        Raises:
            BatchError: the batch has no column in which tokens can be masked.
        """
        masking, batch = self.table.masking, self.table.batch
        if masking.note(batch, self.key("loss_mask"), self.key("log_prob"), rows):
            tokens = self._count("loss_mask")
            if self.has(LENGTH):
                before = self[LENGTH]
                lengths = torch.where(rows & (before < 0), tokens, before)
            else:
                lengths = torch.where(rows, tokens, -1)
            self.put(LENGTH, lengths, ndim=1, fill=-1)

    def metric(self, name: str, value: Tensor | float) -> None:
        """Record a metric of this batch as ``<stage>/<name>``."""
        self.table.metrics[f"{self.stage}/{name}" if self.stage else name] = float(value)

    # -- one row of each rollout, other views, and values between them -------------------------------------

    @cached_property
    def voters(self) -> Rows:
        """A view with one row per rollout in the statistics: its first row that is not excluded."""
        has_one_each = self.counted is None and self.rollouts.n == len(self)
        return self if has_one_each else self.where(self.rollouts.is_first)

    def to_voters(self, values: Tensor) -> Tensor:
        """Map (M, ...) values of this view to (V, ...) values of :attr:`voters`."""
        return values if self.voters is self else values[self.rollouts.is_first]

    def from_voters(self, values: Tensor) -> Tensor:
        """Map (V, ...) values of :attr:`voters` to (M, ...): each on all rows of its rollout.

        Excluded rows get 0.
        """
        if self.voters is self:
            return values
        of = self.rollouts.of
        per_rollout = values.new_zeros(self.rollouts.n, *values.shape[1:])
        per_rollout[self.to_voters(of)] = values
        column = per_rollout.index_select(0, of)
        if self.counted is not None:
            column[~self.counted] = 0
        return column

    @property
    def counted(self) -> Tensor | None:
        """(M,) bool: rows that are in the statistics, so not excluded; None: all rows are."""
        counted = None if self.all_count else self.table.fates.counted
        return None if counted is None else self.from_arrival(counted)

    @property
    def with_excluded(self) -> Rows:
        """The same rows, where excluded rows count and are checked like the others."""
        return self if self.counted is None else self._view(self.index, all_count=True)

    @property
    def in_loss(self) -> Tensor:
        """(M,) bool: rows that are in the loss."""
        return self.from_arrival(self.table.fates.in_loss)

    @property
    def votes_only(self) -> Tensor | None:
        """(M,) bool: rows of rollouts that vote and do not train; None: there are none."""
        votes = self.table.fates.votes_only
        return None if votes is None else self.from_arrival(votes)

    @property
    def on_arrival(self) -> Rows:
        """A view of all rows of the table, also of those that have left. Excluded rows count in it."""
        return self.with_excluded if self.index is None else self._view(None, all_count=True)

    def from_arrival(self, values: Tensor) -> Tensor:
        """Map (N, ...) values of :attr:`on_arrival` to (M, ...) values of this view."""
        return values if self.index is None else values.index_select(0, self.index)

    def to_arrival(self, values: Tensor) -> Tensor:
        """Map (M, ...) values of this view to (N, ...) values of :attr:`on_arrival`, 0 on other rows."""
        if self.index is None:
            return values
        return values.new_zeros(self.table.size, *values.shape[1:]).index_copy_(0, self.index, values)

    def where(self, chosen: Tensor | None) -> Rows:
        """A view of the rows where (M,) bool `chosen` is True; None: of all rows."""
        if chosen is None or bool(chosen.all()):
            return self
        rows = chosen.nonzero().flatten()
        return self._view(rows if self.index is None else self.index[rows], self.all_count)

    def _view(self, index: Tensor | None, all_count: bool) -> Rows:
        view = Rows(self.table, self.names, self.reader, self.stage, index, self.declared, all_count)
        view.reads = self.reads
        return view

    def of_this_rank(self, values: Tensor) -> Tensor:
        """The part of (M, ...) `values` for the rows of this rank."""
        return self.table.of_this_rank(values, self.index)

    # -- tokens of each row, and numbers computed from tokens ----------------------------------------------

    @property
    def lengths(self) -> Tensor:
        """(M,) int64: tokens that the row had in the loss mask on arrival, even if it is masked now."""
        return self.count("loss_mask", arrived=True)

    def count(self, role: Any, *, finite: bool = False, arrived: bool = False) -> Tensor:
        """(M,) int64: number of True entries in each row of a token mask, dense or ragged.

        Args:
            role: role or key of the mask.
            finite: count only tokens with a finite log-probability.
            arrived: rows that a stage has masked get the count that they had before.

        Raises:
            MissingKeyError: the mask is missing.
            BatchError: the mask is not bool, or the stage or criterion has not declared it.
        """
        tokens = self._count(role, finite=finite, arrived=arrived)
        if self.reads is not None:
            self._refuse_undeclared(role, *self.reads)
        return tokens

    def _count(self, role: Any, *, finite: bool = False, arrived: bool = False) -> Tensor:
        count = TokenCount(self.key(role), self.key("log_prob") if finite else None)
        if count not in self.table.columns:
            self.table.load(tokens=[count])
        if count not in self.table.columns:
            if finite and not self.table.masking.no_lengths:
                raise no_loss_mask(self.table.batch, count.mask)
            raise self.missing(role)
        tokens = self.from_arrival(self.table.columns[count])
        if not arrived or LENGTH not in self.table.columns:
            return tokens
        before = self[LENGTH]
        return torch.where(before < 0, tokens, before)

    def measured(self, **numbers: Tensor) -> dict[str, Tensor]:
        """Read numbers that were computed from tokens, in one device read and one exchange.

        Args:
            numbers: by name, (B,) or (B, K) for the rows of the batch, on their device.

        Returns:
            By name, (M,) or (M, K) float64 for the rows of this view. The table does not keep them.
        """
        parts = [flat_rows(values.detach().double()) for values in numbers.values()]
        column = self.from_batch(torch.cat(parts, 1))
        split = column.split([part.shape[1] for part in parts], 1)
        pairs = zip(numbers.items(), split, strict=True)
        return {name: part if values.ndim > 1 else part[:, 0] for (name, values), part in pairs}

    def from_batch(self, values: Tensor) -> Tensor:
        """Map (B, ...) values of this rank's batch to (M, ...), on the CPU: one read and one exchange."""
        return self.from_arrival(self.table.from_batch(values.cpu()))

    # -- stages that change tokens -------------------------------------------------------------------------

    def tokens(self) -> TensorDictBase:
        """A shallow copy of this rank's rows that have not left: TensorDict ``[B]`` on their device.

        It does not have the columns that stages wrote; only the table has them (:meth:`Table.with_written`).
        Rows out of the loss are not masked in it yet.
        """
        self.table.settle()
        self.table.compact()
        return shallow_copy(self.table.batch)

    def token_column(self, role: Any) -> Tensor:
        """(B, T): a token column of this rank's rows, by its role or its key, on their device.

        :meth:`from_batch` maps numbers (B,) that are computed from it to the rows of this view. A loss mask
        still has the tokens of rows that an earlier stage has masked; these rows are not in :attr:`in_loss`.

        Raises:
            MissingKeyError: the column is missing.
            BatchError: the column is ragged or not a tensor, or the stage or criterion has not declared it.
        """
        column = column_of(self.tokens(), self.key(role))
        if column is None:
            raise self.missing(role)
        if not isinstance(column, Tensor) or column.is_nested:
            found = "ragged rows" if isinstance(column, list | Tensor) else type(column).__name__
            raise BatchError(f"{{reader}} needs dense rows in {{column}}; found {found}", **self.facts(role))
        if self.reads is not None:
            self._refuse_undeclared(role, *self.reads, of_tokens=True)
        return column

    def to_batch(self, values: Tensor) -> Tensor:
        """Map (M, ...) values of this view to (B, ...) for the rows of :meth:`tokens`, on their device."""
        return self.of_this_rank(values).to(device_of(self.table.batch))

    def when_gathered(
        self,
        change: Callable[[TensorDictBase, dict[str, Tensor]], None],
        writes: Sequence[NestedKey],
        **numbers: Tensor,
    ) -> None:
        """Change token columns later, when rows are gathered, one minibatch at a time.

        If a stage reads one of these columns before that, the change is made then (:meth:`Table.settle`).

        Args:
            change: a function of gathered rows and their `numbers`, both on the device of the rows. The rows
                have the columns that stages wrote. The result for a token must depend on its row alone.
            writes: the columns that `change` writes.
            numbers: by name, (M,) or (M, K) for the rows of this view.
        """
        every = {name: self.to_arrival(values) for name, values in numbers.items()}
        self.table.late.append(Late(change, every, tuple(writes)))

    def require_set(
        self, ids: Ids | Tensor, name: str, why: str, *, who: str = "every row", needed: Tensor | None = None
    ) -> None:
        """Refuse the batch if an id is missing, that is, below 0.

        Args:
            ids: the ids, or (M,) int64.
            name: name of the ids in the message.
            why: the reason why rows need an id, for the message.
            who: which rows need an id, for the message.
            needed: (M,) bool, rows that need an id; None: rows that are not excluded.

        Raises:
            BatchError: an id is missing; the message lists the rows.
        """
        labels = ids.labels if isinstance(ids, Ids) else ids
        if isinstance(ids, Ids) and ids.lowest >= 0:
            return
        ok, needed = labels >= 0, self.counted if needed is None else needed
        self.require(
            ok if needed is None else ok | ~needed,
            f"{who} needs a {{ids}} ≥ 0; found {{found}}: {why}",
            lambda row: f"{int(labels[row])} at row {self.at(row)}",
            ids=name,
        )

    # -- what messages say ---------------------------------------------------------------------------------

    def at(self, row: int) -> int:
        """The number that row i of this view had in the batch on arrival."""
        return row if self.index is None else int(self.index[row])

    def name(self, role: str, row: int) -> str:
        """The id of row i of this view as text; its row number if the batch has no such ids."""
        return str(int(self.table.columns[self.key(role)][self.at(row)]) if self.has(role) else self.at(row))

    def missing(self, role: Any, option: str = "") -> MissingKeyError:
        """Make the error for a missing column: it lists the columns of the batch and the option to set."""
        if (key := self.key(role)) in WRITERS:
            return not_written(self.reader, key, WRITERS[key])
        if role in ("batch", "tensordict", "td"):
            return MissingKeyError(f"{self.reader} finds no column {role!r}: {OF_TOKENS_IS}")
        facts = self.facts(role, option)
        if self.table.masking.no_lengths and (facts["option"] or f"{role}_key") in OF_LENGTHS:
            return no_lengths(self.reader, self.stage)
        return MissingKeyError("{reader} {missing}", **facts)

    def facts(self, role: Any, option: str = "") -> dict[str, Any]:
        """What errors say of a column (:func:`facts_of`); `option`: the option that names it, if any."""
        has_option = self.names if self.declared is None else self.declared
        if not option and isinstance(role, str) and role in has_option:
            option = f"{role}_key"
        key = self.key(role)
        if self.table.batch is None and role in COLUMNS:  # an argument of a function
            key = default if isinstance(default := COLUMNS[role].default, str) else role
        facts = facts_of(self.table.batch, key, option, self.reader)
        return facts | {"role": role if isinstance(role, str) and role in COLUMNS else ""}

    def _refuse_undeclared(
        self, role: Any, owner: Any, declared: Collection[Any], *, of_tokens: bool = False
    ) -> None:
        """Refuse to read a column that the stage or criterion does not declare."""
        key = self.key(role)
        of_the_table = isinstance(key, tuple) and (type(key) is not tuple or key[0] == "headrace")
        of_the_table &= key != REWARD  # a stage that shapes the reward writes it
        if key is None or key == INTO or of_the_table or key in declared:
            return
        kind = type(owner).__name__
        how = f"{key!r} must be in its in_keys"
        if isinstance(role, str) and role in self.names:
            how = f"class {kind}(…, columns=({role!r},)), as CONTRIBUTING.md shows"
        elif of_tokens and hasattr(owner, "token_keys"):
            how = f"token_keys = ({key!r},) in the class {kind}"
        elif hasattr(owner, "shape"):
            how = f"reads = ({key!r},) in the class {kind}"
        raise BatchError(
            "{reader} reads {key} and does not declare it, so a pipeline could not refuse a stage that "
            "writes it later. Declare it: {how}",
            reader=kind,
            key=repr(key),
            how=how,
        )

    # -- what pipelines call -------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        batch: TensorDictBase,
        *,
        keys: Iterable[NestedKey | None] = (),
        tokens: Iterable[tuple[NestedKey, NestedKey | None]] = (),
        ranks: Any = None,
        about: Callable[[], str] = str,
    ) -> Rows:
        """Read the table of a batch: all columns in one packed device read.

        Args:
            batch: TensorDict ``[B]``, flat. Its tokens stay on their device.
            keys: columns that stages will need. Those with a few numbers per row are read now, wider ones
                when a stage asks for them.
            tokens: token counts that stages will need: pairs of a loss mask and log-probabilities (or None).
            ranks: the ranks that share the batch. One exchange sends the rows of all ranks to each rank.
            about: returns text about the stages that read the batch, which must be equal on all ranks.
        """
        table = Table(batch, len(batch))
        table.load([*keys, *OF_THE_TABLE], tokens, most=AHEAD)
        (ranks or table.ranks).share(table, about)
        table.fates.came(*map(table.columns.get, (IN_LOSS, COUNTED)))  # from stages that ran alone
        return cls(table, DEFAULTS)

    @classmethod
    def of(cls, **columns: Tensor | Sequence[Any] | None) -> Rows:
        """Make a table from plain columns, by role. A column that is None is left out.

        Raises:
            BatchError: an id is neither an integer nor text, or columns differ in length or device.
        """
        first = next(iter(columns.values()))
        device = first.device if isinstance(first, Tensor) else torch.device("cpu")
        given: dict[str, Tensor] = {}
        for role, values in columns.items():
            if values is not None:
                is_id = role not in ("reward", "advantage", "baseline_value") and not (
                    isinstance(values, Tensor) and values.dtype is torch.bool
                )
                given[role] = as_ids(values, _NAMES.get(role, role), device=device) if is_id else values
        if len({(len(column), column.device) for column in given.values()}) > 1:
            found = ", ".join(f"{_NAMES.get(role, role)} {len(c)} on {c.device}" for role, c in given.items())
            raise BatchError(f"all columns must have the same length and device; found {found}")
        size = len(next(iter(given.values())))
        table = Table(None, size)
        table.dtypes = {role: column.dtype for role, column in given.items()}
        table.columns = dict(zip(given, read_packed(list(given.values())), strict=True))
        return cls(table, {role: role if role in given else None for role in columns}, declared=())

    def write(self) -> TensorDictBase:
        """Write all decisions into a batch of the rows that have not left. The inverse of :meth:`read`.

        Values are rounded to the dtype of their column. Rows out of the loss are masked. If a rollout lost
        some of its rows, ``("headrace", "segments")`` holds the number of rows that it had.
        """
        segments = None
        if self.table.fates.index is not None and self.has("rollout"):
            every = Rows(self.table, self.names, self.reader, self.stage, None, self.declared, True)
            rollouts = every.ids("rollout", checked=False)
            had, left = rollouts.count, rollouts.sum(self.table.fates.here)
            if self.has(SEGMENTS):
                had = torch.maximum(had, rollouts.max(every[SEGMENTS]))
            if bool(((left > 0) & (left < had)).any()):
                segments = rollouts.spread(had)
        batch = self.table.write()
        if segments is not None:
            write_column(batch, SEGMENTS, segments[self.table.live].to(device_of(batch)))
        return batch

    def seen_by(self, stage: Any, name: str = "") -> Rows:
        """A view of the rows that have not left, with columns under the names that a stage uses."""
        own = column_keys(stage)
        names = {**DEFAULTS, **self.table.names, **own}
        return Rows(self.table, names, type(stage).__name__, name, self.table.fates.index, own)

    def only_declared(self, owner: Any) -> Rows:
        """The same rows. A stage or criterion of a user may only read the columns that it declares.

        The stages and criteria of headrace may read any: a test checks what they declare.
        """
        if type(owner).__module__.startswith("headrace."):
            return self
        view = self._view(self.index, self.all_count)
        traits = ("in_keys", "out_keys", "token_keys")
        keys = [*column_keys(owner).values(), *(mask for mask, _ in getattr(owner, "tokens_counted", ()))]
        keys += [key for trait in traits for key in getattr(owner, trait, ())]
        view.reads = owner, {nested_key(key) for key in keys}
        return view

    def key(self, role: Any) -> NestedKey | None:
        """The key of a column in the batch, by role. ``("turn",)`` is the key ``"turn"``, not the role."""
        if role in self.names:
            return self.names[role]
        return role[0] if type(role) is tuple and len(role) == 1 else role


def stage_parts(stage: Any) -> list[Any]:
    """A stage with its criteria and token term, if it has any; for a `ByColumn`, those of all its stages."""
    own = stages_of_values(stage).values()
    parts = (getattr(each, option, None) for each in own for option in ("criterion", "also", "term"))
    return [stage, *(part for part in parts if part is not None)]


def stages_of_values(stage: Any) -> Mapping[Any, Any]:
    """The stages of a `ByColumn`, by value of its column. Any other stage is returned under None."""
    return getattr(stage, "of_values", {None: stage})


def column_keys(stage: Any) -> dict[str, NestedKey | None]:
    """The key of each column that a stage names, by role: the values of its options ``<role>_key``.

    A class that names columns and has no such options reads them by their default names.
    """
    attributes = getattr(stage, "__dict__", {})  # a function in C has none
    known = type(stage), tuple(attributes)
    if known not in _OPTIONS:
        _OPTIONS[known] = [name for name in attributes if name.endswith("_key")]
    named = {role: column.default for role, column in getattr(stage, "_columns", {}).items()}
    return named | {option[:-4]: nested_key(attributes[option]) for option in _OPTIONS[known]}


_OPTIONS: dict[tuple[type, tuple[str, ...]], list[str]] = {}  # by class and names of attributes


def no_loss_mask(batch: TensorDictBase, key: NestedKey) -> MissingKeyError:
    """Make the error for a batch that does not say which tokens are in the loss."""
    return MissingKeyError(
        "tokens in the loss are those of the mask {column}, or of a response after its "
        f"prompt: {PROMPT!r} and {RESPONSE!r}, together as wide as {ATTENTION!r}. Finite log-probabilities "
        "do not say which tokens train, because those of a scored prompt are finite too. "
        "Write the mask into the batch, True where a token trains; {present}",
        **facts_of(batch, key, "loss_mask_key"),
    )


def few(values: Tensor | Sequence[Any], most: int = 8) -> str:
    """The first `most` values as text, and the number of the others.

    Example:
        >>> few(torch.arange(10)), few(torch.tensor([1.5]))
        ('[0, 1, 2, 3, 4, 5, 6, 7] and 2 more', '[1.5]')
    """
    more = len(values) - most
    shown = values[:most].tolist() if isinstance(values, Tensor) else list(values[:most])
    return f"{shown}" + (f" and {more} more" if more > 0 else "")

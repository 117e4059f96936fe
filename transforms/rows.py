"""The table that stages decide on: a few numbers per row, on the CPU, while tokens stay on their device.

A run reads the table once, every stage is a function of it, and rows are gathered at the end::

    rows = Rows.read(batch)             # group_id, rollout_id, reward, ... as columns
    for stage in stages:
        stage.decide(rows.seen_by(stage))   # require, leave, write columns
    batch = rows.write()                # what was decided, as a batch again

A stage finds here columns by role (``rows["reward"]``), ids (``rows.groups``, ``rows.rollouts``), one row
for each rollout that counts (``rows.voters``), and the verbs: ``require`` refuses the batch, with the ids;
``leave`` takes rows out, with a reason; ``put`` writes a column; ``metric`` says a number of the batch;
``measure`` turns tokens into a number per row. A view stays as it is when rows leave: the next stage gets one
without them.

A stage is a subclass of ``BatchTransform`` (``stage.py``) with ``decide(rows)``. A criterion is one of
``Criterion`` (``filter/criteria.py``), whose ``decide(rows)`` returns (M,) bool, True where the row stays. A
baseline or a scale is a line in ``advantage/baselines.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from .columns import DEFAULTS, WRITERS
from .errors import BatchError, MissingKeyError, listing, who_stamps
from .ids import Ids, as_ids
from .options import nested_key
from .schema import FLOAT, LENGTH, REWARD, SEGMENTS, STATUS_KEYS, key_names
from .table import AHEAD, OF_THE_TABLE, Effect, Late, Reduced, Table, TokenCount, Unread, Written, sources_of
from .tensordicts import (
    column_of,
    device_of,
    flat_rows,
    number_column,
    number_of,
    parts_of,
    read_packed,
    same_column,
    shallow_copy,
    write_column,
)

_NAMES = {"group": "group_id", "rollout": "rollout_id"}  # of the columns of ids, in messages
DESCRIBED = 100  # rows of an error that are described; nobody reads more


class Rows:
    """A view of the table: the rows that a stage sees, and its columns by the names that the stage uses.

    Args:
        table: shared by all views.
        names: the key of each column, by role.
        reader: who reads, for messages.
        index: (M,) int64, which rows of the table; None: all.

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
    ):
        self.table, self.names, self.reader, self.stage, self.index = table, names, reader, stage, index
        self.rank = 0 if table.ranks is None else table.ranks.rank  # of_rank and metric are of its rows

    # -- in and out ---------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        batch: TensorDictBase,
        *,
        keys: Iterable[NestedKey | None] = (),
        tokens: Iterable[tuple[NestedKey, NestedKey | None]] = (),
        ranks: Any = None,
        about: str = "",
    ) -> Rows:
        """Read a batch: all columns in one packed copy.

        Args:
            batch: TensorDict ``[B]``, flat. Its tokens stay where they are.
            keys: columns that will be asked for, of which those of a few numbers per row are read; others are
                when somebody asks.
            tokens: pairs of a loss mask and log-probabilities (or None) whose tokens will be counted.
            ranks: that share the batch: one exchange brings the rows of all to each.
            about: what is done with the batch, the same on all ranks.
        """
        table = Table(batch, len(batch))
        table.load([*keys, *OF_THE_TABLE], tokens, most=AHEAD)
        if ranks is not None:
            ranks.share(table, about)
        table.take_over()
        return cls(table, DEFAULTS)

    @classmethod
    def of(cls, **columns: Tensor | Sequence[Any] | None) -> Rows:
        """A table of plain columns, by role; None is no column.

        Raises:
            BatchError: an id is no integer or text; columns differ in length or device.
        """
        first = next(iter(columns.values()))
        device = first.device if isinstance(first, Tensor) else torch.device("cpu")
        given: dict[str, Tensor] = {}
        for role, values in columns.items():
            if values is not None:
                is_id = role not in ("reward", "advantage") and not (
                    isinstance(values, Tensor) and values.dtype is torch.bool
                )
                given[role] = as_ids(values, _NAMES.get(role, role), device=device) if is_id else values
        if len({(len(column), column.device) for column in given.values()}) > 1:
            found = ", ".join(f"{_NAMES.get(role, role)} {len(c)} on {c.device}" for role, c in given.items())
            raise BatchError(f"columns must have one length and one device; found {found}")
        size = len(next(iter(given.values())))
        table = Table(None, size)
        table.dtypes = {role: column.dtype for role, column in given.items()}
        table.columns = dict(zip(given, read_packed(list(given.values())), strict=True))
        return cls(table, {role: role if role in given else None for role in columns})

    def write(self) -> TensorDictBase:
        """The rows that are here, with all that was decided: the inverse of :meth:`read`.

        Values are rounded to the dtype of their column. Rows out of the loss are masked. Where rollouts have
        lost some of their rows, it says how many they had (``("headrace", "segments")``).
        """
        had = self._segments() if self.table.gone else None
        batch = self.table.write()
        if had is not None:
            write_column(batch, SEGMENTS, had[self.table.live].to(device_of(batch)))
        return batch

    def _segments(self) -> Tensor | None:
        """(N,) int64: rows that each row's rollout arrived with; None where none has lost a part of them."""
        if self.key("rollout") is None or not self.has("rollout"):
            return None
        rollouts = self.on_arrival.ids("rollout", checked=False).everyone
        had, left = rollouts.count, rollouts.sum(self.table.here)
        if self.has(SEGMENTS):
            had = torch.maximum(had, rollouts.max(self.on_arrival[SEGMENTS]))
        return rollouts.spread(had) if bool(((left > 0) & (left < had)).any()) else None

    # -- what a stage sees --------------------------------------------------------------------------------
    def seen_by(self, stage: Any, name: str = "") -> Rows:
        """The rows that are here, with the columns by the names that a stage uses for them."""
        names = {**DEFAULTS, **column_keys(stage)}
        return Rows(self.table, names, type(stage).__name__, name, self.table.index)

    def __len__(self) -> int:
        return self.table.size if self.index is None else len(self.index)

    def key(self, role: Any) -> NestedKey | None:
        """Where a column is in the batch; ``("turn",)`` is the key ``"turn"``, and no role."""
        if role in self.names:
            return self.names[role]
        return role[0] if type(role) is tuple and len(role) == 1 else role

    def has(self, role: Any) -> bool:
        """Whether there is such a column."""
        key, table = self.key(role), self.table
        if table.late and table.is_late(self.key(role)):
            self.table.settle()
        if key is None or key in table.columns:
            return key is not None
        if table.looked_up is not table.batch or key not in table.absent:
            self.table.load([key])
        return key in table.columns

    def __getitem__(self, role: Any) -> Tensor:
        """(M,) or (M, K): a column, by its role or its key.

        Raises:
            MissingKeyError: it is not there; the message lists the columns that are.
        """
        if not self.has(role):
            raise self.missing(role)
        column = self.table.columns[self.key(role)]
        return column if self.index is None else column.index_select(0, self.index)

    def number(self, role: Any) -> Tensor:
        """(M,): a column of one number a row.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it has several numbers a row.
        """
        column = self[role]
        if column.ndim > 1:
            raise BatchError(
                f"{self.reader} needs one number a row in {self.key(role)!r} ({self._option(role)}), for "
                f"{len(self)} rows; found {tuple(column.shape)}"
            )
        return column

    def flags(self, role: Any) -> Tensor:
        """(M,) bool.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it is not bool.
        """
        column = self.number(role)
        if column.dtype is not torch.bool:
            raise BatchError(
                f"{self.reader} needs a bool a row in {self.key(role)!r} ({self._option(role)}); found "
                f"{self.table.dtypes[self.key(role)]}"
            )
        return column

    def integers(self, role: Any, name: str) -> Tensor:
        """(M,) int64.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it has other numbers.
        """
        return as_ids(self.number(role), name)

    def dtype(self, role: Any) -> torch.dtype:
        """In which dtype the batch has a column, or will have it."""
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
            role: or key.
            values: (M,) or (M, K), for the rows of this view.
            dtype: that of the column in the batch; None: the one that it has there, else float32 for
                floats.
            ndim: dimensions of the column in the batch; None: those that it has there.
            fill: for rows outside of this view, where the column is new; None: NaN, or 0 for integers.
        """
        table, key = self.table, cast(NestedKey, self.key(role))
        given = values.dtype  # of which the batch gets a new column; the table has three kinds
        if given is not torch.bool:
            values = values.double() if values.is_floating_point() else values.long()
        there = table.columns.get(key)
        if there is not None and there.dtype != values.dtype:
            kind = torch.float64 if torch.float64 in (there.dtype, values.dtype) else torch.int64
            table.columns[key], values = there.to(kind), values.to(kind)
        before = table.written.get(key)
        if dtype is None:
            dtype = before.dtype if before else table.dtypes.get(key, given)
            if dtype is torch.float64 and key not in table.dtypes and not before:
                dtype = FLOAT
        if ndim is None:
            there = None if before or key not in table.dtypes else number_column(table.batch, key, raw=True)
            ndim = before.ndim if before else values.ndim if there is None else there.ndim
        if self.index is None:
            column = values
        else:
            column = table.columns.get(key)
            if column is None or column.dtype != values.dtype or column.shape[1:] != values.shape[1:]:
                nothing = float("nan") if values.is_floating_point() else 0
                column = values.new_full((table.size, *values.shape[1:]), nothing if fill is None else fill)
            column = column.index_copy(0, self.index, values)
        table.columns[key], table.written[key] = column, Written(dtype, ndim)

    # -- ids ----------------------------------------------------------------------------------------------

    def ids(self, role: str, *, checked: bool = True) -> Ids:
        """The ids of a column, whose sums leave out rows that do not count; where its key is None, each row.

        Raises:
            MissingKeyError: they are not there.
            BatchError: an id is not set; they are no integers.
        """
        key, table = self.key(role), self.table
        column = table.columns.get(key) if key is None or self.has(role) else None
        known = table.ids.get((key, id(self.index)))
        if known is not None and known[0] is column:
            ids = known[1]
        else:
            labels = torch.arange(len(self)) if key is None else as_ids(self.number(role), f"{role}_id")
            ids = Ids(labels, self.counted)
            if self.index is table.index:
                table.ids[key, id(self.index)] = column, ids
        if checked:
            why = {"group": "compared with one another", "rollout": "taken for one rollout"}.get(role, "one")
            self.require_set(ids, f"{role}_id", f"rows without an id would be {why}")
        return ids

    @property
    def groups(self) -> Ids:
        """Which rollouts are compared."""
        return self.ids("group")

    @property
    def rollouts(self) -> Ids:
        """Which rows are one rollout."""
        return self.ids("rollout")

    @cached_property
    def counted(self) -> Tensor | None:
        """(M,) bool: rows in the statistics; None: all are."""
        counted = self.table.counted
        if counted is None or self.index is None:
            return counted
        return counted.index_select(0, self.index)

    @property
    def in_loss(self) -> Tensor:
        """(M,) bool: rows in the loss."""
        return self.table.in_loss if self.index is None else self.table.in_loss[self.index]

    def of_rank(self, values: Tensor) -> Tensor:
        """Those of (M, ...) `values` that are of this rank's rows; all where no ranks share a batch."""
        if self.table.ranks is None:
            return values
        if self.index is None:
            return self.table.of_rank(values, self.rank)
        spans = torch.searchsorted(self.index, torch.tensor(self.table.spans(self.rank))).tolist()
        return torch.cat([values[a:b] for a, b in spans])

    def of_each_rank(self) -> Iterator[Rows]:
        """This view, for the metrics of a rank's rows; where one rank decides, as each rank would have it."""
        yield self
        for rank in self.table.of_others:
            view = copy(self)
            view.rank = rank
            yield view

    def where(self, chosen: Tensor) -> Rows:
        """The rows of this view where (M,) bool `chosen`."""
        if bool(chosen.all()):
            return self
        rows = chosen.nonzero().flatten()
        index = rows if self.index is None else self.index[rows]
        return Rows(self.table, self.names, self.reader, self.stage, index)

    @cached_property
    def statistics(self) -> Rows:
        """The rows in the statistics: to them an excluded row does not exist."""
        return self if self.counted is None else self.where(self.counted)

    @property
    def on_arrival(self) -> Rows:
        """All rows of the table, also those that have left, by which segments are numbered."""
        return self if self.index is None else Rows(self.table, self.names, self.reader, self.stage)

    def from_arrival(self, values: Tensor) -> Tensor:
        """(N, ...) of :attr:`on_arrival` → (M, ...) of this view."""
        return values if self.index is None else values.index_select(0, self.index)

    def to_arrival(self, values: Tensor) -> Tensor:
        """(M, ...) of this view → (N, ...) of :attr:`on_arrival`, 0 elsewhere."""
        if self.index is None:
            return values
        return values.new_zeros(self.table.size, *values.shape[1:]).index_copy_(0, self.index, values)

    @cached_property
    def voters(self) -> Rows:
        """One row for each rollout in the statistics, its first row that counts."""
        return self.where(self.rollouts.is_first)

    def from_voters(self, values: Tensor) -> Tensor:
        """(V, ...) → (M, ...): what is known of each rollout, on its rows; 0 on rows that do not count."""
        if self.voters is self:
            return values
        of = self.rollouts.of
        per_rollout = values.new_zeros(self.rollouts.n, *values.shape[1:])
        per_rollout[of[self.rollouts.is_first]] = values
        column = per_rollout.index_select(0, of)
        if self.counted is not None:
            column[~self.counted] = 0
        return column

    @property
    def status(self) -> Tensor | None:
        """(M,) int64, :class:`Status`, by its key, else ``("next", "status")``, else ``status``; or None."""
        if self.key("status") is not None:
            return self.integers("status", "status")
        self.table.load(STATUS_KEYS)
        found = next((key for key in STATUS_KEYS if key in self.table.columns), None)
        if found is None:
            return None
        column = as_ids(self.table.columns[found], "status")
        return column if self.index is None else column.index_select(0, self.index)

    def from_statistics(self, values: Tensor) -> Tensor:
        """(S, ...) → (M, ...): values of the rows in the statistics; 0 on the others."""
        if self.statistics is self:
            return values
        column = values.new_zeros(len(self), *values.shape[1:])
        column[self.counted] = values
        return column

    @property
    def reward(self) -> Tensor:
        """(M,) float64: the rollout's reward where a stage has written it, else the row's as collected."""
        return self[REWARD] if self.has(REWARD) else self.number("reward").double()

    # -- tokens -------------------------------------------------------------------------------------------

    def _tokens(self, log_prob: NestedKey | None) -> Tensor:
        mask = self.key("loss_mask")
        count = TokenCount(mask, log_prob)
        if count not in self.table.columns:
            self.table.load(tokens=[count])
        if count not in self.table.columns:
            raise MissingKeyError(
                f"tokens in the loss are those of the mask {mask!r} (loss_mask_key), or of a response "
                "behind its prompt: ('tokens', 'prompt') and ('tokens', 'response'), as wide together as "
                "('masks', 'all_attention_mask'). Finite log-probabilities do not say which tokens "
                "train: those of a scored prompt are finite, too. The batch has "
                f"{key_names(self.table.batch)}: write the mask, True where a token trains"
            )
        column = self.table.columns[count]
        return column if self.index is None else column.index_select(0, self.index)

    @property
    def lengths(self) -> Tensor:
        """(M,) int64: tokens in the loss mask as the row arrived, whether it is masked out by now or not."""
        return self._as_arrived(self._mask_tokens())

    def _as_arrived(self, tokens: Tensor) -> Tensor:
        """(M,) counts of tokens; of rows that a stage has masked, those that they had before."""
        if LENGTH not in self.table.columns:
            return tokens
        before = self[LENGTH]
        return torch.where(before < 0, tokens, before)

    @property
    def arrived_tokens(self) -> Tensor | None:
        """(M,) int64: tokens in the loss, with a finite log-probability, as the row came; None: not known."""
        count = TokenCount(self.key("loss_mask"), self.key("log_prob"))
        self.table.load(tokens=[count])
        if count not in self.table.columns:
            return None
        return self._as_arrived(self._tokens(count.log_prob))

    @property
    def masked_tokens(self) -> Tensor:
        """(M,) int64: tokens in the loss mask; 0 for rows out of the loss."""
        return self._mask_tokens() * self.in_loss

    def _mask_tokens(self) -> Tensor:
        return self.count("loss_mask")

    def count(self, role: str) -> Tensor:
        """(M,) int64: the True entries of each row of a token mask, dense or ragged.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it is not bool.
        """
        count = TokenCount(self.key(role), None)
        if count not in self.table.columns:
            self.table.load(tokens=[count])
        if count not in self.table.columns:
            raise self.missing(role)
        column = self.table.columns[count]
        return column if self.index is None else column.index_select(0, self.index)

    def reduce(
        self, role: Any, number: Callable[[Tensor], Tensor], *, name: str, option: str | None = None
    ) -> Tensor:
        """(M,): one number for each row, of a column that may have any width, computed on its device.

        Args:
            role: or key.
            number: (B, ...) → (B,); of ragged rows (1, ...) → (1,), row by row.
            name: of what is computed.
            option: what messages call the column.

        Raises:
            MissingKeyError: it is not there.
        """
        key = self.key(role)
        if self.table.is_late(self.key(role)):
            self.table.settle()
        made = Reduced(name, key)
        if made not in self.table.columns:
            column = column_of(self.table.batch, key)
            if column is None:
                raise self.missing(role, option)
            if isinstance(column, list):
                column = torch.cat([number(row[None]) for row in column])
            else:
                column = number(column)
            return self.measure(made, column)
        return self[made]

    @property
    def loss_tokens(self) -> Tensor:
        """(M,) int64: tokens in the loss, with a finite log-probability; 0 for rows out of the loss."""
        return self._tokens(self.key("log_prob")) * self.in_loss

    # -- the verbs ----------------------------------------------------------------------------------------

    def require(
        self,
        ok: Tensor,
        message: str,
        describe: Callable[[int], str] | None = None,
        error: type[BatchError] = BatchError,
        ids: str = "",
    ) -> None:
        """Refuse the batch unless (M,) bool `ok` holds everywhere.

        Args:
            ok: of each row of this view.
            message: what is required, ``{found}``, and what to do; ``{count}`` rows break it (``{s}``: a
                plural's s).
            describe: row i of this view in words; None: its number. Equal words are said once.
            error: what is raised.
            ids: ``group_id`` or ``rollout_id``, where those are what is missing: the message says who stamps
                them.

        Raises:
            BatchError: it does not hold, with the rows.
        """
        if bool(ok.all()):
            return
        bad = (~ok).nonzero().flatten().tolist()
        describe = describe or (lambda row: f"row {self.at(row)}")
        found = listing(dict.fromkeys(map(describe, bad[:DESCRIBED])))
        if len(bad) > DESCRIBED:
            found += f" (the first {DESCRIBED} of {len(bad)} rows)"
        note = who_stamps(ids)
        if self.table.ranks is not None:
            note += self.table.ranks.note(self.table.own.start)
        raise error(message.format(found=found, count=len(bad), s="" if len(bad) == 1 else "s") + note)

    def require_set(
        self, ids: Ids | Tensor, name: str, why: str, *, who: str = "every row", needed: Tensor | None = None
    ) -> None:
        """Refuse the batch where a row has no id, that is, one below 0.

        Args:
            ids: or (M,) int64.
            name: of the ids, in the message.
            why: rows need one.
            who: needs one, in words.
            needed: (M,) bool: the rows that need one; None: those that count.
        """
        labels = ids.labels if isinstance(ids, Ids) else ids
        if labels is not ids and ids.lowest >= 0:
            return
        ok, needed = labels >= 0, self.counted if needed is None else needed
        self.require(
            ok if needed is None else ok | ~needed,
            f"{who} needs a {name} ≥ 0; found {{found}}: {why}",
            lambda row: f"{int(labels[row])} at row {self.at(row)}",
            ids=name,
        )

    def at(self, row: int) -> int:
        """The number of row i of this view in the batch as it arrived."""
        return row if self.index is None else int(self.index[row])

    def name(self, role: str, row: int) -> str:
        """The id of row i of this view; its number where it has none."""
        return str(int(self[role][row]) if self.has(role) else self.at(row))

    def segments(self, row: int, values: Tensor) -> str:
        """The rollout of row i of this view in words: all its rows, with their (M,) `values`."""
        of = self.rollouts.of
        rows = (of == of[row]).nonzero().flatten()
        numbers = rows if self.index is None else self.index[rows]
        return f"rollout {self.name('rollout', row)} (rows {few(numbers)}: {few(values[rows])})"

    def name_reason(self, reason: str, effect: Effect) -> int:
        """The number of a reason in the ledger, where it is named from now on, whether a row has it or not.

        Raises:
            ValueError: it had another effect before.
        """
        table, name = self.table, f"{self.stage}/{reason}" if self.stage else reason
        if name not in table.names:
            table.names.append(name)
            table.effects.append(effect)
        code = table.names.index(name)
        if (before := table.effects[code]) != effect:
            raise ValueError(
                f"rows that leave for {name!r} are {before}; give those that are {effect} another reason"
            )
        return code

    def leave(
        self, rows: Tensor, reason: str, effect: Effect = "dropped", *, mask_tokens: bool = True
    ) -> None:
        """Take the rows where (M,) bool `rows` out, for a reason that the ledger keeps.

        Args:
            rows: who leaves. A row that has left keeps its first reason; a masked one may still be dropped.
            reason: a word.
            effect: ``masked`` out of the loss; ``excluded`` out of the statistics too; ``dropped`` or
                ``carried`` out of the batch.
            mask_tokens: whether the batch is to say, by its columns of tokens, that they are out of the loss;
                False for rows that have no token in the loss.

        Raises:
            BatchError: rows are to leave the loss, and the batch has no loss mask or log-probabilities in
                which to say so.
            ValueError: the reason had another effect before.
        """
        table, code = self.table, self.name_reason(reason, effect)
        if effect in ("masked", "excluded") and mask_tokens:
            self._mask_in_loss(rows)
            table.masks_rows = True
        if effect == "excluded":
            table.says_who_counts = True
        number = rows.nonzero().flatten()
        if len(number) == 0:
            return
        number = number if self.index is None else self.index[number]
        first = number[table.reason[number] == 0]
        table.reason.index_fill_(0, first, code)
        table.in_loss.index_fill_(0, number, False)
        if effect == "excluded":
            if table.counted is None:
                table.counted = torch.ones(table.size, dtype=torch.bool)
            table.counted[number] = False
            for known in ("counted", "statistics", "voters"):
                self.__dict__.pop(known, None)
            table.ids.clear()
        if effect in ("dropped", "carried"):
            table.here[number] = False
            table.gone = True
            table.index = table.here.nonzero().flatten()
            table.ids.clear()

    def merge(self, into: Tensor, reason: str = "merged") -> None:
        """Take out the rows that become a part of others, with their tokens.

        Rows out of the loss leave without their tokens, which do not train (:meth:`Table.with_merged`).

        Args:
            into: (M,) int64, for each row of this view the number in the table of the row into which it is
                merged; its own where it stays.
            reason: a word.
        """
        table = self.table
        own = torch.arange(table.size) if self.index is None else self.index
        step = torch.arange(table.size).index_copy_(0, own, torch.where(self.in_loss, into, own))
        table.into = step if table.into is None else step[table.into]
        self.leave(into != own, reason, "dropped")

    def _mask_in_loss(self, rows: Tensor) -> None:
        """Mask (M,) bool `rows`, about to leave: False in the loss mask, NaN in log-probabilities.

        Where masked log-probabilities stay as they are, the loss mask alone says it.
        """
        batch, loss_mask, log_prob = self.table.batch, self.key("loss_mask"), self.key("log_prob")
        if self.table.finite is not None:
            log_prob = None
        keys = [key for key in (loss_mask, log_prob) if key is not None]
        # Whoever has the tokens masks them.
        found = [key for key in keys if self.table.elsewhere or parts_of(batch, key)]
        self.table.masked_columns |= dict.fromkeys(found)
        if not found and bool(rows.any()):
            lacks = f"neither {loss_mask!r} (loss_mask_key) nor {log_prob!r} (log_prob_key)"
            if self.table.finite is not None:
                lacks = f"no {loss_mask!r} (loss_mask_key), which alone says so under masked_log_prob='keep'"
            raise BatchError(
                f"{int(rows.sum())} rows are to leave the loss, but the batch has {lacks}: they would train "
                f"all the same. It has {key_names(batch)}; set the keys, or drop the rows"
            )
        if self.table.elsewhere and column_of(batch, number_of(loss_mask)) is None:
            return
        if loss_mask in found:
            lengths = self.lengths
            before = self[LENGTH] if self.has(LENGTH) else torch.full_like(lengths, -1)
            self.put(LENGTH, torch.where((before < 0) & rows, lengths, before), ndim=1, fill=-1)

    def ask(self, criterion: Callable[[TensorDictBase], Any]) -> Any:
        """(M,): what a callable says of each row of the batch, which is written for it and read once more."""
        batch = self.write()
        # Somebody else's code knows nothing of a rank without rows.
        said = criterion(batch) if len(batch) else torch.zeros(0, dtype=torch.bool)
        fits = isinstance(said, Tensor) and said.dtype is torch.bool and said.numel() == len(self.table.live)
        return self.measured(asked=said.reshape(-1))["asked"].bool() if fits else said

    def shown(self, values: Tensor) -> tuple[TensorDictBase, Tensor]:
        """The batch as it is by now, and (M,) `values` for its rows, on its device."""
        batch = self.write()
        return batch, self.of_rank(values).to(device_of(batch))

    def record(self, rows: Tensor, reason: str, effect: Effect) -> None:
        """Keep a reason for (M,) bool `rows` that have none yet, and change nothing else about them."""
        reasons = self.table.reason
        reasons.masked_fill_(rows & (reasons == 0), self.name_reason(reason, effect))

    def metric(self, name: str, value: Tensor | float) -> None:
        """Say a number of this batch, as ``<stage>/<name>``."""
        metrics = self.table.of_others.get(self.rank, self.table.metrics)
        metrics[f"{self.stage}/{name}" if self.stage else name] = float(value)

    def measured_when_read(
        self,
        of_tokens: Callable[[], Mapping[str, Tensor]],
        of_rows: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor | float]],
        *columns: Tensor,
    ) -> None:
        """Say numbers of this batch that cost a pass over its tokens, which is made when somebody reads them.

        Until then, or the next batch of the pipeline, the columns stay in memory, and must stay as they are.
        At once where they may not: of ranks, that share what they find; of ragged rows, whose columns were
        filled up; in memory that other processes write.

        Args:
            of_tokens: what tokens are reduced to, as :meth:`measured` takes it.
            of_rows: the numbers by name, of (M,) or (M, K) float64 by name.
            columns: what `of_tokens` reads.
        """
        table, prefix = self.table, f"{self.stage}/" if self.stage else ""
        at_once = table.ranks is not None or isinstance(table.batch, LazyStackedTensorDict)
        if at_once or len(self) != len(table.live) or not all(map(may_wait, columns)):
            for name, value in of_rows(self.measured(**of_tokens())).items():
                self.metric(name, value)
            return
        versions = [column._version for column in columns]
        table.unread.append(Unread(of_tokens, of_rows, columns, versions, prefix, self.reader))

    def measure(self, name: Any, values: Tensor) -> Tensor:
        """Make a column of what tokens were reduced to on the device: one more copy, and one more exchange.

        Args:
            name: of the column.
            values: (B,) for the rows of the batch.

        Returns:
            (M,) for the rows of this view.
        """
        self.table.dtypes[name] = values.dtype
        self.table.columns[name] = self.table.of_all(read_packed([values])[0])
        return self[name]

    def measured(self, **numbers: Tensor) -> dict[str, Tensor]:
        """Bring what tokens were reduced to on the device to this stage, by one copy and one exchange.

        Args:
            numbers: (B,) or (B, K) for the rows of the batch each, by name.

        Returns:
            (M,) or (M, K) float64 each, for the rows of this view; the table does not keep them.
        """
        parts = [flat_rows(values.detach().double()) for values in numbers.values()]
        column = self.of_all_ranks(torch.cat(parts, 1))
        split = column.split([part.shape[1] for part in parts], 1)
        pairs = zip(numbers.items(), split, strict=True)
        return {name: part if values.ndim > 1 else part[:, 0] for (name, values), part in pairs}

    def of_all_ranks(self, values: Tensor) -> Tensor:
        """(B, ...) for the batch's rows → (M, ...) for the rows of this view, on the CPU. An exchange."""
        column = self.table.of_all(values.cpu())
        return column if self.index is None else column.index_select(0, self.index)

    # -- token-level stages -------------------------------------------------------------------------------

    def tokens(self) -> TensorDictBase:
        """The rows of this rank that are here, TensorDict ``[B]`` on their device: a shallow copy.

        What stages have written is in the table alone (:meth:`Table.with_written`); rows out of the loss are
        not masked in it yet.
        """
        self.table.settle()
        self.table.compact()
        return shallow_copy(self.table.batch)

    def there(self, values: Tensor) -> Tensor:
        """(M, ...) values of this view as (B, ...) for the rows of :meth:`tokens`, on their device."""
        return self.of_rank(values).to(device_of(self.table.batch))

    def stored_as(self, batch: TensorDictBase) -> None:
        """Take :meth:`tokens` as somebody has stored them anew, say densely: no number has changed."""
        self.table.batch = batch

    def accept(self, batch: TensorDictBase) -> None:
        """Take a batch that a token-level stage has made of :meth:`tokens`.

        Columns and counts of tokens that it has changed are read again when somebody asks.

        Args:
            batch: TensorDict of all rows of :meth:`tokens`, or of those of them that have not left.

        Raises:
            BatchError: it has other rows.
        """
        table, before = self.table, self.table.batch
        live = table.live[table.here[table.live]]
        if len(batch) == len(live):
            table.live, table.kept = live, table.here.clone()
        elif len(batch) != len(table.live):
            raise BatchError(
                f"a stage returns the rows that are here, {len(live)}; {len(batch)} came out. Rows that go "
                "are taken out by rows.leave"
            )
        table.batch = batch
        self.table.forget(
            {
                key
                for key in {source for key in table.columns for source in sources_of(key)}
                if not same_column(before, batch, key)
                and not (key in table.written and column_of(batch, key) is None)
            }
        )

    def when_gathered(
        self,
        change: Callable[[TensorDictBase, dict[str, Tensor]], None],
        writes: Sequence[NestedKey],
        **numbers: Tensor,
    ) -> None:
        """Change token columns where rows are gathered, a minibatch at a time.

        A stage that asks for one of these columns before that gets it (:meth:`Table.settle`).

        Args:
            change: of gathered rows and their numbers, which are on the device of the rows. It finds what
                stages have written in the rows, and writes what follows from each token by itself.
            writes: the columns that it writes.
            numbers: (M,) or (M, K) each, for the rows of this view.
        """
        if self.table.ranks is not None:
            self.table.ranks.refuse_tokens()
        every = {name: self.to_arrival(values) for name, values in numbers.items()}
        self.table.late.append(Late(change, every, tuple(writes)))

    def change_advantage(
        self, how: Callable[..., Tensor], *, at_least: torch.dtype | None = None, **numbers: Tensor
    ) -> None:
        """Change the advantage element by element: in the table, or that of tokens where rows are gathered.

        Args:
            how: ``how(advantage, **numbers)``, elements of float64, or of tokens of at least float32, and
                numbers that broadcast to them.
            at_least: the advantage keeps its dtype, but is of this one at least.
            numbers: (M,) float each, for the rows of this view.

        Raises:
            MissingKeyError: there is none.
            BatchError: it is of integers.
        """
        table, key, dtype = self.table, self.key("advantage"), self.advantage_dtype
        if dtype is None:
            raise self.missing("advantage")
        if not dtype.is_floating_point:
            raise BatchError(f"an advantage is a floating-point number; found {dtype}")
        column = table.columns.get(key)  # the same on all ranks: rows of a width, or none, are of one rank
        is_of_rows = key in table.written or (column is not None and column.ndim == 1)
        if is_of_rows and not self.table.is_late(self.key("advantage")):
            changed = how(self["advantage"], **numbers)
            self.put("advantage", changed, dtype=torch.promote_types(dtype, at_least or dtype))
            return

        def change(batch: TensorDictBase, numbers: dict[str, Tensor]) -> None:
            rows = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
            for number, part in enumerate(rows):
                credit = part.get(key)
                wide = credit.to(torch.promote_types(credit.dtype, torch.float32))
                own = {name: each.to(wide.dtype) for name, each in numbers.items()}
                if part is batch:
                    own = {name: each.view(-1, *[1] * (wide.ndim - 1)) for name, each in own.items()}
                else:
                    own = {name: each[number] for name, each in own.items()}
                part.set(
                    key, how(wide, **own).to(torch.promote_types(credit.dtype, at_least or credit.dtype))
                )

        self.when_gathered(change, [key], **numbers)

    @property
    def advantage_dtype(self) -> torch.dtype | None:
        """In which dtype the batch has the advantage, of rows or of tokens; None: it has none."""
        key, batch = self.key("advantage"), self.table.batch
        if self.table.is_late(self.key("advantage")):  # one row says what the others will have
            self.table.compact()
            batch = self.table.decided_between(slice(1))
        elif key in self.table.columns:
            return self.dtype("advantage")
        column = column_of(batch, key)
        if column is None:
            return None
        return column[0].dtype if isinstance(column, list) else column.dtype

    def _option(self, role: Any) -> str:
        if isinstance(role, str) and role in self.names:
            return f"{role}_key"
        return str(self.key(role))

    def missing(self, role: Any, option: str | None = None) -> MissingKeyError:
        """The error that says that a column is not there, which are, and by which option to name another."""
        key = self.key(role)
        if key in WRITERS:
            writer = WRITERS[key]
            return MissingKeyError(
                f"{self.reader} needs the column {key!r}, written by {writer}: put {writer} before it"
            )
        option = option or self._option(role)
        return MissingKeyError(
            f"{self.reader} needs the key {key!r} ({option}); the batch has {key_names(self.table.batch)}. "
            f"If it goes by another name, set {option}{who_stamps(option)}"
        )


def column_keys(stage: Any) -> dict[str, NestedKey | None]:
    """Where a stage finds each column, by role: its options named ``<role>_key``."""
    known = type(stage), tuple(vars(stage))
    if known not in _OPTIONS:
        _OPTIONS[known] = [(name[:-4], name) for name in vars(stage) if name.endswith("_key")]
    return {role: nested_key(getattr(stage, name)) for role, name in _OPTIONS[known]}


_OPTIONS: dict[tuple[type, tuple[str, ...]], list[tuple[str, str]]] = {}  # by a class and what it keeps


def may_wait(column: Tensor) -> bool:
    """Whether a column may be read later, since nobody changes it unseen."""
    shared = column.device.type == "cpu" and column.is_shared()
    return not (shared or column.is_inference())


def few(values: Tensor | Sequence[Any], most: int = 8) -> str:
    """The first of many values, and how many more there are.

    Example:
        >>> few(torch.arange(10)), few(torch.tensor([1.5]))
        ('[0, 1, 2, 3, 4, 5, 6, 7] and 2 more', '[1.5]')
    """
    more = len(values) - most
    shown = values[:most].tolist() if isinstance(values, Tensor) else list(values[:most])
    return f"{shown}" + (f" and {more} more" if more > 0 else "")

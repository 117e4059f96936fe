"""The table of a run: a few numbers per row, read from the batch in one copy and written back into it.

A run has one table. Stages use it through a view (``rows.py``). This module reads the table from a batch,
and writes it into a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .alone import Alone
from .errors import BatchError
from .fates import Fates
from .ids import Ids
from .labels import as_ids, last_of
from .masking import Masking
from .schema import COUNTED, IN_LOSS, LENGTH, NO_LENGTHS
from .tensordicts import (
    ELSEWHERE,
    WIDE,
    any_row_has,
    column_of,
    count_in_loss,
    device_of,
    first_names,
    number_column,
    read_packed,
    rows_between,
    same_column,
    shallow_copy,
    take_rows,
    write_column,
)

OF_THE_TABLE = (IN_LOSS, COUNTED, LENGTH)  # columns in which a batch stores the state of the table
AHEAD = 16  # columns with more numbers per row are only read when a stage asks for them


class Written(NamedTuple):
    """The dtype and number of dimensions in which a column is written into the batch."""

    dtype: torch.dtype
    ndim: int
    """1: (N,); 2: (N, 1) or (N, K); 3: (N, 1, 1)."""


class Late(NamedTuple):
    """A change of token columns that is made when rows are gathered, one minibatch at a time."""

    change: Callable[[TensorDictBase, dict[str, Tensor]], None]
    """Changes gathered rows in place. It gets the rows and their `numbers`, on their device."""
    numbers: dict[str, Tensor]
    """(N,) or (N, K) each, by name."""
    writes: Sequence[NestedKey] = ()
    """The columns that `change` writes."""


class TokenCount(NamedTuple):
    """The key of a table column: the number of a row's tokens in a mask.

    With `log_prob`, only tokens with a finite log-probability count.
    """

    mask: NestedKey
    log_prob: NestedKey | None


class Reduced(NamedTuple):
    """The key of a table column that :meth:`Table.measure` has made from another column."""

    name: str
    of: NestedKey


class Table:
    """The table of all rows of a run. All views share it.

    The table index of a row is its position in the table, 0 … N − 1.

    Args:
        batch: this rank's rows, TensorDict ``[B]``, on their device; None: a table of plain columns.
        size: N, the number of rows.

    Attributes:
        live: (B,) int64, table index of each row of the batch, ascending.
        every: (N,) int64, all table indices.
        kept: (N,) bool, rows that are in the batch of their rank.
        columns: (N,) or (N, K) by key: int64, float64 or bool, on the CPU.
        dtypes: dtype of each column in the batch.
        written: columns that stages have written.
        late: changes of token columns that are made when rows are gathered.
        fates: which rows are here, in the loss and in the statistics, and why the others are not.
        masking: how rows that are out of the loss are masked in the batch.
        metrics: metrics of the stages, ``<stage>/<name>``.
        notes: what a stage keeps of the batch, for its `state_after` or for a report, by stage or by name.
        ranks: the ranks that share the batch, or this process :class:`Alone`.
        size: N.
        starts: a list for the rows of this batch, and one for carried rows after them. Each list has the
            table index of each rank's first row, and then the end.
        names: key of each column that a pipeline names, by role, for stages that do not name it.
        lacking: what the batch is known to lack.
        ids: the :class:`Ids` that views have read, with the tensors that they were made from.
    """

    def __init__(self, batch: TensorDictBase | None, size: int):
        self.batch: Any = batch
        self.columns: dict[Any, Tensor] = {}
        self.dtypes: dict[Any, torch.dtype] = {}
        self.texts: dict[Any, list[Any]] = {}  # columns that the batch has as text
        self.written: dict[NestedKey, Written] = {}
        self.late: list[Late] = []
        self.metrics: dict[str, float] = {}
        self.notes: dict[Any, Any] = {}
        self.names: dict[str, NestedKey | None] = {}
        self.lacking = Lacking(None)
        elsewhere, no_lengths = (
            not self.lacks(key) and any_row_has(batch, key) for key in (ELSEWHERE, NO_LENGTHS)
        )
        self.masking = Masking(elsewhere=elsewhere, no_lengths=no_lengths)
        self.ranks = Alone()
        self.begin([0, size])

    def begin(self, starts: list[int]) -> None:
        """Reset all decisions.

        Args:
            starts: index of the first row of each rank, and the number of rows N.
        """
        self.starts, self.size = [starts], starts[-1]
        self.every = torch.arange(self.size)
        own = slice(starts[self.ranks.rank], starts[self.ranks.rank + 1])
        self.fates = Fates(self.size)
        self.kept = self.fates.here
        self.live = self.every[own]
        self.ids: dict[Any, tuple[tuple[Any, ...], Ids]] = {}

    @property
    def carried(self) -> Tensor | None:
        """(C,) int64, table indices of rows of earlier batches; None: there are none."""
        return None if len(self.starts) == 1 else self.every[self.starts[1][0] :]

    # -- rows, and the ranks that they belong to ----------------------------------------------------------

    def take(self, numbers: Tensor) -> TensorDictBase:
        """Gather rows of this rank's batch, by (n,) int64 table indices."""
        at = self.batch_rows(numbers)
        return take_rows(self.batch, at.to(device_of(self.batch)), on_cpu=at)

    def batch_rows(self, numbers: Tensor) -> Tensor:
        """(n,) int64: rows of this rank's batch, by (n,) table indices."""
        if len(self.live) == self.size:
            return numbers
        at = torch.full((self.size,), -1).index_copy_(0, self.live, torch.arange(len(self.live)))
        return at.index_select(0, numbers)

    def indices_by_rank(self, chosen: Tensor) -> list[Tensor]:
        """Table indices where (N,) bool `chosen` is True, by rank: (n,) int64, in the rank's batch order."""
        return [
            torch.cat([chosen[a:b].nonzero().flatten() + a for a, b in self.spans(rank)])
            for rank in range(self.ranks.size)
        ]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Begin and end, in the table, of the rows of a rank's batch, and of the rows carried to the rank."""
        return [(starts[rank], starts[rank + 1]) for starts in self.starts]

    def rows_of_ranks(self) -> list[Tensor]:
        """Table indices of the rows that have not left, by rank: (n,) int64."""
        if self.ranks.size == 1:  # known without a search
            return [self.every if self.fates.index is None else self.fates.index]
        return self.indices_by_rank(self.fates.here)

    def of_this_rank(self, values: Tensor, index: Tensor | None = None) -> Tensor:
        """The part of (N, ...) values that belongs to this rank, in the order of its batch.

        Args:
            values: (N, ...) of all rows, or (M, ...) of some rows.
            index: (M,) int64, table indices of these rows, ascending; None: all rows.
        """
        spans = self.spans(self.ranks.rank)
        if index is not None:
            spans = torch.searchsorted(index, torch.tensor(spans)).tolist()
        parts = [values[a:b] for a, b in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def row_numbers(self) -> Tensor:
        """(N,) int64: the row number of each row of this rank in the batch as it came; 0 for other ranks."""
        if self.ranks.size == 1:
            return self.every
        own = self.of_this_rank(self.every)
        return torch.zeros_like(self.every).index_copy_(0, own, torch.arange(len(own)))

    def rank_of_rows(self) -> Tensor:
        """(N,) int64: the rank of each row."""
        rank = torch.zeros(self.size, dtype=torch.int64)
        for number in range(self.ranks.size):
            for a, b in self.spans(number):
                rank[a:b] = number
        return rank

    # -- from a batch -------------------------------------------------------------------------------------

    def lacks(self, key: NestedKey) -> bool:
        """Whether the batch is known to have no such column, so that no row needs to be asked."""
        if self.batch is None:
            return True
        if self.lacking.batch is not self.batch:
            self.lacking = Lacking(self.batch)
        first, names = key if isinstance(key, str) else key[0], self.lacking.names
        return key in self.lacking.keys or (names is not None and first not in names)

    def find(self, key: NestedKey) -> Any:
        """Return the entry of the batch under a key (:func:`column_of`)."""
        return None if self.lacks(key) else column_of(self.batch, key)

    def load(
        self,
        keys: Iterable[NestedKey | None] = (),
        tokens: Iterable[tuple[NestedKey, NestedKey | None]] = (),
        most: int | None = None,
    ) -> None:
        """Read columns of the batch into the table, in one packed device read, unless they are known.

        Args:
            keys: keys of columns with numbers per row.
            tokens: token counts, as in :meth:`Rows.read`.
            most: a column with more numbers per row, or of ragged rows, is not read. None: no limit.
        """
        found: dict[Any, Tensor] = {}
        for key in dict.fromkeys(keys):
            if key is None or key in self.columns or self.lacks(key):
                continue
            column = number_column(self.batch, key, most=most)
            if column is None:
                self.lacking.keys.add(key)
            if isinstance(column, list):  # text ids; some may be missing
                self.texts[key] = column
                there = [row for row, label in enumerate(column) if label not in ("", None)]
                numbers = torch.full((len(column),), -1)
                numbers[there] = as_ids([column[row] for row in there], last_of(key))
                column = numbers.to(device_of(self.batch))
            if column is not None and column is not WIDE:
                found[key] = column
        for mask_key, log_prob_key in tokens:
            count = TokenCount(mask_key, log_prob_key)
            if count not in self.columns and self.batch is not None:
                mask, inside = count_in_loss(self.batch, *count)
                if mask is not None:
                    found[count._replace(log_prob=None)], found[count] = mask, inside
        if not found:
            return
        for (key, column), values in zip(found.items(), read_packed(list(found.values())), strict=True):
            self.dtypes[key] = column.dtype
            self.columns[key] = self.from_batch(values)

    def from_batch(self, values: Tensor) -> Tensor:
        """Map (B, ...) values of the batch to (N, ...). Rows that have left it get NaN, False or −1."""
        if self.ranks.size == 1 and len(values) == self.size:
            return values
        kept = self.indices_by_rank(self.kept)
        values = self.ranks.gather_rows(values, list(map(len, kept)))
        column = unknown(values, self.size)
        return column.index_copy_(0, torch.cat(kept), values)

    def measure(self, name: Any, values: Tensor) -> Tensor:
        """Make a column of numbers that were computed from tokens: one device read and one exchange.

        Args:
            name: name of the column.
            values: (B,) or (B, K) for the rows of the batch, on their device.

        Returns:
            (N,) or (N, K), the column.
        """
        self.dtypes[name] = values.dtype
        self.columns[name] = self.from_batch(read_packed([values])[0])
        return self.columns[name]

    def forget(self, changed: Collection[NestedKey]) -> None:
        """Forget columns, and counts and reductions of them. They are read again when they are needed."""
        for key in list(self.columns):
            if any(source in changed for source in sources_of(key)):
                del self.columns[key]
                self.dtypes.pop(key, None)
                self.written.pop(key, None)

    def accept(self, batch: TensorDictBase) -> None:
        """Take the batch that a token-level stage made from :meth:`Rows.tokens`.

        Columns and token counts that the stage has changed are read again when they are needed.

        Args:
            batch: TensorDict of all rows of this rank, or of those that have not left.

        Raises:
            BatchError: the batch has another number of rows.
        """
        before, live = self.batch, self.live[self.fates.here[self.live]]
        if len(batch) == len(live):
            self.live, self.kept = live, self.fates.here
        elif len(batch) != len(self.live):
            raise BatchError(
                f"a stage must return the {len(live)} rows that have not left; it returned {len(batch)}. "
                "Take rows out with rows.leave"
            )
        self.batch = batch
        in_table = {key for key in self.written if column_of(batch, key) is None}
        read = {key for column in self.columns for key in sources_of(column)} - in_table
        self.forget({key for key in read if not same_column(before, batch, key)})

    # -- into a batch -------------------------------------------------------------------------------------

    def write(self) -> TensorDictBase:
        """Write all decisions into a batch of the rows that have not left, for :meth:`Rows.write`.

        Values are rounded to the dtype of their column. Rows out of the loss are masked.
        """
        batch, in_loss = self.as_decided(), self.fates.in_loss[self.live]
        if self.fates.masks and not bool(in_loss.all()):
            self.masking.mask(batch, ~in_loss)
        return batch

    def as_decided(self) -> TensorDictBase:
        """Do what :meth:`write` does, but do not mask rows out of the loss."""
        self.compact()
        return self._as_decided()

    def _as_decided(self) -> TensorDictBase:
        batch = self.with_written(shallow_copy(self.batch))
        for change, numbers, _ in self.late:
            live = {name: column[self.live] for name, column in numbers.items()}
            change(batch, {name: column.to(device_of(batch)) for name, column in live.items()})
        return batch

    def decided_in_parts(self) -> Iterator[TensorDictBase]:
        """Yield :meth:`as_decided` in parts, at least one; a dense batch without its text columns.

        In this way, the columns that are computed when rows are gathered never exist for all rows at once.
        """
        self.compact()
        step = max(-(-len(self.live) // 16), 1)
        for start in range(0, max(len(self.live), 1), step):
            yield self.decided_between(slice(start, start + step))

    def decided_between(self, some: slice) -> TensorDictBase:
        """Compute :meth:`as_decided` for a slice of the rows of the batch."""
        part = copy(self)
        part.batch, part.live = rows_between(part.batch, some), part.live[some]
        return part._as_decided()

    def with_written(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the columns that stages wrote into the table into `batch`, which has the rows `live`."""
        for key, (column, dtype, ndim) in self.written_columns().items():
            column = column[self.live]
            column = column.reshape(len(column), *column.shape[1:], *[1] * (ndim - column.ndim))
            write_column(batch, key, column.to(dtype).to(device_of(batch)))
        return batch

    def written_columns(self) -> dict[NestedKey, tuple[Tensor, torch.dtype, int]]:
        """The columns that stages wrote, by key: values for all rows of the table, dtype and dimensions."""
        found = dict[NestedKey, tuple[Tensor, torch.dtype, int]]()
        for key, (dtype, ndim) in self.written.items():
            found[key] = self.columns[key], dtype, ndim
        if self.fates.masks:
            found[IN_LOSS] = (self.fates.in_loss, torch.bool, 1)
        if self.fates.excludes:
            found[COUNTED] = (self.fates.counts, torch.bool, 1)
        return found

    @contextmanager
    def restoring_columns(self) -> Iterator[None]:
        """Restore `columns`, `written` and `late` at the end of the block."""
        before = self.columns, self.written, self.late
        self.columns, self.written, self.late = dict(self.columns), dict(self.written), list(self.late)
        yield
        self.columns, self.written, self.late = before

    def settle(self) -> None:
        """Make all `late` changes now, because a stage reads one of the columns."""
        if self.late:
            self.batch = self.as_decided()
            self.forget({key for late in self.late for key in late.writes})
            self.late.clear()

    def is_late(self, key: NestedKey | None) -> bool:
        """Whether a column is only computed when rows are gathered."""
        return bool(self.late) and any(key in late.writes for late in self.late)

    def compact(self) -> None:
        """Gather the batch so that it only has rows that have not left."""
        here = self.fates.here
        if self.fates.index is None or torch.equal(self.kept, here):
            return
        kept = here[self.live].nonzero().flatten()
        if len(kept) < len(self.live):
            there = kept.to(device_of(self.batch))
            self.batch = take_rows(self.batch, there, on_cpu=kept, shared=True)
        self.live, self.kept = self.live[kept], here


class Lacking:
    """The names that a batch is known to lack, so that no row needs to be asked again.

    Attributes:
        batch: the batch.
        names: the first names of all of its keys; None: not known.
        keys: keys that were looked for and not found.
    """

    def __init__(self, batch: TensorDictBase | None):
        self.batch, self.names = batch, None if batch is None else first_names(batch)
        self.keys: set[Any] = set()


def unknown(like: Tensor, size: int) -> Tensor:
    """A column of `size` unknown values: NaN, False or −1."""
    nothing = {torch.float64: float("nan"), torch.bool: False}.get(like.dtype, -1)
    return like.new_full((size, *like.shape[1:]), nothing)


def sources_of(key: Any) -> list[NestedKey]:
    """The columns of the batch from which a column of the table was computed."""
    if isinstance(key, TokenCount):
        return [each for each in key if each is not None]
    return [key.of] if isinstance(key, Reduced) else [key]

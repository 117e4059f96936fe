"""What is known of all rows of a batch: read from it in one copy, and written into it again.

A run has one table. Stages see it by a view (``rows.py``); here is how it comes out of a batch, how foreign
code gets a batch of it and is read back, and how rows that wait from an earlier batch join it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .errors import BatchError
from .ids import Ids, as_ids
from .schema import COUNTED, IN_LOSS, LENGTH, NO_LENGTHS, ROW
from .tensordicts import (
    ELSEWHERE,
    WIDE,
    any_row_has,
    column_of,
    count_in_loss,
    device_of,
    join_rows,
    leave_out,
    mask_tokens_of,
    number_column,
    number_of,
    read_packed,
    rows_between,
    shallow_copy,
    take_rows,
    write_column,
)

Effect = Literal["masked", "excluded", "dropped", "carried"]
"""What becomes of a row that leaves: out of the loss; out of the statistics too; gone; kept for later."""

OF_THE_TABLE = (IN_LOSS, COUNTED, LENGTH)  # columns that a batch has of the table itself
AHEAD = 16  # numbers a row, at most, that are read before somebody asks for them; more are of tokens
TRAINED = "trained"


class Tokens(NamedTuple):
    """The columns of tokens that a loss reads."""

    mask: NestedKey
    """(N, T) bool, True in the loss."""
    log_prob: NestedKey | None
    """(N, T) float, without which a token is out of the loss."""
    others: Sequence[NestedKey]
    """(N, T) float each, as far as they are there."""


class Written(NamedTuple):
    """How a column that a stage has written goes into the batch."""

    dtype: torch.dtype
    ndim: int
    """1: (N,); 2: (N, 1) or (N, K); 3: (N, 1, 1)."""


class Late(NamedTuple):
    """Something that is done to token columns where rows are gathered, a minibatch at a time."""

    change: Callable[[TensorDictBase, dict[str, Tensor]], None]
    """Changes the gathered rows in place of the batch; gets the numbers of these rows, on their device."""
    numbers: dict[str, Tensor]
    """(N,) or (N, K) each, by name."""
    writes: Sequence[NestedKey] = ()
    """The columns that it writes."""


@dataclass(frozen=True, eq=False)
class Unread:
    """Metrics that cost a pass over the tokens, which is made when somebody reads them.

    A copy, or one that is saved, has the numbers, and not the columns.
    """

    of_tokens: Callable[[], Mapping[str, Tensor]]
    """(N,) or (N, K) by name: what the tokens of each row are reduced to, on their device."""
    of_rows: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor | float]]
    """The metrics by name, of the same in float64 on the CPU."""
    columns: Sequence[Tensor]
    """What is read then."""
    versions: Sequence[int]
    """Theirs, when the stage saw them."""
    prefix: str
    """Of the names of the metrics."""
    reader: str

    def __call__(self) -> dict[str, float]:
        """Compute them.

        Raises:
            RuntimeError: the columns have changed since.
        """
        if list(self.versions) != [column._version for column in self.columns]:
            raise RuntimeError(
                f"columns of tokens were changed in place before the metrics of {self.reader} were read, "
                "which are computed of them only then: read them before (run.metrics), or change a copy"
            )
        found = {name: values.detach().double().cpu() for name, values in self.of_tokens().items()}
        return {self.prefix + name: float(value) for name, value in self.of_rows(found).items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (dict, self())


class TokenCount(NamedTuple):
    """The key of a column that counts tokens of each row: in a mask, and with a finite log-probability."""

    mask: NestedKey
    log_prob: NestedKey | None


class Reduced(NamedTuple):
    """The key of a column that :meth:`Rows.reduce` has made of another."""

    name: str
    of: NestedKey


class Table:
    """What is known of all rows of a run; every view shares it.

    Args:
        batch: the rows themselves, TensorDict ``[B]``, on their device; None: plain columns alone.
        size: N, how many rows there are.

    Attributes:
        live: (B,) int64, the number of each row of the batch in the table, ascending.
        kept: (N,) bool: rows that are in the batch, or in that of their rank.
        columns: (N,) or (N, K) by key: int64, float64 or bool, on the CPU.
        dtypes: in which dtype the batch has them.
        written: the columns that stages have written.
        late: what is done to columns of tokens where rows are gathered.
        reason: (N,) int64; 0 is trained, and `names` says what the others are. The first reason stays.
        effects: what becomes of rows, by reason.
        here: (N,) bool: neither dropped nor carried.
        index: (M,) int64, the rows that are here; None: all.
        in_loss: (N,) bool.
        masks_rows: a stage has taken rows out of the loss, which the batch is to say.
        masked_columns: the columns of tokens in which it says so.
        elsewhere: the batch has no tokens; whoever has them masks them.
        no_lengths: nor does it have how many there are: it was read from a dump of texts.
        finite: the columns whose numbers stay where a token is masked, and are finite there; None: masked
            log-probabilities are NaN.
        into: (N,) int64, the row whose tokens a row's became; itself for most. None: no rows were merged.
        counted: (N,) bool: in the statistics. None: all are.
        says_who_counts: a stage may take rows out of the statistics, so that the batch says who is in them.
        metrics: what stages measured, ``<stage>/<name>``; with those that wait, :meth:`read_metrics`.
        of_others: those of the rows of other ranks, where this rank decides for them, by rank.
        told: columns that the other ranks have as well, where this rank decides for them.
        unread: what computes metrics when they are read.
        notes: what a stage keeps from `decide` to `state_after`, by the stage.
        ranks: that share the batch; None: this process has the whole of it.
        starts: the first row of each rank, and the end.
        own: the rows of this rank.
        numbers_of_rank: (n,) int64: the rows of this rank, as they came, and behind them those carried to it.
        carried: (C,) int64, rows of earlier batches; `carried_starts` the first of each rank, and the end.
        ids: of the rows that are here, by column.
    """

    def __init__(self, batch: TensorDictBase | None, size: int):
        self.batch: Any = batch
        self.columns: dict[Any, Tensor] = {}
        self.dtypes: dict[Any, torch.dtype] = {}
        self.written: dict[NestedKey, Written] = {}
        self.late: list[Late] = []
        self.names, self.effects = [TRAINED], [TRAINED]
        self.metrics: dict[str, float] = {}
        self.of_others: dict[int, dict[str, float]] = {}
        self.told: dict[Any, Tensor] = {}
        self.unread: list[Callable[[], dict[str, float]]] = []  # Unread, or what a copy of it became
        self.notes: dict[Any, Any] = {}
        self.masks_rows = self.says_who_counts = False
        self.masked_columns: dict[NestedKey, None] = {}
        self.no_lengths = batch is not None and any_row_has(batch, NO_LENGTHS)
        self.elsewhere = self.no_lengths or (batch is not None and any_row_has(batch, ELSEWHERE))
        self.finite: Tokens | None = None
        self.looked_up: TensorDictBase | None = None  # a batch, and keys that it does not have
        self.absent: set[Any] = set()
        self.ranks: Any = None
        self.starts: list[int] = []
        self.begin(size, slice(0, size))

    def begin(self, size: int, own: slice) -> None:
        """So many rows are here, and nothing is decided yet.

        Args:
            size: N.
            own: those of this rank.
        """
        self.size, self.own = size, own
        self.reason = torch.zeros(size, dtype=torch.int64)
        self.here = torch.ones(size, dtype=torch.bool)
        self.kept = torch.ones(size, dtype=torch.bool)
        self.in_loss = torch.ones(size, dtype=torch.bool)
        self.counted: Tensor | None = None
        self.into: Tensor | None = None
        self.gone = False  # some row is not here
        self.index: Tensor | None = None
        self.ids: dict[Any, tuple[Tensor | None, Ids]] = {}
        self.live = self.numbers_of_rank = torch.arange(own.start, own.stop)
        self.carried: Tensor | None = None
        self.carried_starts: list[int] = []

    @property
    def left(self) -> int:
        """How many rows are here."""
        return self.size if self.index is None else len(self.index)

    @property
    def decides(self) -> bool:
        """Whether decisions are made here, and not on another rank."""
        return self.ranks is None or self.ranks.decides

    def take(self, numbers: Tensor) -> TensorDictBase:
        """Gather rows of this rank's batch, by (n,) int64 numbers in the table."""
        at = self.places(numbers)
        return take_rows(self.batch, at.to(device_of(self.batch)), on_cpu=at)

    def places(self, numbers: Tensor) -> Tensor:
        """(n,) int64: where rows of this rank are in its batch, by their numbers in the table."""
        if len(self.live) == self.size:
            return numbers
        at = torch.full((self.size,), -1).index_copy_(0, self.live, torch.arange(len(self.live)))
        return at.index_select(0, numbers)

    def of_ranks(self, chosen: Tensor) -> list[Tensor]:
        """The rows where (N,) bool `chosen`, by rank: (n,) int64 each, in the order of the rank's batch.

        Where no ranks share the batch, all are of one.
        """
        if self.ranks is None:
            return [chosen.nonzero().flatten()]
        return [
            torch.cat([chosen[a:b].nonzero().flatten() + a for a, b in self.spans(rank)])
            for rank in range(len(self.starts) - 1)
        ]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Where the rows of a rank begin and end: those of the batch, and those carried to it."""
        return [(starts[rank], starts[rank + 1]) for starts in (self.starts, self.carried_starts) if starts]

    def of_rank(self, values: Tensor, rank: int) -> Tensor:
        """Of (N, ...) values those of a rank's rows, in the order of its batch."""
        parts = [values[a:b] for a, b in self.spans(rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def by_rank(self) -> Tensor:
        """(N,) int64: the rank of each row."""
        rank = torch.zeros(self.size, dtype=torch.int64)
        for number in range(len(self.starts) - 1):
            for a, b in self.spans(number):
                rank[a:b] = number
        return rank

    def read_metrics(self) -> dict[str, float]:
        """What stages measured; what waited for that is computed, and lets go of its columns."""
        for measure in list(self.unread):
            self.metrics |= measure()
        self.unread.clear()
        return self.metrics

    def with_merged(self, counts: Tensor) -> Tensor:
        """(N,) counts of rows, those of merged rows added to what they were merged into."""
        return counts if self.into is None else torch.zeros_like(counts).index_add_(0, self.into, counts)

    # -- from a batch -------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Go on with what stages decided that were alone with this batch before, as its columns say."""
        if IN_LOSS in self.columns:
            self.in_loss, self.masks_rows = self.columns[IN_LOSS].clone(), True
        if COUNTED in self.columns:
            self._count(self.columns[COUNTED])

    def load(
        self,
        keys: Iterable[NestedKey | None] = (),
        tokens: Iterable[tuple[NestedKey, NestedKey | None]] = (),
        most: int | None = None,
    ) -> None:
        """Bring columns of the batch to the table, in one packed copy; those that are there already stay.

        Args:
            keys: of columns of numbers per row.
            tokens: as :meth:`Rows.read` takes them.
            most: numbers a row; a column of more, or of ragged rows, is left where it is.
        """
        found = dict[Any, Tensor]()
        if self.looked_up is not self.batch:
            self.looked_up, self.absent = self.batch, set()
        for key in dict.fromkeys(keys):
            if key is None or key in self.columns or self.batch is None or key in self.absent:
                continue
            column = number_column(self.batch, key, most=most)
            if column is None:
                self.absent.add(key)
            if isinstance(column, list):  # texts, of which some may be missing
                there = [row for row, label in enumerate(column) if label not in ("", None)]
                numbers = torch.full((len(column),), -1)
                name = key if isinstance(key, str) else str(key[-1])
                numbers[there] = as_ids([column[row] for row in there], name)
                column = numbers.to(device_of(self.batch))
            if column is not None and column is not WIDE:
                found[key] = column
        for count in [TokenCount(*pair) for pair in tokens]:
            if count not in self.columns and self.batch is not None:
                mask, inside = count_in_loss(self.batch, *count)
                if mask is not None:
                    found[count._replace(log_prob=None)], found[count] = mask, inside
        if not found:
            return
        self.dtypes |= {key: column.dtype for key, column in found.items()}
        for key, values in zip(found, read_packed(list(found.values())), strict=True):
            self.columns[key] = self.of_all(values)

    def _count(self, counted: Tensor) -> None:
        """Take (N,) bool from a batch that says who is in the statistics."""
        self.says_who_counts = True
        self.counted = None if bool(counted.all()) else counted.clone()

    def of_all(self, values: Tensor) -> Tensor:
        """(B, ...) values of the batch's rows as a column of the table; unknown for rows that left it."""
        if self.ranks is None and len(values) == self.size:
            return values
        kept = self.of_ranks(self.kept)
        if self.ranks is not None:
            values = self.ranks.gather_rows(values, list(map(len, kept)))
        column = _unknown(values, self.size)
        return column.index_copy_(0, torch.cat(kept), values)

    def forget(self, changed: Collection[NestedKey]) -> None:
        """Read columns of the batch, and what was counted in or reduced of them, anew when somebody asks."""
        for key in list(self.columns):
            if any(source in changed for source in sources_of(key)):
                del self.columns[key]
                self.dtypes.pop(key, None)
                self.written.pop(key, None)

    def reread(self, batch: TensorDictBase, numbers: Tensor) -> None:
        """Read the table again from a batch that somebody's own code has made of :meth:`write`.

        A column that nobody changed keeps the values of the table.

        Args:
            batch: TensorDict ``[B]``.
            numbers: (B,) int64, the number of each row in the table, ascending.
        """
        before = dict(self.columns)
        self.batch, self.live = batch, numbers
        self.kept = self.here.clone()
        self.columns = {}
        counts = [key for key in before if isinstance(key, TokenCount)]
        self.load([*(key for key in before if key not in counts), *OF_THE_TABLE], counts)
        rows = self.kept.nonzero().flatten()
        if IN_LOSS in self.columns:
            self.in_loss[rows] &= self.columns[IN_LOSS][rows]
            self.masks_rows = True
        if COUNTED in self.columns:
            counted = torch.ones(self.size, dtype=torch.bool) if self.counted is None else self.counted
            counted[rows] &= self.columns[COUNTED][rows]
            self._count(counted)
        self.ids.clear()
        for key, old in before.items():
            new = self.columns.get(key)
            if new is None:
                if key not in counts and key not in self.written and not isinstance(key, Reduced):
                    self.columns[key] = old  # measured, and in no batch
                continue
            if new.shape != old.shape or new.dtype != old.dtype:
                continue
            known = old.clone()
            now, rounded = new[rows], old[rows].to(self.dtypes[key]).to(old.dtype)
            same = (now == rounded) | ((now != now) & (rounded != rounded))
            known[rows] = torch.where(same, old[rows], now)
            self.columns[key] = known
        self.late.clear()
        self.written = {key: how for key, how in self.written.items() if key in self.columns}
        # They are in the table, and in no batch before it is written.
        of_table = [key for key in (*self.written, *OF_THE_TABLE) if column_of(batch, key) is not None]
        self.batch = leave_out(batch, of_table) if of_table and len(batch) else batch

    # -- into a batch -------------------------------------------------------------------------------------

    def write(self) -> TensorDictBase:
        """The rows that are here, with all that was decided: the inverse of :meth:`Rows.read`.

        Values are rounded to the dtype of their column. Rows out of the loss are masked.
        """
        batch, in_loss = self.as_decided(), self.in_loss[self.live]
        if self.masks_rows and not bool(in_loss.all()):
            masked = (~in_loss).to(device_of(batch))
            if self.elsewhere:
                _mask_numbers(batch, self.masked_columns, masked)
            for key in () if self.elsewhere else self.masked_columns:
                mask_tokens_of(batch, key, masked)
        return batch

    def as_decided(self) -> TensorDictBase:
        """The rows that are here, with all that was decided, but that rows out of the loss are not masked."""
        self.compact()
        batch = self.with_written(shallow_copy(self.batch))
        for change, numbers, _ in self.late:
            live = {name: column[self.live] for name, column in numbers.items()}
            change(batch, {name: column.to(device_of(batch)) for name, column in live.items()})
        return batch

    def decided_in_parts(self, parts: int = 16) -> Iterator[TensorDictBase]:
        """:meth:`as_decided`, some rows at a time, one of no rows at least, and without columns of texts.

        So what waits for the gathering of rows is never there for all of them.
        """
        self.compact()
        step = max(-(-len(self.live) // parts), 1)
        for start in range(0, max(len(self.live), 1), step):
            yield self.decided_between(slice(start, start + step))

    def decided_between(self, some: slice) -> TensorDictBase:
        """:meth:`as_decided` of some rows of the batch."""
        part = copy(self)
        part.batch, part.live, part.gone = rows_between(part.batch, some), part.live[some], False
        return part.as_decided()

    def with_written(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the columns that stages have written to the table into the rows of :meth:`tokens`."""
        for key, (column, dtype, ndim) in self.written_columns().items():
            column = column[self.live]
            column = column.reshape(len(column), *column.shape[1:], *[1] * (ndim - column.ndim))
            write_column(batch, key, column.to(dtype).to(device_of(batch)))
        return batch

    def written_columns(self) -> dict[NestedKey, tuple[Tensor, torch.dtype, int]]:
        """What stages have written, by key: values for all rows of the table, dtype and dimensions."""
        found = {key: (self.columns[key], *how) for key, how in self.written.items()}
        if self.masks_rows:
            found[IN_LOSS] = (self.in_loss, torch.bool, 1)
        if self.says_who_counts:
            counted = torch.ones(self.size, dtype=torch.bool) if self.counted is None else self.counted
            found[COUNTED] = (counted, torch.bool, 1)
        return found

    def settle(self) -> None:
        """Make the columns now that were left to the gathering of rows: somebody asks for one of them."""
        if self.late:
            self.batch = self.as_decided()
            self.forget({key for late in self.late for key in late.writes})
            self.late.clear()

    def is_late(self, key: NestedKey | None) -> bool:
        """Whether a column is only made where rows are gathered."""
        return any(key in late.writes for late in self.late)

    def compact(self) -> None:
        """Let the batch have the rows that are here, and no others."""
        if not self.gone or torch.equal(self.kept, self.here):
            return
        kept = self.here[self.live].nonzero().flatten()
        if len(kept) < len(self.live):
            there = kept.to(device_of(self.batch))
            self.batch = take_rows(self.batch, there, on_cpu=kept, shared=True)
        self.live, self.kept = self.live[kept], self.here.clone()

    def row_numbers(self) -> Tensor:
        """(N,) int64: the number of each row of the table in the batch of its rank as it came."""
        if self.ranks is None and self.carried is None:
            return self.numbers_of_rank
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.numbers_of_rank] = torch.arange(len(self.numbers_of_rank))
        return numbers

    def numbers_of(self, batch: TensorDictBase) -> Tensor:
        """(B,) int64: the numbers in the table of rows that :meth:`write` has numbered."""
        if len(batch) == 0:  # an empty lazy stack has no columns
            return torch.zeros(0, dtype=torch.int64)
        return self.numbers_of_rank[column_of(batch, ROW).cpu()]

    # -- rows that wait for the next batch ----------------------------------------------------------------

    def taken(self, numbers: Tensor) -> TensorDictBase:
        """Some rows of this rank as a batch, with all that was decided: what :meth:`extend` takes later.

        Args:
            numbers: (n,) int64, rows of the table.
        """
        part = copy(self)
        part.batch, part.live, part.gone = self.take(numbers), numbers, False
        return leave_out(part.as_decided(), [ROW])

    def extend(self, carried: TensorDictBase | None, remainder: str = "carry") -> None:
        """Put rows that an earlier batch left for this one behind those of the batch.

        Args:
            carried: TensorDict ``[C]`` as :meth:`write` made it; None: there are none. Of several ranks all
                call this together.

        Raises:
            BatchError: the columns differ; there are rows, several ranks, and no more are carried.
        """
        if carried is None and (self.ranks is None or remainder != "carry"):
            return
        if self.ranks is not None and remainder != "carry":
            raise BatchError(
                "rows wait from an earlier batch, and ranks that share a batch go on with them under "
                "remainder='carry' alone: set it, or leave them by a split without this state"
            )
        self.settle()
        more = Table(carried, 0 if carried is None else len(carried))
        if carried is not None:
            counts = [key for key in self.columns if isinstance(key, TokenCount)]
            more.load([*(key for key in self.columns if key not in counts), *OF_THE_TABLE], counts)
        self._append(more)
        if ROW in self.columns:
            self.columns[ROW] = self.row_numbers()

    def _append(self, more: Table) -> None:
        """Put the rows of another table, carried from an earlier batch, behind those of each rank.

        Raises:
            BatchError: their batches have different columns.
        """
        ranks, before = self.ranks, self.size
        if ranks is not None:
            ranks.share(more)
            if not more.starts:  # nobody has any
                return
            if more.batch is None:
                more.batch = self.batch[:0]
        if more.batch is not None and len(more.batch):
            # What stages wrote to carried rows is in the table now, as it is of the other rows.
            written = [*self.written, *OF_THE_TABLE]
            plain = leave_out(more.batch, [key for key in written if column_of(self.batch, key) is None])
            self.batch = leave_out(self.batch, [key for key in written if column_of(plain, key) is None])
            plain = plain.to(device_of(self.batch))
            plain = plain.clear_device_() if self.batch.device is None else plain
            self.batch = join_rows([self.batch, plain], "carried rows") if len(self.batch) else plain
        for key, column in self.columns.items():
            extra = more.columns.get(key)
            if extra is None or extra.shape[1:] != column.shape[1:]:
                extra = _unknown(column, more.size)
            self.columns[key] = torch.cat([column, extra.to(column.dtype)])
        for late in self.late:
            for name, values in late.numbers.items():
                late.numbers[name] = torch.cat([values, values.new_zeros(more.size, *values.shape[1:])])
        self.reason = torch.cat([self.reason, more.reason])
        self.here, self.kept = torch.cat([self.here, more.here]), torch.cat([self.kept, more.here])
        if self.into is not None:
            self.into = torch.cat([self.into, torch.arange(before, before + more.size)])
        in_loss = more.columns.get(IN_LOSS, more.in_loss)
        self.in_loss = torch.cat([self.in_loss, in_loss])
        came = torch.ones(before, dtype=torch.bool) if self.counted is None else self.counted
        counted = more.columns.get(COUNTED, torch.ones(more.size, dtype=torch.bool))
        counted = torch.cat([came, counted])
        self.counted = None if bool(counted.all()) else counted
        own = slice(0, more.size) if ranks is None else more.own
        self.live = torch.cat([self.live, torch.arange(before + own.start, before + own.stop)])
        self.size = before + more.size
        self.index = self.here.nonzero().flatten() if self.gone else None
        self.ids.clear()
        self.numbers_of_rank = torch.cat(
            [self.numbers_of_rank, self.live[len(self.live) - (own.stop - own.start) :]]
        )
        self.carried = torch.arange(before, self.size)
        self.carried_starts = [before + start for start in more.starts]


def _unknown(like: Tensor, size: int) -> Tensor:
    """A column of so many rows of which nothing is known: NaN, False or −1."""
    nothing = {torch.float64: float("nan"), torch.bool: False}.get(like.dtype, -1)
    return like.new_full((size, *like.shape[1:]), nothing)


def _mask_numbers(batch: TensorDictBase, keys: Collection[NestedKey], masked: Tensor) -> None:
    """What :func:`mask_tokens_of` does, to the numbers of tokens that are elsewhere."""
    for key in keys:
        numbers = column_of(batch, number_of(key))
        if numbers is not None:
            out = masked.view(-1, *[1] * (numbers.ndim - 1))
            write_column(batch, number_of(key), numbers.masked_fill(out, 0))


def sources_of(key: Any) -> list[NestedKey]:
    """The columns of the batch that a column of the table is made of."""
    if isinstance(key, TokenCount):
        return [each for each in key if each is not None]
    return [key.of] if isinstance(key, Reduced) else [key]

"""The optimiser steps of a batch, gathered one at a time.

Numbers by row come out of the table: those of one kind are packed, put in training order and split by
minibatch at once, since for few rows a call costs more than the numbers that it moves. Tokens are gathered
with their minibatch, out of the memory of the batch; where rows are in order already they are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.schema import (
    IN_LOSS,
    MASKS,
    MICROBATCH,
    MINIBATCH,
    PADDING,
    RANK,
    ROW,
    has_key,
    key_names,
    read_written,
)
from headrace.transforms.table import Late, Table, Tokens
from headrace.transforms.tensordicts import (
    ELSEWHERE,
    as_data,
    column_of,
    device_of,
    fill_out_of_loss,
    of_columns,
    rows_with,
    send_packed,
    shallow_copy,
    take_column,
    take_rows,
    write_entry,
)
from headrace.transforms.tokens import check_mask

from .plan import Plan
from .resume import Progress

SMALL = 2**20  # bytes of a batch that is gathered at once
PLACES = (MINIBATCH, MICROBATCH, RANK)

Columns = Mapping[NestedKey, tuple[Tensor, torch.dtype, int]]
"""What stages have written, by key: (N,) or (N, K) by row of the table, the column's dtype and dimensions."""


class LossColumns(NamedTuple):
    """The columns by which a row is kept out of the loss."""

    mask: NestedKey
    """(N, T) bool, becomes False."""
    log_prob: NestedKey | None
    """(N, T) float, becomes NaN; None: it stays, and the mask alone says it."""
    weight: NestedKey
    """(N,) float, becomes 0."""


class OptimiserSteps:
    """The minibatches of all passes over a batch.

    Args:
        table: of the batch, with what was decided.
        passes: by epoch, the plan, in row numbers of the table, the columns that stages have written, what
            they do to gathered rows, and the rows.
        rank: whose part of each step; None: those of all ranks.
        loss_columns: those that keep padding out of the loss.
        progress: counts what was taken, by the iterator that took last.
        in_order: rows may be in order already.

    Raises:
        BatchError: there is padding, and no column to keep it out of the loss.
    """

    def __init__(
        self,
        table: Table,
        passes: Sequence[tuple[Plan, Columns, Sequence[Late], TensorDictBase]],
        rank: int | None,
        loss_columns: LossColumns,
        progress: Progress,
        *,
        in_order: bool = False,
    ):
        self.table, self.passes, self.rank, self.loss_columns = table, list(passes), rank, loss_columns
        if table.finite is not None:
            self.loss_columns = loss_columns._replace(log_prob=None)
        self.progress, self.resumed_after = progress, progress.taken
        if any(plan.is_padded for plan, *_ in self.passes):
            check_padding(table.batch, self.loss_columns)
        # Where each row of the table is in the batch; None: at its number.
        self.places = None if len(table.live) == table.size else table.places(torch.arange(table.size))
        self.in_order = in_order

    def rows(self) -> list[Tensor]:
        """Of each minibatch the rows of the table, in training order, without padding."""
        found = list[Tensor]()
        for plan, *_ in self.passes:
            order, padding, _ = plan.of_rank(self.rank)
            sizes = list(map(sum, plan.passes(self.rank)))
            real = torch.ones(len(order), dtype=torch.bool) if padding is None else ~padding
            parts = zip(order.split(sizes), real.split(sizes), strict=True)
            found += [rows[kept] for rows, kept in parts]
        return found

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Gather one minibatch after the other, but those that were taken before an interruption.

        A minibatch counts as taken when it is handed out. A loop that is left by ``break`` or an exception
        leaves the batch in the middle: the two look the same from here.
        """
        taken, before = self.resumed_after, 0
        self.progress.taken, self.progress.begun, self.progress.done = taken, True, False
        self.progress.open += 1
        try:
            for plan, columns, late, batch in self.passes:
                passes = plan.passes(self.rank)
                rows = GatheredRows(self, plan, columns, late, batch, list(map(sum, passes)))
                for number in range(taken - before, len(passes)):
                    taken += 1
                    self.progress.taken = taken
                    yield know_runs(rows.gather(number), MICROBATCH, passes[number])
                before += len(passes)
        finally:
            self.progress.open -= 1

    def refuse_to_resume(self) -> None:
        """Refuse a batch of which some minibatches were taken before an interruption.

        Raises:
            BatchError: it is one.
        """
        if self.resumed_after:
            raise BatchError(
                "a batch was interrupted between its minibatches: go on with pipeline.minibatches(batch)"
            )

    def whole(self) -> TensorDictBase:
        """Gather all minibatches of the first pass at once, in order.

        Where that is all there is and no iterator was begun, the batch is done with.

        Raises:
            BatchError: some were taken before an interruption.
        """
        self.refuse_to_resume()
        if len(self.passes) == 1 and not self.progress.begun:
            self.progress.done = True
        plan, columns, late, batch = self.passes[0]
        sizes = list(map(sum, plan.passes(self.rank)))
        rows = GatheredRows(self, plan, columns, late, batch, [sum(sizes)])
        return know_runs(rows.gather(0), MINIBATCH, sizes)


class Branch(NamedTuple):
    """A TensorDict, of which minibatches are built."""

    columns: dict[str, Callable[[int], Any]]
    """By name a branch, or what else makes a column of the minibatch of a number."""
    sizes: Sequence[int]
    """Rows of each minibatch."""
    wide: Sequence[int]
    """Batch dimensions behind the first."""
    device: torch.device | None

    def __call__(self, number: int) -> TensorDict:
        """Make the minibatch of a number."""
        columns = {name: column(number) for name, column in self.columns.items()}
        return of_columns(columns, [self.sizes[number], *self.wide], self.device)


class GatheredRows:
    """The rows of one pass in training order, gathered minibatch by minibatch.

    Args:
        steps: of the batch.
        plan: of the pass.
        columns: that stages have written for it.
        late: what they do to gathered rows.
        batch: the rows.
        sizes: rows of each minibatch.
    """

    def __init__(
        self,
        steps: OptimiserSteps,
        plan: Plan,
        columns: Columns,
        late: Sequence[Late],
        batch: TensorDictBase,
        sizes: Sequence[int],
    ):
        row = batch.tensordicts[0] if _is_ragged(batch) else batch
        earlier = [key for key in (RANK, PADDING) if has_key(row, key)]  # of a split before this one
        self.batch = batch.exclude(*earlier) if earlier else batch
        self.late, self.sizes, self.finite = list(late), list(sizes), steps.table.finite
        self.masks = what_is_masked(steps, self.late) if steps.table.elsewhere else None
        self.device, self.is_ragged = device_of(self.batch), _is_ragged(self.batch)
        self.spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        order, padding, places = plan.of_rank(steps.rank)
        at = order if steps.places is None else steps.places.index_select(0, order)  # rows of the batch
        self.at = at.split(self.sizes)
        self.in_order = steps.in_order and not self.late and self._is_in_order(at)
        self.masked = self._find_masked(steps, order, padding)

        # Numbers by row: packed, sent to the device together, and split by minibatch.
        packed = self._pack(columns, order, padding, steps.loss_columns.weight)
        packed[PLACES[: len(places)]] = places.flatten()
        there, *parts = send_packed([at, *packed.values()], self.device)
        self.there = there.split(self.sizes)
        self.numbers: dict[Any, Sequence[Tensor]] = {}
        for keys, values in zip(packed, parts, strict=True):
            pieces = values.unsafe_split_with_sizes(self.sizes * len(keys))
            for place, key in enumerate(keys):
                self.numbers[key] = pieces[place * len(sizes) : (place + 1) * len(sizes)]
        self.of_late = [
            {name: self.numbers.pop((Late, number, name)) for name in late.numbers}
            for number, late in enumerate(self.late)
        ]

        # Everything else: gathered now, where it is little, or with its minibatch.
        if not self.is_ragged:
            batch, at_once = self.batch, not (self.in_order or self.late) and _bytes_of(self.batch) < SMALL
            if at_once:
                batch = take_rows(batch, there)
                self._mask(batch, slice(None))
                self.masked = {}
            self.branch = self._plan(batch, None if at_once else there)
            self.beside = [key for key, each in self.numbers.items() if not self._put(key, each)]

    def gather(self, number: int) -> TensorDictBase:
        """The rows of one minibatch, as a TensorDict that is the caller's to write to."""
        size, beside = self.sizes[number], list(self.numbers)
        if size == 0:  # a TensorDict of no rows has no texts
            rows = shallow_copy(take_rows(self.batch, self.there[number]))
        elif self.is_ragged:
            taken = [self.batch.tensordicts[row] for row in self.at[number].tolist()]
            rows = rows_with(taken, {key: self.numbers[key][number].unbind() for key in beside})
            beside = []
        else:
            rows, beside = self.branch(number), self.beside
        for key in beside:
            rows.set(key, self.numbers[key][number])
        for late, of_late in zip(self.late, self.of_late, strict=True):
            late.change(rows, {name: pieces[number] for name, pieces in of_late.items()})
        self._mask(rows, self.spans[number])
        if self.finite is not None:
            fill_out_of_loss(rows, *self.finite)
        if self.masks is not None:
            rows.set(MASKS, as_data(self.masks, [size], self.device))
        return rows

    def _is_in_order(self, at: Tensor) -> bool:
        """Whether the rows of each minibatch follow one another in the batch."""
        follows = at[1:] == at[:-1] + 1
        follows[[span.start - 1 for span in self.spans if 0 < span.start < len(at)]] = True
        return bool(follows.all())

    def _find_masked(
        self, steps: OptimiserSteps, order: Tensor, padding: Tensor | None
    ) -> dict[NestedKey, tuple[Tensor, float | None]]:
        """By column of the batch the places that are masked, (M,) bool, and what stands there.

        None stands for what masks tokens: False, or NaN.
        """
        table, (mask, log_prob, weight) = steps.table, steps.loss_columns
        found: dict[NestedKey | None, tuple[Tensor, float | None]] = {}
        out = padding
        if table.masks_rows and not bool(table.in_loss.all()):
            out = ~table.in_loss.index_select(0, order)
            out = out if padding is None else out | padding
        if out is not None:
            found |= dict.fromkeys([*table.masked_columns, mask, log_prob], (out, None))
        if padding is not None:
            found |= {ROW: (padding, -1), weight: (padding, 0), IN_LOSS: (padding, 0)}
        return {key: how for key, how in found.items() if key is not None and has_key(self.batch, key)}

    def _pack(
        self, columns: Columns, order: Tensor, padding: Tensor | None, weight: NestedKey
    ) -> dict[tuple[Any, ...], Tensor]:
        """Numbers by row in training order: (C · M, ...) by their C keys, those of one kind together."""
        kinds: dict[Any, dict[Any, Tensor]] = {}
        for key, (values, dtype, ndim) in columns.items():
            if key not in PLACES:
                kinds.setdefault((dtype, ndim, values.dtype, values.shape[1:]), {})[key] = values
        for number, late in enumerate(self.late):
            for name, values in late.numbers.items():
                kind = values.dtype, values.ndim, values.dtype, values.shape[1:]
                kinds.setdefault(kind, {})[Late, number, name] = values
        packed: dict[tuple[Any, ...], Tensor] = {}
        for (dtype, ndim, *_), group in kinds.items():
            values = torch.stack(list(group.values())).to(dtype)
            if values.ndim == 2:  # ten times as fast as index_select, for many rows
                values = values.gather(1, order.expand(len(group), -1))
            else:
                values = values.index_select(1, order)
            for row, key in enumerate(group):
                if padding is not None and key in (ROW, IN_LOSS, weight):
                    values[row, padding] = -1 if key == ROW else 0
            packed[tuple(group)] = values.view(-1, *values.shape[2:], *[1] * (ndim + 1 - values.ndim))
        if padding is not None:
            packed[PADDING,] = padding.clone()
        return packed

    def _plan(self, batch: TensorDictBase, order: Tensor | None) -> Branch:
        """How columns are gathered, by rows in training `order`; None: they are in it already."""
        columns: dict[str, Any] = {}
        for name, value in batch.items():
            if type(value) is TensorDict and len(value):
                columns[name] = self._plan(value, order)
            elif self.in_order:
                columns[name] = partial(self._view, value)
            elif isinstance(value, Tensor) and (order is None or value.numel() == len(value)):
                ordered = value if order is None else value.index_select(0, order)
                # No views to autograd: who gets a piece may write to it.
                columns[name] = ordered.unsafe_split_with_sizes(self.sizes).__getitem__
            else:
                columns[name] = partial(self._take, value)
        return Branch(columns, self.sizes, batch.batch_size[1:], batch.device)

    def _put(self, key: NestedKey, pieces: Sequence[Tensor]) -> bool:
        """Let a column be one of those that are built; False where it is in no TensorDict."""
        *path, name = (key,) if isinstance(key, str) else key
        branch: Any = self.branch
        for each in path:
            branch = branch.columns.setdefault(each, Branch({}, self.sizes, (), branch.device))
            if not isinstance(branch, Branch):
                return False
        branch.columns[name] = pieces.__getitem__
        return True

    def _view(self, value: Any, number: int) -> Any:
        start = int(self.at[number][0])
        return value[start : start + self.sizes[number]]

    def _take(self, value: Any, number: int) -> Any:
        return take_column(value, self.there[number], on_cpu=self.at[number])

    def _mask(self, rows: TensorDictBase, span: slice) -> None:
        """Keep rows out of the loss that are, those of a piece of the order."""
        known: dict[int, Tensor] = {}  # the same places are those of several columns
        for key, (flags, value) in self.masked.items():
            if id(flags) not in known:
                known[id(flags)] = flags[span].nonzero().flatten()
            at = known[id(flags)]
            if len(at) == 0:
                continue
            if self.is_ragged:
                for row in (rows.tensordicts[number] for number in at.tolist()):
                    entry = column_of(row, key)
                    masked = torch.full_like(entry, _masking(entry) if value is None else value)
                    write_entry(row, key, masked)
                continue
            column, at = rows.get(key), at.to(self.device)
            value = _masking(column) if value is None else value
            if self.in_order:  # it is the memory of the caller's batch
                rows.set(key, column.index_fill(0, at, value))
            else:
                column.index_fill_(0, at, value)


def _is_ragged(batch: TensorDictBase) -> bool:
    return isinstance(batch, LazyStackedTensorDict) and len(batch) > 0


def _masking(column: Tensor) -> float:
    """What stands where tokens are masked: False in a mask, NaN in log-probabilities."""
    return 0 if column.dtype is torch.bool else float("nan")


def _bytes_of(value: Any) -> int:
    """Bytes of a batch of plain tensors; where there is anything else, no few."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value.values())) if type(value) is TensorDict else SMALL


def what_is_masked(steps: OptimiserSteps, late: Sequence[Late]) -> tuple[list[NestedKey], Tokens | None]:
    """What is left to do, where rows are out of the loss, to tokens that are elsewhere.

    Returns:
        - The columns in which such rows are masked.
        - Those in which what is out of the mask is finite (:attr:`Table.finite`).

    Raises:
        BatchError: stages change tokens where rows are gathered.
    """
    if changed := [key for each in late for key in each.writes]:
        raise BatchError(
            f"{listing(map(str, dict.fromkeys(changed)))} are made of tokens, and those of these rows are "
            "elsewhere: fetch the rows before the pipeline (RolloutQueue.fetch)"
        )
    mask, log_prob, _ = steps.loss_columns
    keys = dict.fromkeys([*steps.table.masked_columns, mask, log_prob])
    return [key for key in keys if key is not None], steps.table.finite


def check_padding(batch: TensorDictBase, columns: LossColumns) -> None:
    """Check that padding can be kept out of the loss.

    Raises:
        BatchError: there is no column to do it by, or the loss mask is not bool.
    """
    mask, log_prob, _ = columns
    if has_key(batch, ELSEWHERE):
        return
    if not any(has_key(batch, key) for key in (mask, log_prob) if key is not None):
        other = "" if log_prob is None else f" or {log_prob!r} (log_prob_key)"
        raise BatchError(
            f"padding rows are kept out of the loss by {mask!r} (loss_mask_key){other}, and the batch has "
            f"no such column: it has {key_names(batch)}"
        )
    if has_key(batch, columns.mask):
        check_mask(batch, columns.mask)


# -- minibatches and micro-batches as views ---------------------------------------------------------------

# By the tensor itself: as an attribute it would go with pickles and copies, which begin at another version.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def know_runs(batch: TensorDictBase, key: NestedKey, sizes: Sequence[int]) -> TensorDictBase:
    """Remember how many rows each number of a column is on, one after the other, as the plan knows."""
    if _is_ragged(batch):  # a lazy stack makes its columns anew
        return batch
    column = batch.get(key)
    if not column.is_inference():  # which would not say whether somebody has written to it since
        _known[column] = (column._version, [size for size in sizes if size])
    return batch


def split_minibatches(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the minibatches of a batch that :class:`ShuffleSplit` ordered, as views.

    One device read, for their sizes, where the batch has been copied since.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "minibatch")`` column.
        BatchError: its rows are no longer in their order, after a replay buffer's sampler, say.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import ShuffleSplit
        >>> split = ShuffleSplit(minibatches=3, unit="sample")
        >>> batch = split(TensorDict({"x": torch.arange(6)}, batch_size=[6]))
        >>> [part["x"].shape[0] for part in split_minibatches(batch)]
        [2, 2, 2]
    """
    return _runs(batch, (MINIBATCH,), "split_minibatches")


def split_microbatches(minibatch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the micro-batches of one minibatch, rank by rank, as views.

    One device read, for their sizes, where the minibatch has been copied since.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "microbatch")`` column.
        BatchError: it holds several minibatches, or its rows are no longer in their order.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import ShuffleSplit
        >>> split = ShuffleSplit(minibatches=1, microbatches=2, unit="sample")
        >>> batch = split(TensorDict({"x": torch.arange(6)}, batch_size=[6]))
        >>> [part["x"].shape[0] for part in split_microbatches(batch)]
        [3, 3]
    """
    keys = (MINIBATCH, RANK, MICROBATCH) if has_key(minibatch, RANK) else (MINIBATCH, MICROBATCH)
    return _runs(minibatch, keys, "split_microbatches")


def _runs(batch: TensorDictBase, keys: Sequence[tuple[str, str]], reader: str) -> Iterator[TensorDictBase]:
    if len(batch) == 0:
        return iter(())
    columns = [read_written(batch, key, reader=reader, writer="ShuffleSplit") for key in keys]
    version, known = _known.get(columns[-1], (None, []))
    if known and version == columns[-1]._version and sum(known) == len(batch):
        return _cut(batch, known)
    places, counts = torch.unique_consecutive(torch.stack(columns).cpu(), dim=1, return_counts=True)
    numbers, sizes = places.T.tolist(), counts.tolist()
    if numbers != sorted(map(list, set(map(tuple, numbers)))):
        raise BatchError(
            f"{reader} takes rows in the order that ShuffleSplit gave them; these have been moved since. "
            "Take its minibatches before anything samples from them, or leave the split out and cut what was "
            "sampled"
        )
    if len(keys) > 1 and len({number[0] for number in numbers}) > 1:
        raise BatchError(
            f"a minibatch is one optimiser step; this batch holds {len({n[0] for n in numbers})}: take them "
            "one by one, by split_minibatches(batch)"
        )
    return _cut(batch, sizes)


def _cut(batch: TensorDictBase, sizes: Sequence[int]) -> Iterator[TensorDictBase]:
    ends = list(accumulate(sizes))
    return (batch[end - size : end] for end, size in zip(ends, sizes, strict=True))

"""Gather the rows of a batch, one minibatch at a time.

Columns with one number per row come from the table. They are put into training order at once, and split by
minibatch. Tokens are gathered with their minibatch from the batch. A minibatch shares no memory with the
batch or another minibatch, even if the rows are in order already. So the caller may change a minibatch.
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

from headrace.transforms.table import BatchError, Table, listing
from headrace.transforms.table.errors import ColumnFact
from headrace.transforms.table.masking import Tokens
from headrace.transforms.table.schema import (
    IN_LOSS,
    MASKS,
    MICROBATCH,
    MINIBATCH,
    PADDING,
    PLACES,
    RANK,
    ROW,
    has_key,
    key_names,
    read_written,
)
from headrace.transforms.table.table import Late
from headrace.transforms.table.tensordicts import (
    any_row_has,
    as_data,
    column_of,
    deep_copy,
    device_of,
    fill_out_of_loss,
    of_columns,
    parts_of,
    send_packed,
    shallow_copy,
    stack_of_rows,
    take_column,
    take_rows,
    write_entries,
    write_entry,
)
from headrace.transforms.table.tokens import check_mask

from .plan import Plan

SMALL = 2**20  # bytes; a smaller batch is gathered at once, not by minibatch

Columns = Mapping[NestedKey, tuple[Tensor, torch.dtype, int]]
"""Columns written by stages, by key: (N,) or (N, K) values by table row, dtype and number of dimensions."""


class LossColumns(NamedTuple):
    """The columns that mask a row out of the loss."""

    mask: NestedKey
    """(N, T) bool, set to False."""
    log_prob: NestedKey | None
    """(N, T) float, set to NaN; None: unchanged, only the mask counts."""
    weight: NestedKey
    """(N,) float, set to 0."""


class Progress:
    """Counts the minibatches of one batch that were taken.

    A minibatch counts as taken when it is yielded. Whether it was trained, and whether ``break`` or an
    exception closed an iterator, is unknown here. So a batch is done only when all minibatches were taken.
    """

    def __init__(self, taken: int = 0):
        self.taken = taken
        self.minibatches = 0  # counted by OptimiserSteps
        self.begun = False  # an iterator was started
        self.open = 0  # number of iterators that have not ended
        self.done = False  # no further minibatch will be taken

    @property
    def in_the_middle(self) -> bool:
        """Whether some minibatches were taken and an iterator is open for the others."""
        return not self.done and self.open > 0 and self.taken < self.minibatches


class OptimiserSteps:
    """An iterable over the minibatches of all passes over a batch.

    Args:
        table: the table of the batch, after all stages.
        passes: per epoch: the plan, in row numbers of the table; the columns that stages wrote; the changes
            that stages make to gathered rows; and the batch.
        rank: yield the rows of this rank; None: of all ranks.
        loss_columns: the columns that mask padding out of the loss.
        progress: counts the minibatches that the latest iterator has yielded.

    Raises:
        BatchError: padding rows need a loss mask or log-probability column, and the batch has neither.
    """

    def __init__(
        self,
        table: Table,
        passes: Sequence[tuple[Plan, Columns, Sequence[Late], TensorDictBase]],
        rank: int | None,
        loss_columns: LossColumns,
        progress: Progress | None = None,
    ):
        self.table, self.passes, self.rank, self.loss_columns = table, list(passes), rank, loss_columns
        if table.masking.kept_finite is not None:
            self.loss_columns = loss_columns._replace(log_prob=None)
        self.progress = progress = progress or Progress()
        self.resumed_after = progress.taken
        progress.minibatches = 0
        for plan, *_, batch in self.passes:
            progress.minibatches += len(plan.sizes)
            if plan.padding is not None:
                self._require_mask_of_padding(batch)
        # The batch row of each table row; None: equal numbers. If this rank has no row in a minibatch, its
        # padding has the table row of another rank. Such padding gets the tokens of this rank's first row.
        self.batch_rows = None
        if len(table.live) < table.size:
            self.batch_rows = table.batch_rows(table.every).clamp_min(0)

    def _require_mask_of_padding(self, batch: TensorDictBase) -> None:
        mask, log_prob, _ = self.loss_columns
        if self.table.masking.elsewhere:
            return
        if not (has_key(batch, mask) or has_key(batch, log_prob)):
            where = "{mask}" if log_prob is None else "{mask} or {log_prob}"
            raise BatchError(
                f"padding rows are masked in {where}, and the batch has no such column; {{present}}",
                mask=ColumnFact(mask, "loss_mask_key"),
                log_prob=ColumnFact(log_prob, "log_prob_key"),
                batch=key_names(batch),
            )
        check_mask(batch, mask)

    def rows(self) -> list[Tensor]:
        """The table rows of each minibatch, in training order, without padding."""
        found = list[Tensor]()
        for plan, *_ in self.passes:
            order, padding, _ = plan.of_rank(self.rank)
            sizes = list(map(sum, plan.passes(self.rank)))
            real = torch.ones(len(order), dtype=torch.bool) if padding is None else ~padding
            parts = zip(order.split(sizes), real.split(sizes), strict=True)
            found += [rows[kept] for rows, kept in parts]
        return found

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Gather one minibatch after the other. After an interruption, start after the taken minibatches.

        A minibatch counts as taken when it is yielded. After ``break`` or an exception in your loop, the
        batch counts as interrupted, because an iterator cannot tell ``break`` from an exception.
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
        """Refuse to gather all minibatches at once if some were taken before an interruption.

        Raises:
            BatchError: some minibatches were taken.
        """
        if self.resumed_after:
            raise BatchError(
                f"this batch was interrupted after {self.resumed_after} minibatches: continue with "
                "pipeline.minibatches(batch), which yields the remaining ones"
            )

    def whole(self) -> TensorDictBase:
        """Gather all minibatches of the first pass at once, in order.

        With a single pass, and if no iterator was started, all minibatches then count as taken.

        Raises:
            BatchError: some minibatches were taken before an interruption.
        """
        self.refuse_to_resume()
        if len(self.passes) == 1 and not self.progress.begun:
            self.progress.done = True
        plan, columns, late, batch = self.passes[0]
        sizes = list(map(sum, plan.passes(self.rank)))
        rows = GatheredRows(self, plan, columns, late, batch, [sum(sizes)])
        return know_runs(rows.gather(0), MINIBATCH, sizes)


class Branch(NamedTuple):
    """Builds the TensorDict of a minibatch from one function per column."""

    columns: dict[str, Callable[[int], Any]]
    """By name: a function from the number of a minibatch to its column, or a nested branch."""
    sizes: Sequence[int]
    """Number of rows of each minibatch."""
    wide: Sequence[int]
    """Batch dimensions after the first."""
    device: torch.device | None

    def __call__(self, number: int) -> TensorDict:
        """Build one minibatch."""
        columns = {name: column(number) for name, column in self.columns.items()}
        return of_columns(columns, [self.sizes[number], *self.wide], self.device)


class GatheredRows:
    """The rows of one pass in training order, gathered minibatch by minibatch.

    Args:
        steps: the optimiser steps of the batch.
        plan: the plan of this pass.
        columns: the columns that stages wrote for this pass.
        late: the changes that stages make to gathered rows.
        batch: the rows.
        sizes: number of rows of each minibatch.

    Raises:
        BatchError: a stage computes columns from tokens, which are stored elsewhere.
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
        self.is_ragged, self.device = _is_ragged(batch), device_of(batch)
        for key in (RANK, PADDING):  # written by an earlier split
            if any_row_has(batch, key):
                batch = batch.exclude(key)
        self.batch, self.late, self.sizes, self.kept_finite = (
            batch,
            list(late),
            list(sizes),
            steps.table.masking.kept_finite,
        )
        self.masks: tuple[list[NestedKey], Tokens | None] | None = None
        """For tokens that are stored elsewhere: the columns to mask there, and those to make finite."""
        if steps.table.masking.elsewhere:
            if changed := [key for each in self.late for key in each.writes]:
                columns_of_tokens = listing(map(str, dict.fromkeys(changed)))
                raise BatchError(
                    f"{columns_of_tokens} are computed from tokens, and the tokens of these rows are stored "
                    "elsewhere: fetch the rows before the pipeline (RolloutQueue.fetch)"
                )
            keys = dict.fromkeys([*steps.table.masking.columns, *steps.loss_columns[:2]])
            self.masks = [key for key in keys if key is not None], self.kept_finite
        self.spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        order, padding, numbers = plan.of_rank(steps.rank)  # `order` has rows of the table
        in_batch = order if steps.batch_rows is None else steps.batch_rows.index_select(0, order)

        # 1. Columns with one number per row: order, send to the device together, and split by minibatch.
        given: dict[Any, tuple[Tensor, torch.dtype, int]] = dict(columns)
        for change, late_change in enumerate(self.late):
            for name, values in late_change.numbers.items():
                given[Late, change, name] = values, values.dtype, values.ndim
        mask, log_prob, weight = steps.loss_columns
        ordered = dict[Any, Tensor]()
        for key, (values, dtype, ndim) in given.items():
            if key in PLACES:  # they come from the plan, which has them for padding rows, too
                continue
            values = values.index_select(0, order)
            if padding is not None and key in (ROW, IN_LOSS, weight):
                values[padding] = -1 if key == ROW else 0
            values = values.to(dtype)
            missing = ndim - values.ndim
            ordered[key] = values.view(*values.shape, *[1] * missing) if missing else values
        if padding is not None:
            ordered[PADDING] = padding.clone()
        in_loss = ordered.get(IN_LOSS)
        # Copies, because the plan keeps its tensors.
        ordered |= {name: each.clone() for name, each in zip(PLACES, numbers, strict=False)}
        on_device, *parts = send_packed([in_batch, *ordered.values()], self.device)
        self.numbers = {key: _split(values, self.sizes) for key, values in zip(ordered, parts, strict=True)}
        self.of_late = [
            {name: self.numbers.pop((Late, change, name)) for name in late_change.numbers}
            for change, late_change in enumerate(self.late)
        ]

        # 2. Columns of the batch in which rows are masked: (M,) bool, which rows, and the masked value.
        how: dict[NestedKey | None, tuple[Tensor, float | None]] = {}
        out = padding if in_loss is None or bool(in_loss.all()) else ~in_loss
        if out is not None:
            how |= dict.fromkeys([*steps.table.masking.columns, mask, log_prob], (out, None))
        if padding is not None:
            how |= {ROW: (padding, -1), weight: (padding, 0)}
        self.masked: dict[NestedKey, tuple[Tensor, float]] = {}
        for column, (flags, value) in how.items():
            if column is not None and (found := parts_of(batch, column)):
                masking = 0 if found[0].dtype is torch.bool else float("nan")
                self.masked[column] = flags, masking if value is None else value

        # 3. All other columns: gather a small batch now, a larger one by minibatch.
        at_once = not (self.is_ragged or self.late) and _bytes_of(batch) < SMALL
        if at_once:
            batch = take_rows(batch, on_device)
            self._mask(batch, slice(None))
            self.masked = {}
        else:
            self.in_batch, self.on_device = in_batch.split(self.sizes), on_device.split(self.sizes)
        if not self.is_ragged:
            self.branch = self._plan(batch, None if at_once else on_device)
            self.beside = [key for key, each in self.numbers.items() if not self._put(key, each)]

    def gather(self, number: int) -> TensorDictBase:
        """Gather one minibatch, as a TensorDict that the caller may write to."""
        size, beside = self.sizes[number], list(self.numbers)
        if size == 0:  # a branch cannot build text columns without rows
            rows = shallow_copy(take_rows(self.batch, torch.zeros(0, dtype=torch.int64)))
        elif self.is_ragged:
            taken = [deep_copy(self.batch.tensordicts[row]) for row in self.in_batch[number].tolist()]
            rows = rows_with(taken, {key: self.numbers[key][number].unbind() for key in beside})
            beside = []
        else:
            rows, beside = self.branch(number), self.beside
        for key in beside:
            rows.set(key, self.numbers[key][number])
        for late, of_late in zip(self.late, self.of_late, strict=True):
            late.change(rows, {name: pieces[number] for name, pieces in of_late.items()})
        self._mask(rows, self.spans[number])
        if self.kept_finite is not None:
            fill_out_of_loss(rows, *self.kept_finite)
        if self.masks is not None:
            rows.set(MASKS, as_data(self.masks, [size], self.device))
        return rows

    def _plan(self, batch: TensorDictBase, order: Tensor | None) -> Branch:
        """Choose how each column is gathered; `order`: rows in training order, None: gathered already."""
        columns: dict[str, Any] = {}
        for name, value in batch.items():
            if type(value) is TensorDict and len(value):
                columns[name] = self._plan(value, order)
            elif isinstance(value, Tensor) and (order is None or value.numel() == len(value)):
                if order is not None:  # one number per row, which is faster with one dimension
                    value = value.reshape(-1).index_select(0, order).view(-1, *value.shape[1:])
                columns[name] = _split(value, self.sizes).__getitem__
            else:
                columns[name] = partial(self._take, value)
        return Branch(columns, self.sizes, batch.batch_size[1:], batch.device)

    def _put(self, key: NestedKey, pieces: Sequence[Tensor]) -> bool:
        """Add a column to the branch of its key; False if a plain column is where a TensorDict should be."""
        *path, name = (key,) if isinstance(key, str) else key
        branch: Any = self.branch
        for each in path:
            branch = branch.columns.setdefault(each, Branch({}, self.sizes, (), branch.device))
            if not isinstance(branch, Branch):
                return False
        branch.columns[name] = pieces.__getitem__
        return True

    def _take(self, value: Any, number: int) -> Any:
        return take_column(value, self.on_device[number], on_cpu=self.in_batch[number])

    def _mask(self, rows: TensorDictBase, span: slice) -> None:
        """Write the masked values; `span`: the part of the training order that `rows` holds."""
        known: dict[int, Tensor] = {}  # several columns share one tensor of positions
        for key, (flags, value) in self.masked.items():
            if id(flags) not in known:
                known[id(flags)] = flags[span].nonzero().flatten()
            at = known[id(flags)]
            if len(at) == 0:
                continue
            if self.is_ragged:
                for row in (rows.tensordicts[number] for number in at.tolist()):
                    write_entry(row, key, torch.full_like(column_of(row, key), value))
                continue
            column, at = rows.get(key), at.to(self.device)
            column.index_fill_(0, at, value)


def _is_ragged(batch: TensorDictBase) -> bool:
    return isinstance(batch, LazyStackedTensorDict) and len(batch) > 0


def _split(values: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Split values into pieces that are not views for autograd, because the caller may write to them."""
    return (values,) if len(sizes) == 1 else values.unsafe_split_with_sizes(sizes)


def _bytes_of(value: Any) -> int:
    """Bytes of a batch of plain tensors. Any other entry counts as SMALL, so the batch is not small."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value.values())) if type(value) is TensorDict else SMALL


# -- minibatches and micro-batches as views ---------------------------------------------------------------

# A pickle or copy of a tensor would keep an attribute, but restart the version. So this is a dict by tensor.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def know_runs(batch: TensorDictBase, key: NestedKey, sizes: Sequence[int]) -> TensorDictBase:
    """Remember how long each run of equal numbers in a column is, so that no split reads the column."""
    if _is_ragged(batch):  # a lazy stack creates a new column tensor on each access
        return batch
    column = batch.get(key)
    if not column.is_inference():  # inference tensors have no version, so a later write would not show
        _known[column] = (column._version, list(filter(None, sizes)))
    return batch


def split_minibatches(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the minibatches of a batch that :class:`ShuffleSplit` ordered, as views.

    Reads the sizes from the device once if the batch was copied after the split.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "minibatch")`` column.
        BatchError: the rows are no longer in training order, for example after a replay buffer's sampler.

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

    Reads the sizes from the device once if the minibatch was copied after the split.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "microbatch")`` column.
        BatchError: the batch holds several minibatches, or the rows are no longer in training order.

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
    # If the column was not written since, its runs are known without a device read.
    if known and version == columns[-1]._version:
        return _views(batch, known)
    places, counts = torch.unique_consecutive(torch.stack(columns).cpu(), dim=1, return_counts=True)
    numbers, sizes = places.T.tolist(), counts.tolist()
    # In training order runs ascend, and none comes twice.
    if numbers != sorted(map(list, set(map(tuple, numbers)))):
        raise BatchError(
            f"{reader} needs the rows in the order of ShuffleSplit, and they were reordered since. Take the "
            "minibatches before a sampler reorders the rows, or remove the split and cut the sampled rows "
            "yourself"
        )
    if len(keys) > 1 and len({number[0] for number in numbers}) > 1:
        raise BatchError(
            f"{reader} needs one minibatch, and this batch holds {len({n[0] for n in numbers})}: take one "
            "after the other with split_minibatches(batch)"
        )
    return _views(batch, sizes)


def _views(batch: TensorDictBase, sizes: Sequence[int]) -> Iterator[TensorDictBase]:
    ends = list(accumulate(sizes))
    return (batch[end - size : end] for end, size in zip(ends, sizes, strict=True))


def rows_with(
    rows: Sequence[TensorDictBase], columns: Mapping[NestedKey, Sequence[Tensor]]
) -> TensorDictBase:
    """A lazy stack of rows with more columns. The given rows do not change, and no tensor is copied.

    Args:
        rows: n TensorDicts.
        columns: n values each, by key.

    Example:
        >>> row = TensorDict({"next": {"x": torch.ones(3)}})
        >>> stack = rows_with([row, row], {("next", "y"): [torch.zeros(()), torch.ones(())]})
        >>> stack["next", "y"].tolist(), list(row["next"].keys())
        ([0.0, 1.0], ['x'])
    """
    made: Any = stack_of_rows(*map(shallow_copy, rows), stack_dim=0)
    below: dict[tuple[str, ...], dict[str, Sequence[Tensor]]] = {}  # columns by their path
    for key, values in columns.items():
        *path, last = (key,) if isinstance(key, str) else key
        below.setdefault(tuple(path), {})[last] = values
    for path, group in below.items():
        for row, *values in zip(made.tensordicts, *group.values(), strict=True):
            write_entries(row, path, zip(group, values, strict=True))
    return made

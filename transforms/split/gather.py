"""Rows go where the plan says: first marked in place, then gathered a minibatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import of_columns, shallow_copy, silence_rows, take_column, take_rows
from headrace.transforms.schema import IN_LOSS, MICROBATCH, MINIBATCH, PADDING, RANK, ROW, has_key, key_names
from headrace.transforms.tokens import check_mask, silence_gathered

from .placed import Placed
from .plan import Plan


def mark(batch: TensorDictBase, plan: Plan, placed: Placed) -> TensorDictBase:
    """Write, in row order, where each row is trained; -1 where it is not. Moves no row.

    Returns:
        A shallow copy with the columns ``("headrace", "minibatch")``, ``("headrace", "microbatch")`` and,
        for more than one rank, ``("headrace", "rank")``.
    """
    marked = shallow_copy(batch)
    for key in (RANK, PADDING):
        if has_key(marked, key):
            marked.pop(key)
    minibatch, rank, microbatch = placed.table.unbind(0)
    marked.set(MINIBATCH, minibatch).set(MICROBATCH, microbatch)
    return marked.set(RANK, rank) if any(len(ranks) > 1 for ranks in plan.sizes) else marked


SMALL = 2**18  # bytes


class LossColumns(NamedTuple):
    """The columns by which a row is kept out of the loss."""

    mask: NestedKey
    """(N, T) bool, becomes False."""
    log_prob: NestedKey | None
    """(N, T) float, becomes NaN."""
    weight: NestedKey
    """(N,) float, becomes 0."""


class Piece(NamedTuple):
    """A piece of an order."""

    number: int
    rows: Tensor
    """(n,) int64, row numbers, on the device of the batch."""
    on_cpu: Tensor
    """(n,) int64, the same on the CPU."""


def gatherer(
    batch: TensorDictBase, plan: Plan, placed: Placed, spans: Sequence[slice], columns: LossColumns
) -> Callable[[int], TensorDictBase]:
    """What gathers one piece of the order, by its number; views where all rows are in order already.

    Args:
        batch: TensorDict ``[N]``, marked.
        plan: of it.
        placed: the plan, where the batch lies.
        spans: places in the order, piece by piece.
        columns: those that keep rows out of the loss.
    """
    in_order = plan.is_in_order(spans)
    small = not in_order and _bytes_of(batch) < SMALL
    if small:  # calls cost more than rows: gathered and silenced at once, and then split
        batch = take_rows(batch, placed.order)
        silence_gathered(batch, loss_columns(batch, columns), own_memory=True)
    take = _viewer(batch) if in_order else _taker(batch, None if small else placed.order, spans)

    def gather(number: int) -> TensorDictBase:
        span = spans[number]
        rows = placed.order[span]
        piece = Piece(number, rows, rows if placed.order is plan.order else plan.order[span])
        if len(piece.rows) == 0:
            return take_rows(batch, piece.rows)
        taken = take(piece)
        if not small:
            silence_gathered(taken, loss_columns(taken, columns), own_memory=not in_order)
        return _pad(taken, placed, span, columns) if plan.is_padded else taken

    return gather


def _bytes_of(value: Any) -> int:
    """Bytes of a batch of plain tensors; where there is anything else, no few."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value.values())) if type(value) is TensorDict else SMALL


def _viewer(batch: TensorDictBase) -> Callable[[Piece], TensorDictBase]:
    def view(piece: Piece) -> TensorDictBase:
        start = int(piece.on_cpu[0])
        return shallow_copy(batch[start : start + len(piece.rows)])

    return view


def _taker(value: Any, order: Tensor | None, spans: Sequence[slice]) -> Callable[[Piece], Any]:
    """What gathers some of the rows of a column; one of a number a row is gathered now, for all pieces.

    A call costs more than the few numbers that it would move. What is split here is no view to autograd, so
    that whoever gets a piece may write to it. Without an `order` the rows are in theirs already.
    """
    if isinstance(value, Tensor) and (order is None or value.numel() == len(value)):
        ordered = value if order is None else value.index_select(0, order)
        sizes = [span.stop - span.start for span in spans]
        if sum(sizes) != len(ordered):  # of one rank, or what an interruption left
            return lambda piece: ordered[spans[piece.number]]
        pieces = ordered.unsafe_split_with_sizes(sizes)
        return lambda piece: pieces[piece.number]
    if type(value) is TensorDict and len(value):
        takers = {key: _taker(column, order, spans) for key, column in value.items()}
        wide, device = value.batch_size[1:], value.device
        return lambda piece: of_columns(
            {key: take(piece) for key, take in takers.items()}, [len(piece.rows), *wide], device
        )
    return lambda piece: take_column(value, piece.rows, on_cpu=piece.on_cpu)


def _pad(taken: TensorDictBase, placed: Placed, span: slice, columns: LossColumns) -> TensorDictBase:
    """Keep copies out of the loss, and say where they are trained."""
    places, silent = placed.numbers[:, span].clone(), placed.padding[span].clone()  # the caller's to write to
    taken.set(MINIBATCH, places[0]).set(MICROBATCH, places[2])
    if has_key(taken, RANK):
        taken.set(RANK, places[1])
    for key, value in ((ROW, -1), (columns.weight, 0), (IN_LOSS, False)):
        if has_key(taken, key):
            taken.set(key, taken.get(key).masked_fill(silent, value))
    for key in loss_columns(taken, columns):
        silence_rows(taken, key, silent)
    return taken.set(PADDING, silent)


def loss_columns(batch: TensorDictBase, columns: LossColumns) -> list[NestedKey]:
    """The columns of a batch that keep a row out of the loss."""
    return [key for key in (columns.mask, columns.log_prob) if has_key(batch, key)]


def check_padding(batch: TensorDictBase, columns: LossColumns) -> None:
    """Check that padding can be kept out of the loss.

    Raises:
        BatchError: there is no column to do it by, or the loss mask is not bool.
    """
    if not loss_columns(batch, columns):
        raise BatchError(
            f"padding rows are kept out of the loss by {columns.mask!r} (loss_mask_key) or "
            f"{columns.log_prob!r} (log_prob_key), and the batch has neither: it has {key_names(batch)}"
        )
    if has_key(batch, columns.mask):
        check_mask(batch, columns.mask)

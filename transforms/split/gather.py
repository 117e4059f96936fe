"""Rows go where the plan says: first marked in place, then gathered a minibatch at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import device_of, shallow_copy, silence_rows, take_rows
from headrace.transforms.schema import IN_LOSS, MICROBATCH, MINIBATCH, PADDING, RANK, ROW, has_key, key_names
from headrace.transforms.tokens import check_mask, silence_gathered

from .plan import Plan


def mark(batch: TensorDictBase, plan: Plan) -> TensorDictBase:
    """Write, in row order, where each row is trained; -1 where it is not. Moves no row.

    Returns:
        A shallow copy with the columns ``("headrace", "minibatch")``, ``("headrace", "microbatch")`` and,
        for more than one rank, ``("headrace", "rank")``.
    """
    table = torch.full((3, len(batch)), -1, dtype=torch.int64)
    real = ~plan.padding
    table[:, plan.order[real]] = plan.numbers[:, real]
    table = table.to(device_of(batch))
    marked = shallow_copy(batch)
    for key in (RANK, PADDING):
        if has_key(marked, key):
            marked.pop(key)
    marked.set(MINIBATCH, table[0]).set(MICROBATCH, table[2])
    return marked.set(RANK, table[1]) if any(len(ranks) > 1 for ranks in plan.sizes) else marked


class LossColumns(NamedTuple):
    """The columns by which a row is kept out of the loss."""

    mask: NestedKey
    """(N, T) bool, becomes False."""
    log_prob: NestedKey | None
    """(N, T) float, becomes NaN."""
    weight: NestedKey
    """(N,) float, becomes 0."""


def take_span(
    batch: TensorDictBase, plan: Plan, span: slice | Tensor, columns: LossColumns
) -> TensorDictBase:
    """Gather some of the order; views where the rows are in order already.

    Args:
        batch: TensorDict ``[N]``, marked.
        plan: of it.
        span: places in the order.
        columns: those that keep padding out of the loss.

    Raises:
        BatchError: there is padding, and no column to keep it out.
    """
    rows, padding = plan.order[span], plan.padding[span]
    device = device_of(batch)
    in_order = len(rows) > 0 and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows)))
    if in_order:
        taken = shallow_copy(batch[int(rows[0]) : int(rows[0]) + len(rows)])
    else:
        taken = take_rows(batch, rows.to(device))
    silence_gathered(taken, loss_columns(taken, columns), own_memory=not in_order)
    if not bool(plan.padding.any()) or not len(rows):
        return taken
    places = plan.numbers[:, span].to(device)
    taken.set(MINIBATCH, places[0]).set(MICROBATCH, places[2])
    if has_key(taken, RANK):
        taken.set(RANK, places[1])
    silent = padding.to(device)
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

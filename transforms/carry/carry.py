"""Take rows out of the table of one batch, and join them to the table of the next batch."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.table import OF_THE_TABLE, BatchError, Rows, Table, TokenCount, listing, unknown
from headrace.transforms.table.schema import COUNTED, IN_LOSS, REASON, ROW, STEPS_LEFT, has_key
from headrace.transforms.table.tensordicts import (
    as_texts,
    column_of,
    device_of,
    leave_out,
    listed,
    number_column,
    write_column,
)

from .saved_rows import join_rows


def take(table: Table, numbers: Tensor) -> TensorDictBase:
    """Make a batch of some rows of this rank, with all decisions and reasons, for :func:`join`.

    Args:
        numbers: (n,) int64, table indices.
    """
    part = copy(table)
    part.batch, part.live = table.take(numbers), numbers
    batch = leave_out(part._as_decided(), [ROW])
    write_column(batch, REASON, as_texts(table.fates.reasons_of(numbers)))
    return batch


def wait_a_step(carried: TensorDictBase, rows: Rows) -> TensorDictBase:
    """Take one step off ``("headrace", "steps_left")``, if a stream wrote this column.

    Args:
        carried: the output of :func:`take`, which is changed.
        rows: the table, for the key of the group ids.

    Raises:
        BatchError: a row would be too old at the next step.
    """
    if not has_key(carried, STEPS_LEFT):
        return carried
    left = number_column(carried, STEPS_LEFT)
    if len(late := (left <= 0).nonzero().flatten()):
        ids = listed(column_of(carried, rows.key("group")))
        groups = listing(dict.fromkeys(str(ids[row]) for row in late.tolist()))
        raise BatchError(
            f"rows of groups {groups} would wait for the next step, and are then older than "
            "max_staleness allows: set pipeline.stages.split.remainder=uneven, or minibatches that divide "
            "the groups of a step, or a larger max_staleness"
        )
    write_column(carried, STEPS_LEFT, left - 1)
    return carried


def join(rows: Rows, carried: TensorDictBase | None, remainder: str = "carry") -> None:
    """Append the carried rows of an earlier batch. All ranks call this together.

    Carried rows keep their columns, their first reason, and whether they are in the loss and the statistics.

    Args:
        rows: a view of the table.
        carried: TensorDict ``[C]`` from :func:`take`; None: no rows.
        remainder: the option `remainder` of the split.

    Raises:
        BatchError: the columns differ; or ranks share the batch and `remainder` is not ``carry``.
    """
    table, arrived, has_masked = rows.table, rows.table.size, rows.table.fates.masks
    _append(table, carried, remainder)
    if table.fates.masks and not has_masked:  # only carried rows are out of the loss
        out = ~table.fates.in_loss & (table.every >= arrived)
        rows.on_arrival.mask(out)


def _append(table: Table, carried: TensorDictBase | None, remainder: str) -> None:
    if table.ranks.size > 1 and remainder != "carry":
        raise BatchError(
            "rows were carried from an earlier batch, and ranks that share a batch can only use them "
            "with remainder='carry': set pipeline.stages.split.remainder=carry, or drop these rows with "
            "a new split"
        )
    # Read the carried rows into another table, and exchange them.
    more, reasons = Table(carried, 0 if carried is None else len(carried)), list[str]()
    if carried is not None:
        reasons = listed(column_of(carried, REASON))
        more.batch = leave_out(carried, [REASON])
        counts = [key for key in table.columns if isinstance(key, TokenCount)]
        # A column such as an advantage may have one number per row here, and ragged tokens in carried rows.
        ragged = {key for key in table.columns if key not in counts and _is_ragged(column_of(carried, key))}
        more.load([*(key for key in table.columns if key not in {*counts, *ragged}), *OF_THE_TABLE], counts)
    ranks, before = table.ranks, table.size
    ranks.share(more)
    if not more.size:  # no rank has carried rows
        return
    table.settle()
    if more.batch is None:
        more.batch = table.batch[:0]
    if len(more.batch):
        # Columns that stages wrote are in the table, also for the carried rows.
        written = [*table.written, *OF_THE_TABLE]
        plain = leave_out(more.batch, [key for key in written if column_of(table.batch, key) is None])
        table.batch = leave_out(table.batch, [key for key in written if column_of(plain, key) is None])
        plain = plain.to(device_of(table.batch))
        plain = plain.clear_device_() if table.batch.device is None else plain
        table.batch = join_rows([table.batch, plain], "carried rows") if len(table.batch) else plain
    for key, column in table.columns.items():
        extra = more.columns.get(key)
        if extra is None or extra.shape[1:] != column.shape[1:]:
            extra = unknown(column, more.size)
        table.columns[key] = torch.cat([column, extra.to(column.dtype)])
    table.kept = torch.cat([table.kept, more.fates.here])
    more.fates.came(*map(more.columns.get, (IN_LOSS, COUNTED)))
    in_loss, counted = more.fates.in_loss, more.fates.counts
    told = reasons, not bool(in_loss.all()), not bool(counted.all())
    every = ranks.gather_objects(told)
    table.fates.masks |= any(masked for _, masked, _ in every)
    table.fates.excludes |= any(excluded for *_, excluded in every)
    table.fates.extend([name for names, *_ in every for name in names], in_loss, counted)
    table.live = torch.cat([table.live, more.live + before])
    table.starts.append([before + start for start in more.starts[0]])
    table.size = before + more.size
    table.every = torch.arange(table.size)
    if ROW in table.columns:
        table.columns[ROW] = table.row_numbers()


def _is_ragged(column: Any) -> bool:
    return isinstance(column, list) and isinstance(column[0], Tensor)


def refuse_again(rows: Rows, unit: str) -> None:
    """Raise an error if the batch has ids of carried rows again.

    Args:
        rows: all rows of the table.
        unit: the unit whose ids are compared, ``group`` or ``rollout``.

    Raises:
        BatchError: the batch has such ids. The message lists the first ten.
    """
    table = rows.table
    if rows.key(unit) is None or not rows.has(unit):
        return
    ids = rows.integers(unit, f"{unit}_id")
    came = table.fates.here.index_fill(0, table.carried, False)
    waiting = torch.zeros_like(came).index_fill_(0, table.carried, True)
    if table.ranks.shared_ids == "different":  # compare this rank's own ids
        ids = ids.index_copy(0, table.live, number_column(table.batch, rows.key(unit)).long().cpu())
        own = torch.zeros_like(came).index_fill_(0, table.live, True)
        came, waiting = came & own, waiting & own
    if again := ids[waiting][torch.isin(ids[waiting], ids[came])].tolist():
        raise BatchError(
            f"rows of {unit}s {sorted(set(again))[:10]} were carried over, and the batch has the same "
            f"{unit}_ids again. remainder='carry' needs ids that are unique over batches, such as those "
            "of RepeatSampler"
        )

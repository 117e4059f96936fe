"""Run stages without access to the table: a callable gets a batch with all decisions, and returns rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.table import OF_THE_TABLE, BatchError, Rows, Table, TokenCount, few, listing
from headrace.transforms.table.schema import COUNTED, IN_LOSS, REWARD, ROW
from headrace.transforms.table.table import Reduced
from headrace.transforms.table.tensordicts import (
    column_of,
    describe_columns,
    device_of,
    leave_out,
    without_rows,
)


def run_callable(name: str, stage: Callable[[TensorDictBase], Any], rows: Rows) -> None:
    """Write the batch, call a stage with it, and update the table from what the stage returns.

    Args:
        name: name of the stage.
        stage: a callable from batch to batch. It is not called on a rank without rows.
        rows: the rows that have not left, with columns under the names of the pipeline.

    Raises:
        BatchError: the stage does not return some or all of its rows in their order, or changes rewards after
            the last stage that reads them.
    """
    # 1. Run the stage, and find out which rows it has returned.
    table = rows.table
    batch = rows.write()
    numbers = table.live
    if len(batch):
        batch = stage(batch)
        if not isinstance(batch, TensorDictBase) or (len(batch) and column_of(batch, ROW) is None):
            if batch is None:
                raise BatchError("the stage returned nothing (None): return the batch")
            rewards = ". To change rewards, subclass headrace.RewardShaping" * isinstance(batch, Tensor)
            raise BatchError(
                f"a stage must return a TensorDict with the column {ROW!r}, which identifies rows; it "
                f"returned {type(batch).__name__} without that column{rewards}"
            )
        places = column_of(batch, ROW).cpu() if len(batch) else slice(0)  # an empty lazy stack has no column
        numbers = table.of_this_rank(table.every)[places]
    if bool((numbers[1:] < numbers[:-1]).any()):
        raise BatchError(
            "a stage must keep the order of the rows: segments and permutations depend on it. The stage "
            f"returned rows {few(numbers)}. Sort the batch before the pipeline"
        )
    found, times = numbers.unique(return_counts=True)
    if len(found) < len(numbers):
        twice = listing(map(str, found[times > 1].tolist()))
        raise BatchError(f"a stage may drop rows but not repeat them; it repeated rows {twice}")
    # 2. Remove the rows that the stage did not return, on all ranks.
    every = table.ranks.gather_objects((numbers, describe_columns(batch) if len(batch) else None))
    stays = torch.cat([each for each, _ in every])
    known = next((columns for _, columns in every if columns is not None), None)
    if len(batch) == 0 and known is not None:  # the stage did not run on this rank
        batch = without_rows(known, device_of(batch))
    gone = torch.ones(table.size, dtype=torch.bool).index_fill_(0, stays, False)
    seen = rows.seen_by(stage, name)
    seen.leave(seen.from_arrival(gone), "gone")
    if len(stays):
        before, key = table.columns, rows.key("reward")
        reread(table, batch, numbers)
        if REWARD in before and key in before and key in table.columns:
            now, old = table.columns[key], before[key]
            if now.shape != old.shape or bool(((now != old) & ((now == now) | (old == old))).any()):
                raise BatchError(
                    f"a stage changes {key!r} after the rewards of the rollouts were made from it, so the "
                    f"change would have no effect. Change {REWARD!r}, as a RewardShaping does, or put the "
                    "stage before the collapse"
                )


def reread(table: Table, batch: TensorDictBase, numbers: Tensor) -> None:
    """Update a table from a batch. A user's code has made the batch from the result of :meth:`Table.write`.

    Values that did not change keep the precision of the table.

    Args:
        table: the table, changed in place.
        batch: TensorDict ``[B]``.
        numbers: (B,) int64, table index of each row, ascending.
    """
    before = dict(table.columns)
    table.batch, table.live = batch, numbers
    table.kept = table.fates.here
    table.columns = {}
    counts = [key for key in before if isinstance(key, TokenCount)]
    table.load([*(key for key in before if key not in counts), *OF_THE_TABLE], counts)
    rows = table.kept.nonzero().flatten()
    columns = table.columns
    said = [columns[key] | ~table.kept if key in columns else None for key in (IN_LOSS, COUNTED)]
    table.fates.came(*said)
    for key, old in before.items():
        new = columns.get(key)
        if new is None:
            if key not in counts and key not in table.written and not isinstance(key, Reduced):
                columns[key] = old  # a measured column, which no batch has
            continue
        if new.shape != old.shape or new.dtype != old.dtype:
            continue
        known = old.clone()
        now, rounded = new[rows], old[rows].to(table.dtypes[key]).to(old.dtype)
        same = (now == rounded) | ((now != now) & (rounded != rounded))
        known[rows] = torch.where(same, old[rows], now)
        columns[key] = known
    table.late.clear()
    table.written = {key: how for key, how in table.written.items() if key in columns}
    # The table has these columns. The batch only gets them when the table is written.
    of_table = [key for key in (*table.written, *OF_THE_TABLE) if column_of(batch, key) is not None]
    table.batch = leave_out(batch, of_table) if of_table and len(batch) else batch

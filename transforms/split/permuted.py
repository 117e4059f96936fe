"""A batch that a split has permuted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.table import Rows
from headrace.transforms.table.table import Late
from headrace.transforms.table.tensordicts import device_of, take_rows

from .gather import Columns, LossColumns, OptimiserSteps, Progress
from .plan import Plan


@dataclass
class Permuted:
    """The permutations of one batch and the plans made from them.

    Attributes:
        passes: one per epoch: ``minibatch``, ``microbatch`` and, with several ranks, ``rank`` of each row of
            the table; (N,) int64, −1: not trained.
        plans: one per epoch, of this rank's rows, in row numbers of the table.
        left: (N,) bool, rows that no pass trains; None: there are none.
    """

    rows: Rows
    split: Any
    passes: list[dict[str, Tensor]]
    plans: list[Plan]
    left: Tensor | None

    def leave(self) -> None:
        """Take out the rows that no pass trains."""
        left = None if self.left is None else self.rows.from_arrival(self.left)
        for reason, effect in self.split.reasons.items():
            applies = (reason == "carried") == (self.split.remainder == "carry")
            self.rows.leave(left if applies else None, reason, effect)

    def steps(
        self,
        passes: Sequence[tuple[Columns, Sequence[Late], TensorDictBase]],
        progress: Progress | None = None,
    ) -> OptimiserSteps:
        """Make the optimiser steps. They gather their rows one minibatch at a time.

        Args:
            passes: per epoch: the columns that stages wrote, by row of the table; the changes that stages
                make to gathered rows; and the batch.
            progress: counts the minibatches that are taken.

        Raises:
            BatchError: padding rows need a loss mask or log-probability column, and the batch has neither.
        """
        split, rank = self.split, self.split.rank if self.split.ranks > 1 else None
        loss_columns = LossColumns(split.loss_mask_key, split.log_prob_key, split.weight_key)
        pairs = zip(self.plans, passes, strict=True)
        planned = [(plan, columns, late, self._to_gather(batch)) for plan, (columns, late, batch) in pairs]
        return OptimiserSteps(self.rows.table, planned, rank, loss_columns, progress)

    def _to_gather(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch that minibatches are gathered from: a row of another rank, if this rank has only padding.

        All ranks call this together. The first rank that has rows sends one row to the ranks without rows.
        """
        table = self.rows.table
        ranks = table.ranks
        if not self.split.options.pads:
            return batch
        own = table.rows_of_ranks()
        if all(map(len, own)) or not any(map(len, own)):
            return batch
        lender, row = next(rank for rank, rows in enumerate(own) if len(rows)), None
        if ranks.rank == lender:
            at = table.batch_rows(own[lender][:1])
            row = take_rows(batch, at.to(device_of(batch)), on_cpu=at).cpu()
        row = ranks.send_object(row, lender)
        return batch if len(own[ranks.rank]) else row.to(device_of(batch))

"""The optimiser steps of a batch, gathered one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensordict import TensorDictBase

from headrace.transforms.errors import BatchError
from headrace.transforms.schema import MICROBATCH, MINIBATCH

from .gather import LossColumns, check_padding, gatherer
from .placed import Placed, joined
from .plan import Plan
from .progress import Progress
from .views import know_runs


class OptimiserSteps:
    """The minibatches of all passes over a batch.

    Args:
        passes: by epoch, the marked batch ``[N]``, the plan that it was marked by, and that where it lies.
        rank: whose part of each step; None: those of all ranks.
        columns: those that keep padding out of the loss.
        progress: counts what was taken, by the iterator that took last.

    Raises:
        BatchError: there is padding, and no column to keep it out of the loss.
    """

    def __init__(
        self,
        passes: Sequence[tuple[TensorDictBase, Plan, Placed]],
        rank: int | None,
        columns: LossColumns,
        progress: Progress,
    ):
        self.passes, self.rank, self.columns = list(passes), rank, columns
        self.progress, self.resumed_after = progress, progress.taken
        for batch, plan, _ in self.passes:
            if plan.is_padded:
                check_padding(batch, columns)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Gather one minibatch after the other, but those that were taken before an interruption.

        A minibatch counts as taken when it is handed out. A loop that is left by ``break`` or an exception
        leaves the batch in the middle: the two look the same from here.
        """
        taken, before = self.resumed_after, 0
        self.progress.taken, self.progress.begun, self.progress.done = taken, True, False
        self.progress.open += 1
        try:
            for batch, plan, placed in self.passes:
                passes = plan.passes(self.rank)
                gather = gatherer(batch, plan, placed, plan.spans(self.rank), self.columns)
                for number in range(taken - before, len(passes)):
                    taken += 1
                    self.progress.taken = taken
                    yield _knowing(gather(number), MICROBATCH, passes[number])
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
        batch, plan, placed = self.passes[0]
        passes = plan.passes(self.rank)
        if self.rank is not None:
            plan, placed = joined(plan, placed, plan.spans(self.rank))
        rows = gatherer(batch, plan, placed, [slice(0, len(plan.order))], self.columns)(0)
        return _knowing(rows, MINIBATCH, list(map(sum, passes)))


def _knowing(rows: TensorDictBase, key: tuple[str, str], sizes: list[int]) -> TensorDictBase:
    know_runs(rows, key, sizes)
    return rows

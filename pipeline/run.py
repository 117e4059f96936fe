"""Hold the result of a pipeline's run over one batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property
from importlib import import_module
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from headrace.faces import AnswersGuesses
from headrace.transforms.table import Rows
from headrace.transforms.table.fates import TRAINED
from headrace.transforms.table.table import Lacking
from headrace.transforms.table.tensordicts import fill_out_of_loss, shallow_copy

from .account_keys import Keys
from .ledger import Ledger

__all__ = ["LastRun", "Run"]

log = logging.getLogger(__name__)


class Run(AnswersGuesses):
    """The result of one batch. Later batches do not change it.

    Rows are gathered when you read them, from the memory of the input batch: do not change its columns in
    place before that. Ledger, metrics and report are views of the table.

    Attributes:
        rows: the table; None if the batch had no rows.
        stages: the pipeline's stages by name, in order.
        keys: the columns that the pipeline counts and reports.
        places: one mapping for each epoch, with ``minibatch``, ``microbatch``, ``rank`` and ``loss_weight``
            of each row of the table.
        step: number of the training step, for the report; 0 unless a trainer's adapter sets it.
    """

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        keys: Keys,
        rows: Rows | None,
        *,
        batch: TensorDictBase | None = None,
        steps: Any = None,
        epochs: int = 1,
        places: list[dict[str, Tensor]] | None = None,
        texts: Mapping[str, Any] | None = None,
    ) -> None:
        self.stages, self.keys, self.rows, self.places = stages, keys, rows, places or []
        self.texts, self.step = dict(texts or {}), 0
        self._batch, self._steps, self._epochs = batch, steps, epochs

    @cached_property
    def batch(self) -> TensorDictBase:
        """The rows that remain, in training order of the first epoch. Gathered at the first read.

        Raises:
            BatchError: the run resumes an interrupted batch, and some of its minibatches are trained already.
        """
        return self._steps.whole() if self._steps is not None else self.ungathered

    @property
    def has_batch(self) -> bool:
        """Whether rows can be gathered. A pipeline's ``last_run`` holds no rows."""
        return self.rows is None or self.rows.table.batch is not None

    @cached_property
    def ungathered(self) -> TensorDictBase:
        """The rows that remain before the split, with their row numbers in ``("headrace", "row")``.

        Raises:
            RuntimeError: this is a pipeline's ``last_run``, which holds no rows.
        """
        if self.rows is None:
            return cast(TensorDictBase, self._batch)
        if not self.has_batch:
            raise RuntimeError(
                "a pipeline's last_run holds no rows. To read them, keep the result of pipeline.run(batch)"
            )
        batch = self.rows.write()
        if self.rows.table.masking.kept_finite is not None:
            fill_out_of_loss(batch, *self.rows.table.masking.kept_finite)
        return batch

    def minibatches(self) -> Iterator[TensorDictBase]:
        """Gather the minibatches of all epochs, one at a time. Each call starts from the first.

        To have only one minibatch in memory, ``del minibatch`` at the end of the loop's body, as
        :func:`optimise` does. Without a split, the whole batch is the one minibatch of each epoch. If no row
        is left, there is no minibatch.
        """
        if self._steps is not None:
            return iter(self._steps)
        return (shallow_copy(self.ungathered) for _ in range(self._epochs if len(self.ungathered) else 0))

    @property
    def has_steps(self) -> bool:
        """Whether a split has cut the batch into minibatches."""
        return self._steps is not None

    def rows_of_steps(self) -> list[Tensor]:
        """For each optimiser step of this rank, the indices of its rows in the output of :meth:`of_rank`."""
        places = self.known_rows.table.row_numbers()
        return [places[rows] for rows in self._steps.rows()]

    def all_taken(self) -> None:
        """Mark all minibatches as taken, if the trainer has the rows already."""
        if self._steps is not None:
            self._steps.progress.done = True

    def without_batch(self) -> Run:
        """A copy without the batch."""
        if self.rows is None:
            return Run(self.stages, self.keys, None)
        table: Any = copy(self.rows.table)
        table.batch, table.late, table.lacking = None, [], Lacking(None)
        rows = Rows(table, self.rows.names)
        return Run(self.stages, self.keys, rows, places=self.places, texts=self.texts)

    # -- ledger, metrics and report -----------------------------------------------------------------------

    @property
    def known_rows(self) -> Rows:
        """The table.

        Raises:
            RuntimeError: the batch had no rows.
        """
        if self.rows is None:
            raise RuntimeError("the batch of this run had no rows, so there is no table")
        return self.rows

    def of_rank(self, values: Tensor) -> Tensor:
        """Select from (N, ...) values of the table the values of this rank's rows, carried rows included."""
        return self.known_rows.table.of_this_rank(values)

    @cached_property
    def ledger(self) -> Ledger:
        """The outcome of each row of this rank."""
        return self._ledger_of(self.of_rank)

    def _ledger_of(self, some: Callable[[Tensor], Tensor]) -> Ledger:
        """The outcome of `some` of the rows of the table."""
        if self.rows is None:
            none = torch.zeros(0, dtype=torch.int64)
            return Ledger(none, [TRAINED], [TRAINED], none.bool(), dict.fromkeys(self.keys.units, none), {})
        columns, fates = self.rows.table.columns, self.rows.table.fates
        ids = {unit: some(columns[key]) for unit, key in self.keys.units.items() if key in columns}
        labels = {unit: self.texts.get(f"{unit.removesuffix('s')}_label") for unit in ids}
        reason, left = some(fates.reason), some(~fates.here)
        return Ledger(reason, list(fates.names), list(fates.effects), left, ids, labels)

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of rows, rollouts and groups, and the metrics of the stages.

        ``rows/in``, ``rows/trained``, ``rollouts/…``, ``groups/…``, rows by reason
        (``out/<stage>/<reason>``), metrics of stages (``<stage>/<name>``), and seconds (``time/<stage>``). If
        ranks share a batch, all numbers except the seconds count the rows of all ranks, so they are equal on
        every rank. ``run.ledger.numbers()`` counts the rows of this rank.
        """
        if self.rows is None:
            return self.ledger.numbers()
        return self._ledger_of(lambda every: every).numbers() | self.rows.table.metrics

    @property
    def trained_at(self) -> dict[str, Tensor]:
        """(N,) `minibatch`, `microbatch`, `rank` and `loss_weight` of the last epoch that trains each row."""
        found: dict[str, Tensor] = {}
        for place in self.places:
            trains = place["minibatch"] >= 0
            for name, values in place.items():
                before = found.get(name)
                found[name] = values if before is None else torch.where(trains, values, before)
        return found

    def report(
        self,
        *,
        step: int | None = None,
        console: Any = None,
        solved: float = 1.0,
        batch: TensorDictBase | None = None,
        decode: Callable[[list[int]], list[str]] | None = None,
    ) -> Any:
        """Print a funnel and a table of groups, and return the report (:func:`make_report`).

        Args:
            step: number of the training step. None: the run's own number.
            console: where to print. None: standard output, as plain text unless it is a terminal.
            solved: least reward of a solved rollout.
            batch: the input batch, from which the cost of its rows as prefix trees is computed. None: not
                computed.
            decode: function from a list of token ids to one string for each id. None: no texts of tokens.
        """
        options = {"step": step, "console": console, "solved": solved, "batch": batch, "decode": decode}
        return import_module("headrace.pipeline.tools.report").print_report(self, **options)

    def __repr__(self) -> str:
        return f"Run({self.ledger})"

    def _repr_html_(self) -> str:
        return self.ledger._repr_html_()


# -- the last run of a pipeline --------------------------------------------------------------------------


class LastRun:
    """Views of the last run of the calling thread or, if that thread has run no batch, of any thread.

    A copy has its own runs, and raises RuntimeError before its first batch. The original does not see the
    runs of a copy. For example, MultiAsyncCollector copies its `postproc` into worker processes.
    """

    def __init__(self) -> None:
        self._last = _PerThread()

    @property
    def last_run(self) -> Run | None:
        """The run of the last batch; None before the first batch, and after a refused batch.

        The run holds no rows.
        """
        return self._last.run

    @property
    def ledger(self) -> Ledger | None:
        """The outcome of each row of the last batch; None if there is no last run."""
        return None if self.last_run is None else self.last_run.ledger

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch (:attr:`Run.metrics`); empty before the first batch."""
        return {} if self.last_run is None else self.last_run.metrics

    def report(self, **options: Any) -> Any:
        """Print a funnel and a table of groups of the last batch, and return its report (:meth:`Run.report`).

        Raises:
            RuntimeError: there is no last run: no batch was run yet, or the last batch was refused.
        """
        return import_module("headrace.pipeline.tools.report").print_report(self, **options)


class _PerThread:
    """The last run of the calling thread, or of any thread if the calling thread has run none."""

    def __init__(self, *, copied: bool = False) -> None:
        self._of_thread = threading.local()
        self._of_any: Run | None = None
        self._copied = copied  # True until the first run of a copy

    @property
    def run(self) -> Run | None:
        """The last run; None before the first batch, and after a refused batch.

        Raises:
            RuntimeError: this is a copy that has run no batch.
        """
        if self._copied:
            raise RuntimeError(
                "this pipeline is a copy that has run no batch. Ledger and metrics belong to the object that "
                "ran the batch: the original, or a copy in a worker process. Read them there, or run this "
                "copy: pipeline.run(batch)"
            )
        return getattr(self._of_thread, "run", self._of_any)

    @run.setter
    def run(self, run: Run | None) -> None:
        self._of_thread.run = self._of_any = run
        self._copied = False

    def __reduce__(self) -> tuple[Callable[[], _PerThread], tuple[()]]:
        return _copied, ()


def _copied() -> _PerThread:
    """The state of a new copy of a pipeline."""
    log.debug("a pipeline was copied: the copy does not see the runs of the original")
    return _PerThread(copied=True)

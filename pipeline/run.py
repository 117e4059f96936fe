"""What a pipeline made of one batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property
from typing import Any, cast

import torch
from rich.console import Console
from tensordict import TensorDictBase
from torch import Tensor, nn

from headrace.transforms.rows import Rows
from headrace.transforms.tensordicts import fill_out_of_loss, shallow_copy

from .account_keys import Keys
from .ledger import Ledger
from .report import StepReport, print_report
from .report.texts import Decode

log = logging.getLogger(__name__)


class Run:
    """The result of one batch. Later batches do not change it.

    Rows are gathered when they are asked for, and metrics of tokens computed when they are read, out of the
    memory of the batch that came in: leave that as it is until then. Ledger, metrics and report are views of
    the table.

    Attributes:
        rows: the table; None where the batch had no rows.
        stages: of the pipeline, by name, in order.
        keys: where the pipeline finds what it accounts for.
        places: by epoch, the columns that say where each row of the table is trained, by name.
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
        self.texts = dict(texts or {})
        self._batch, self._steps, self._epochs = batch, steps, epochs

    @cached_property
    def batch(self) -> TensorDictBase:
        """The rows that stay, in training order; with several epochs, that of the first. Gathered when asked.

        Raises:
            BatchError: some minibatches were taken before an interruption, and the others are to be.
        """
        return self._steps.whole() if self._steps is not None else self.ungathered

    @property
    def has_batch(self) -> bool:
        """Whether there are rows to gather; a pipeline's ``last_run`` has let go of them."""
        return self.rows is None or self.rows.table.batch is not None

    @cached_property
    def ungathered(self) -> TensorDictBase:
        """The rows that stay, as they came to the cut, with their numbers under ``("headrace", "row")``.

        Raises:
            RuntimeError: this is the account of a pipeline's last run, which holds no rows.
        """
        if self.rows is None:
            return cast(TensorDictBase, self._batch)
        if not self.has_batch:
            raise RuntimeError(
                "the account of a pipeline's last run holds no rows: keep run = pipeline.run(batch)"
            )
        batch = self.rows.write()
        if self.rows.table.finite is not None:
            fill_out_of_loss(batch, *self.rows.table.finite)
        return batch

    def minibatches(self) -> Iterator[TensorDictBase]:
        """Gather the minibatches of all epochs, one at a time. Each call begins anew.

        A loop that lets go of a minibatch before it asks for the next (``del minibatch``), as
        :func:`optimise` does, has one in memory at a time. Where nothing cuts the batch, the whole of it is
        the one minibatch of each epoch; where nothing is left, there is none.
        """
        if self._steps is not None:
            return iter(self._steps)
        return (shallow_copy(self.ungathered) for _ in range(self._epochs if len(self.ungathered) else 0))

    @property
    def has_steps(self) -> bool:
        """Whether a split has cut the batch."""
        return self._steps is not None

    def rows_of_steps(self) -> list[Tensor]:
        """Of each optimiser step of this rank the places of its rows in :meth:`of_rank`, in order."""
        places = self.known_rows.table.row_numbers()
        return [places[rows] for rows in self._steps.rows()]

    def all_taken(self) -> None:
        """Count all minibatches as taken: who trains them has the rows, and takes none from here."""
        if self._steps is not None:
            self._steps.progress.done = True

    def without_batch(self) -> Run:
        """The same account, which holds no column of the batch but those of metrics that nobody has read."""
        if self.rows is None:
            return Run(self.stages, self.keys, None)
        table: Any = copy(self.rows.table)
        table.batch, table.late, table.looked_up = None, [], None
        rows = Rows(table, self.rows.names)
        return Run(self.stages, self.keys, rows, places=self.places, texts=self.texts)

    # -- the account ------------------------------------------------------------------------------------

    @property
    def known_rows(self) -> Rows:
        """The table.

        Raises:
            RuntimeError: the batch had no rows.
        """
        if self.rows is None:
            raise RuntimeError("the batch of this run had no rows, of which nothing is known")
        return self.rows

    def of_rank(self, values: Tensor) -> Tensor:
        """Of (N, ...) values of the table those of this rank's rows, and of those carried to it."""
        table = self.known_rows.table
        if table.ranks is None:
            return values
        return values[table.numbers_of_rank]

    @cached_property
    def ledger(self) -> Ledger | None:
        """Where each row went; None where the batch had no rows."""
        if self.rows is None:
            return None
        table = self.rows.table
        ids = {
            unit: self.of_rank(table.columns[key])
            for unit, key in self.keys.units.items()
            if key in table.columns
        }
        labels = {unit: self.texts.get(f"{unit.removesuffix('s')}_label") for unit in ids}
        return Ledger(
            self.of_rank(table.reason), self.of_rank(~table.here), table.names, table.effects, ids, labels
        )

    @property
    def metrics(self) -> dict[str, float]:
        """What came in, what is trained, what left where and why, and what stages measured.

        ``rows/in``, ``rows/trained``, ``rollouts/…``, ``groups/…``, ``out/<stage>/<reason>``,
        ``<stage>/<name>``, and ``time/<stage>`` in seconds. What takes another pass over the tokens, as the
        numbers of a correction do, is computed when this is read first.

        Raises:
            RuntimeError: columns of tokens that are still to be read were changed in place.
        """
        if self.rows is None or self.ledger is None:
            return {}
        return self.ledger.numbers() | self.rows.table.read_metrics()

    @property
    def trained_at(self) -> dict[str, Tensor]:
        """(N,) `minibatch`, `microbatch`, `rank` and `loss_weight` of the last pass that trained each row."""
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
        step: int = 0,
        console: Console | None = None,
        solved: float = 1.0,
        batch: TensorDictBase | None = None,
        decode: Decode | None = None,
    ) -> StepReport:
        """Print a funnel and a table of groups, and return the report (:func:`make_report`).

        Args:
            step: its number.
            console: where to print; None: standard output, as wide as it is, plain where it is no terminal.
            solved: least reward of a solved rollout.
            batch: what came in, to say what its rows would cost as trees; None: not looked at.
            decode: from token ids to as many strings, for texts out of tokens; None: not known.
        """
        return print_report(self, step=step, console=console, solved=solved, batch=batch, decode=decode)

    def __repr__(self) -> str:
        return f"Run({self.ledger})"

    def _repr_html_(self) -> str:
        return "<p>Run of a batch without rows</p>" if self.ledger is None else self.ledger._repr_html_()


class LastRun:
    """Views of the last run: of the calling thread's, or where it has had none, of any thread's.

    A copy has runs of its own, and asked before its first batch it is an error: collectors that copy a
    pipeline, such as MultiAsyncCollector its `postproc`, or workers, leave the original without one.
    """

    def __init__(self) -> None:
        self._last = _PerThread()

    @property
    def last_run(self) -> Run | None:
        """What is known of the last batch; None before the first, and after one that a stage refused.

        It holds no rows, but for the columns of tokens whose metrics nobody has read, until the next batch.
        """
        return self._last.run

    @property
    def ledger(self) -> Ledger | None:
        """Where each row of the last batch went; None where there was none."""
        return None if self.last_run is None else self.last_run.ledger

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the last batch (:attr:`Run.metrics`); empty before the first."""
        return {} if self.last_run is None else self.last_run.metrics

    def report(self, **options: Any) -> StepReport:
        """Print a funnel and a table of groups of the last batch, and return its report (:meth:`Run.report`).

        Raises:
            RuntimeError: there was no batch, or a stage refused it.
        """
        return print_report(cast(Any, self), **options)


class _PerThread:
    """The last run of the thread that asks, or where that has run none, of any thread."""

    def __init__(self, *, copied: bool = False) -> None:
        self._of_thread = threading.local()
        self._of_any: Run | None = None
        self._copied = copied  # and nothing has run since

    @property
    def run(self) -> Run | None:
        """None before the first batch, and after one that was refused.

        Raises:
            RuntimeError: before the first batch of a copy.
        """
        if self._copied:
            raise RuntimeError(
                "this pipeline is a copy that has run no batch itself: who has run elsewhere, the original "
                "or a copy in a worker process, has the account. Ask that one, or a run: pipeline.run(batch)"
            )
        return getattr(self._of_thread, "run", self._of_any)

    @run.setter
    def run(self, run: Run | None) -> None:
        self._of_thread.run = self._of_any = run
        self._copied = False

    def __reduce__(self) -> tuple[Callable[[], _PerThread], tuple[()]]:
        return _copied, ()


def _copied() -> _PerThread:
    """What a copy of a pipeline begins with."""
    log.debug("a copy of a pipeline is made here: its accounts are its own, and not the original's")
    return _PerThread(copied=True)

"""What a pipeline made of one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from rich.console import Console
from tensordict import TensorDictBase

from headrace.transforms.checks import Rule
from headrace.transforms.rows import shallow_copy
from headrace.transforms.split.steps import OptimiserSteps

from .accounting.account import Account
from .accounting.ledger import Ledger
from .report import StepReport, print_report
from .report.texts import Decode


class Run:
    """The result of one batch. Later batches do not change it.

    Rows are gathered when they are asked for, out of the memory of the batch that came in: leave that as it
    is until then.

    Attributes:
        account: where each row went and what was measured; it holds no column of the batch.
        rules: always empty: the pipeline has read those of its stages.
    """

    rules: Sequence[Rule] = ()

    def __init__(
        self, account: Account, done: TensorDictBase, steps: OptimiserSteps | None, epochs: int
    ) -> None:
        self.account = account
        self._done, self._steps, self._epochs = done, steps, epochs

    @cached_property
    def batch(self) -> TensorDictBase:
        """The rows that stay, in training order; with several epochs, that of the first. Gathered when asked.

        Raises:
            BatchError: some minibatches were taken before an interruption, and the others are to be.
        """
        return self._done if self._steps is None else self._steps.whole()

    @property
    def ungathered(self) -> TensorDictBase:
        """The rows that stay, as they came to the cut, with their numbers under ``("headrace", "row")``."""
        return self._done

    def minibatches(self) -> Iterator[TensorDictBase]:
        """Gather the minibatches of all epochs, one at a time. Each call begins anew.

        A loop that lets go of a minibatch before it asks for the next (``del minibatch``), as
        :func:`optimise` does, has one in memory at a time. Where nothing cuts the batch, the whole of it is
        the one minibatch of each epoch; where nothing is left, there is none.
        """
        if self._steps is not None:
            return iter(self._steps)
        return (shallow_copy(self._done) for _ in range(self._epochs if len(self._done) else 0))

    @property
    def ledger(self) -> Ledger | None:
        """Where each row went; None where the batch had no rows."""
        return self.account.ledger

    @property
    def metrics(self) -> dict[str, float]:
        """What came in, what is trained, what left where and why, and what stages measured.

        ``rows/in``, ``rows/trained``, ``rollouts/…``, ``groups/…``, ``out/<stage>/<reason>``,
        ``<stage>/<name>``, and ``time/<stage>`` in seconds. A few device reads.
        """
        return self.account.metrics

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

"""What the last run of the calling thread said, as a pipeline shows it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rich.console import Console
from tensordict import TensorDictBase

from headrace.pipeline.report import StepReport, print_report
from headrace.pipeline.report.texts import Decode

from .account import Account
from .ledger import Ledger

log = logging.getLogger(__name__)


class LastAccount:
    """The account of the last batch: of the thread that asks, or where that has run none, of any thread.

    A copy, in a worker process say, begins without one, and says so.
    """

    def __init__(self, *, copied: bool = False) -> None:
        self._of_thread = threading.local()
        self._of_any: Account | None = None
        self._copied = copied  # and nothing has run since

    @property
    def account(self) -> Account | None:
        """None before the first batch, and after one that was refused.

        Raises:
            RuntimeError: before the first batch of a copy.
        """
        if self._copied:
            raise RuntimeError(
                "this pipeline is a copy that has run no batch itself: who has run elsewhere, the original "
                "or a copy in a worker process, has the account. Ask that one, or a run: pipeline.run(batch)"
            )
        return getattr(self._of_thread, "account", self._of_any)

    @account.setter
    def account(self, account: Account | None) -> None:
        self._of_thread.account = self._of_any = account
        self._copied = False

    def __reduce__(self) -> tuple[Callable[[], LastAccount], tuple[()]]:
        return copied_account, ()


def copied_account() -> LastAccount:
    """What a copy of a pipeline begins with."""
    log.debug("a copy of a pipeline is made here: its accounts are its own, and not the original's")
    return LastAccount(copied=True)


class LastRun:
    """Views of the last run: of the calling thread's, or where it has had none, of any thread's.

    A copy has accounts of its own, and asked before its first batch it is an error: collectors that copy a
    pipeline, such as MultiAsyncCollector its `postproc`, or workers, leave the original without one.
    """

    def __init__(self) -> None:
        self._last = LastAccount()

    @property
    def account(self) -> Account | None:
        """What is known of the last batch; None before the first, and after one that a stage refused."""
        return self._last.account

    @property
    def ledger(self) -> Ledger | None:
        """Where each row of the last batch went; None where there was none."""
        return None if self.account is None else self.account.ledger

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the last batch (:attr:`Run.metrics`); empty before the first. A few device reads."""
        return {} if self.account is None else self.account.metrics

    def report(
        self,
        *,
        step: int = 0,
        console: Console | None = None,
        solved: float = 1.0,
        batch: TensorDictBase | None = None,
        decode: Decode | None = None,
    ) -> StepReport:
        """Print a funnel and a table of groups for the last batch, and return its report.

        Args:
            step: its number.
            console: where to print; None: standard output, as wide as it is, plain where it is no terminal.
            solved: least reward of a solved rollout.
            batch: what came in, to say what its rows would cost as trees; None: not looked at.
            decode: from token ids to as many strings, for texts out of tokens; None: not known.

        Raises:
            RuntimeError: there was no batch, or a stage refused it.
        """
        return print_report(self, step=step, console=console, solved=solved, batch=batch, decode=decode)

"""Assemble batches of whole groups from a source of rows."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty
from typing import Any, Literal

from tensordict import TensorDict, TensorDictBase

from headrace.spelling import suggest
from headrace.transforms import BatchError, GroupAssembler, StalledError
from headrace.transforms.table import count_of, listing
from headrace.transforms.table.options import above_zero, takes_options

from .bounded_calls import BoundedCalls
from .reading import END, Reader, in_step, reads_ahead
from .workers import WorkerWatch

POLL = 0.05  # seconds between two checks of a condition
LOOK = 0.5  # seconds between two checks for silent workers

Leftovers = Literal["yield", "drop", "raise"]
Source = Iterable["TensorDictBase | None"]


@takes_options
def assembled(
    source: Source,
    assembler: GroupAssembler,
    *,
    patience: float | None = None,
    worker_patience: float | None = None,
    leftovers: Leftovers = "yield",
) -> Assembled:
    """Iterate over batches of whole groups, assembled from the rows of a source.

    Other methods and attributes are those of the source: ``assembled(collector, …).update_policy_weights_()``
    calls the collector. ``state_dict`` holds the state of the assembler and of the source. If the source
    raises, the error gets a note that lists the waiting groups.

    When weights are updated, TorchRL waits without a limit for the answer of each worker. Here the wait ends
    when a worker has died, and at the latest after `worker_patience`. This also holds for the other calls
    that workers answer, such as ``state_dict``. If a MultiSyncCollector or MultiAsyncCollector is the source,
    its own methods have these limits, too, and its workers are ended when Python ends.

    Args:
        source: a collector, or another iterable of batches of rows. It may yield None while it has no rows.
        assembler: makes groups of the rows.
        patience: seconds after which a source without rows raises :class:`StalledError`. A thread then reads
            the source, one batch at a time and only on demand. None: wait forever; each None of the source
            then counts as a put without rows, for `max_idle`. A MultiAsyncCollector is always read in a
            thread, so that no batch is lost (:class:`Reader`).
        worker_patience: seconds after which a worker without rows raises, while another worker sends rows
            repeatedly. The rows need the stamp of :class:`StampIds`, which names their worker. None: ten
            times the worker's longest pause so far, and at least `patience`. A batch of a MultiSyncCollector
            has rows of each worker, so this is also the limit for the batch. It is also the limit for the
            answer of a worker to a call. For an answer, None means `patience`, or 600 s if that is None, too:
            an update of a large model can take minutes, and NCCL waits as long.
        leftovers: what to do with whole groups that are too few for a batch when the source ends: ``yield``
            them, ``drop`` them, or ``raise``. Dropped rows and rows of incomplete groups are counted as
            ``unfinished``.

    Raises:
        StalledError: while iterating: the source ended without a batch; the source or a worker was silent for
            too long; or :meth:`GroupAssembler.put` raised. In a call: a worker has not answered.
        RuntimeError: while iterating, or in a call: a worker process has died.
        BatchError: while iterating: :meth:`GroupAssembler.put` raised; or groups are left over, with
            ``raise``.
        ValueError: an option has an invalid value.

    Example:
        >>> rows = TensorDict(
        ...     {"group_id": [0, 1, 0], "rollout_id": [0, 2, 1], ("next", "done"): [True] * 3}, batch_size=[3]
        ... )
        >>> assembler = GroupAssembler(group_size=2)
        >>> [batch["rollout_id"].tolist() for batch in assembled(rows.split(1), assembler)]
        [[0, 1]]
        >>> assembler.counts["unfinished"]
        1
    """
    check_patience(patience, worker_patience)
    return Assembled(source, assembler, patience, leftovers, worker_patience)


@takes_options
def check_patience(patience: float | None, worker_patience: float | None = None) -> float | None:
    """Check both limits and return `patience`.

    Raises:
        ValueError: a value is not finite or not > 0.
    """
    above_zero("worker_patience", worker_patience)
    return above_zero("patience", patience)


def wait_until(condition: Callable[..., bool], patience: float | None, *arguments: Any) -> bool:
    """Wait until the condition is True for the arguments. Returns False after `patience` seconds."""
    asked = time.monotonic()
    while not condition(*arguments):
        if patience is not None and time.monotonic() - asked >= patience:
            return False
        time.sleep(POLL)
    return True


def wait_for(ask: Callable[[], Any], over: Callable[[], bool], patience: float | None) -> Any:
    """Ask until there is an answer. Returns None if the data has ended, or after `patience` seconds."""
    found: list[Any] = []

    def may_go_on() -> bool:
        found[:] = [ask()]
        return found[0] is not None or over()

    wait_until(may_go_on, patience)
    return found[0]


def rest_of(assembler: Any, leftovers: Leftovers) -> Iterator[TensorDictBase]:
    """Yield the leftover groups after the source has ended (`leftovers` of :func:`assembled`)."""
    ready = assembler.ready
    if ready and leftovers == "raise":
        raise BatchError(
            f"the source has ended with {count_of(ready, 'whole group')} left over, fewer than the "
            f"{assembler.groups} of a batch: set leftovers='yield' or 'drop'"
        )
    while leftovers == "yield" and (batch := assembler.take_rest()) is not None:
        yield batch
    if leftovers == "yield" and (ahead := assembler.ready):
        raise assembler.stalled(
            f"The source has ended with {count_of(ahead, 'whole group')} of policy versions newer than "
            f"assembler.version={assembler.version}: set assembler.version where the policy is updated"
        )
    if assembler.emitted == 0:
        raise assembler.stalled("The source has ended, and no group became whole")
    assembler.discard_batch()


def needs_reset(source: Any) -> bool:
    """Whether to reset a collector whose state was loaded; always True with worker processes."""
    if not hasattr(source, "reset"):
        return False
    chain = getattr(getattr(source, "env", None), "transform", None)
    every = getattr(chain, "transforms", [chain])  # of a Compose
    return hasattr(source, "num_workers") or any(getattr(each, "needs_reset", False) for each in every)


class OverSource:
    """Base of iterators over a source. Other attributes are those of the source: weights, shutdown, …"""

    source: Any

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """The state of this iterator, without the state of the source."""

    @abstractmethod
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of :meth:`own_state`."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this iterator, and the state of the source if it has one.

        Raises:
            TypeError: the source is a MultiAsyncCollector.
        """
        if reads_ahead(self.source):
            raise TypeError(
                "MultiAsyncCollector.state_dict() drops the rows that its workers are collecting: save only "
                "stream.own_state() or assembler.state_dict(). After a restart the rollouts in progress are "
                "lost: set the timeout of the assembler, which closes their groups"
            )
        own, has_state = self.own_state(), hasattr(self.source, "state_dict")
        return own | ({"source": self._of_source("state_dict")()} if has_state else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: the state has other options; or the state has a source state and this source takes
                none, or the reverse.
        """
        has_state = hasattr(self.source, "load_state_dict")
        if has_state != ("source" in state):
            raise ValueError(
                f"the state {'has' if 'source' in state else 'lacks'} a source state, and this source "
                f"{'needs' if has_state else 'takes'} {'one' if has_state else 'none'}"
            )
        self.load_own_state(state)
        if has_state:
            self._of_source("load_state_dict")(state["source"])
            if needs_reset(self.source):
                self._of_source("reset")()

    def _of_source(self, name: str) -> Any:
        """An attribute of the source."""
        return getattr(self.source, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":  # private, or not set yet
            raise AttributeError(name)
        try:
            return self._of_source(name)
        except AttributeError as err:  # which may also come from inside a property of the source
            meant = suggest(name, dir(self))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{meant}") from err


@dataclass(eq=False, repr=False)
class Assembled(OverSource):
    """The iterator that :func:`assembled` returns."""

    source: Source
    assembler: GroupAssembler
    patience: float | None
    leftovers: Leftovers
    worker_patience: float | None

    def __post_init__(self) -> None:
        workers = getattr(self.source, "num_workers", 0)
        self._watch = WorkerWatch(self.patience, self.worker_patience, workers)
        patience = self.patience if self.worker_patience is None else self.worker_patience
        self._calls = BoundedCalls(self.source, self.assembler, self._watch, patience)
        given = [each for each in (self.patience, self.worker_patience) if each is not None]
        # A collector whose batches have rows of all workers is silent as long as one worker is.
        self._silence = min(given, default=None) if in_step(self.source) else self.patience
        self._reader: Reader | None = None

    def __iter__(self) -> Iterator[TensorDictBase]:
        pieces = self._pieces()
        self._watch.begin()
        while True:
            # Take whole groups before reading more, so that a restored state continues at the same batch.
            while (batch := self.assembler.take()) is not None:
                yield batch
            piece = self._next(pieces)
            if piece is END:
                break
            if piece is None and self._silence is not None:
                continue
            # Count None as a put, so that max_idle ends a source that yields None forever.
            self.assembler.put(TensorDict({}, batch_size=[0]) if piece is None else piece)
            if piece is not None:
                self._watch.saw(piece, self.assembler)
        yield from rest_of(self.assembler, self.leftovers)

    def _next(self, pieces: Iterator[TensorDictBase | None]) -> Any:
        try:
            return next(pieces, END)
        except StalledError:
            raise
        except Exception as error:
            if (named := self._calls.named(error)) is not error:
                raise named from error
            self._calls.noted(error)
            raise

    def _pieces(self) -> Iterator[TensorDictBase | None]:
        """Yield the batches of the source, or None for each None that it yields.

        Raises:
            StalledError: the source or a worker was silent for too long.
        """
        if self._silence is None and not reads_ahead(self.source):
            for piece in self.source:
                yield piece
                self._watch.check(self.assembler)
            return
        if self._reader is None or self._reader.is_over:
            self._reader = Reader(self.source)
            weakref.finalize(self, self._reader.close)
        reader, left = self._reader, self._silence
        while left is None or left > 0:
            # Check also while batches are queued. At most one batch per worker is queued, so no worker seems
            # silent by mistake.
            self._watch.check(self.assembler)
            asked = time.monotonic()
            try:
                piece = reader.get(LOOK if left is None else min(LOOK, left))
            except Empty:
                piece = _NOTHING
            # Count only the time spent waiting, not the time the caller spends on a batch.
            waited = time.monotonic() - asked
            if piece is END:
                return
            silent = piece is None or piece is _NOTHING
            left = self._silence if not silent or left is None else left - waited
            if piece is not _NOTHING:
                yield piece
        waiting = self._calls.workers.without_rows()
        who = f": no rows of {listing([f'worker {worker}' for worker in waiting])}" if waiting else ""
        raise self.assembler.stalled(
            f"The source has been silent for {self._silence:g} s{who}.{self._calls.workers.hint}",
            worker=self._watch.numbered(waiting),
        )

    def _of_source(self, name: str) -> Any:
        return self._calls.bounded(name, getattr(self.source, name))

    def own_state(self) -> dict[str, Any]:
        """The state of the assembler."""
        return {"assembler": self.assembler.state_dict()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the assembler."""
        self.assembler.load_state_dict(state["assembler"])


_NOTHING = object()  # no batch arrived in time

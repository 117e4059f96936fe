"""Batches of whole groups from a source that yields rows as they come."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from queue import Empty
from signal import SIGTERM
from typing import Any, Literal, Protocol, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.collectors import MultiAsyncCollector

from headrace.transforms import BatchError, GroupAssembler, StalledError
from headrace.transforms.errors import listing
from headrace.transforms.options import above_zero, one_of, takes_options

from .reading import END, Reader
from .workers import WorkerWatch

POLL = 0.05  # seconds between two looks at what is waited for
LOOK = 0.5  # seconds between two looks at workers that are silent

Leftovers = Literal["yield", "drop", "raise"]
Source = Iterable["TensorDictBase | None"]


def assembled(
    source: Source,
    assembler: GroupAssembler,
    *,
    patience: float | None = None,
    worker_patience: float | None = None,
    leftovers: Leftovers = "yield",
) -> Assembled:
    """Iterate over batches of whole groups, made of what a source yields.

    What is not iteration goes to the source: ``assembled(collector, …).update_policy_weights_()`` is the
    collector's. ``state_dict`` has the state of both. An error of the source gets a note that says which
    groups wait.

    Args:
        source: a collector, or what else yields batches of rows, or None while there are none.
        assembler: which makes groups of them.
        patience: seconds for which the source may be silent, or yield None. It is then read in a thread, one
            batch at a time and only when it is asked for. None: without end, and a None that the source
            yields is a put of no rows, of which `max_idle` is too many. A MultiAsyncCollector is always read
            in a thread, so that it loses no batch (:class:`Reader`).
        worker_patience: seconds for which one worker may be silent while another one sends rows again and
            again; :class:`StampIds` says which worker a row is of. None: ten times its longest pause so far,
            and at least `patience`, where that is given.
        leftovers: where the source ends, and whole groups are there that are fewer than a batch: ``yield``
            them, ``drop`` them or ``raise``. Rows of groups that are not whole are counted as ``unfinished``,
            and those that are dropped with them.

    Raises:
        StalledError: when iterated: the source ended and nothing has come out; it or one of its workers was
            silent for too long; as :meth:`GroupAssembler.put`.
        BatchError: when iterated: as :meth:`GroupAssembler.put`; groups are left over, under ``raise``.
        ValueError: an option with a wrong value.

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
    one_of("leftovers", leftovers, get_args(Leftovers))
    check_patience(patience, worker_patience)
    return Assembled(source, assembler, patience, leftovers, worker_patience)


@takes_options
def check_patience(patience: float | None, worker_patience: float | None = None) -> float | None:
    """Seconds for which to wait, or None.

    Raises:
        ValueError: one of them is not finite and > 0.
    """
    above_zero("worker_patience", worker_patience)
    return above_zero("patience", patience)


def wait_until(condition: Callable[..., bool], patience: float | None, *arguments: Any) -> bool:
    """Wait until something holds of the arguments, and return True; False: it did not for so many seconds."""
    asked = time.monotonic()
    while not condition(*arguments):
        if patience is not None and time.monotonic() - asked >= patience:
            return False
        time.sleep(POLL)
    return True


def rest_of(assembler: Any, leftovers: Leftovers) -> Iterator[TensorDictBase]:
    """What is left in an assembler to which nothing more comes (:func:`assembled`)."""
    ready = assembler.ready
    if ready and leftovers == "raise":
        raise BatchError(
            f"the source has ended, and {ready} whole groups are left over, fewer than the "
            f"{assembler.groups} of a batch: set leftovers='yield' or 'drop'"
        )
    while leftovers == "yield" and (batch := assembler.take_rest()) is not None:
        yield batch
    if leftovers == "yield" and (ahead := assembler.ready):
        raise assembler.stalled(
            f"The source has ended, and {ahead} whole groups are of policy versions newer than "
            f"{assembler.version}, the assembler's: set assembler.version where the policy is updated"
        )
    if assembler.emitted == 0:
        raise assembler.stalled("The source has ended, and nothing has come out")
    assembler.discard_batch()


class OverSource:
    """Makes batches of those of a source. What is not iteration is the source's: weights, shutdown, …"""

    def __init__(self, source: Any):
        self.source = source

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """The state of all but the source, under names of its own."""

    @abstractmethod
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`own_state`."""

    def state_dict(self) -> dict[str, Any]:
        """Its own state, and that of the source where it has one.

        Raises:
            TypeError: the source is a MultiAsyncCollector.
        """
        if isinstance(self.source, MultiAsyncCollector):
            raise TypeError(
                "a MultiAsyncCollector that is asked for its state throws away the rows that its workers are "
                "collecting: save what is over it alone, stream.own_state(), or that of the assembler, "
                "assembler.state_dict(). Rollouts under way end with their workers: set the assembler's "
                "timeout, which lets go of their groups"
            )
        own = self.own_state()
        return own | ({"source": self.source.state_dict()} if hasattr(self.source, "state_dict") else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of one with other options; one source has a state and the other has none.
        """
        has_state = hasattr(self.source, "load_state_dict")
        if has_state != ("source" in state):
            raise ValueError(
                f"the state {'has' if 'source' in state else 'lacks'} that of a source, and this source "
                f"{'takes' if has_state else 'takes no'} state"
            )
        self.load_own_state(state)
        if has_state:
            self.source.load_state_dict(state["source"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # while it is copied it has none
            raise AttributeError(name)
        return getattr(self.source, name)


class Assembled(OverSource):
    """What :func:`assembled` returns."""

    def __init__(
        self,
        source: Source,
        assembler: GroupAssembler,
        patience: float | None,
        leftovers: Leftovers,
        worker_patience: float | None,
    ):
        super().__init__(source)
        self.assembler = assembler
        self.patience, self.leftovers = patience, leftovers
        self._watch = WorkerWatch(patience, worker_patience, getattr(source, "num_workers", 0))
        self._reader: Reader | None = None

    def __iter__(self) -> Iterator[TensorDictBase]:
        pieces = self._pieces()
        self._watch.begin()
        while True:
            # What is whole goes out before more is read: so a restored state begins where it was.
            while (batch := self.assembler.take()) is not None:
                yield batch
            piece = self._next(pieces)
            if piece is END:
                break
            if piece is None and self.patience is not None:
                continue
            # None is a put too: a source that yields it for ever is noticed.
            self.assembler.put(TensorDict({}, batch_size=[0]) if piece is None else piece)
            if piece is not None:
                self._watch.saw(piece, self.assembler)
        yield from rest_of(self.assembler, self.leftovers)

    def _next(self, pieces: Iterator[TensorDictBase | None]) -> Any:
        try:
            return next(pieces, END)
        except StalledError:
            raise
        except Exception as error:  # of the source, with what waits for it
            err, ended = error, ended_workers(self.source)
            if ended and isinstance(error, ValueError):  # TorchRL closes the others too soon, and says that
                err = RuntimeError(f"At least one process failed: {listing(ended)}")
            if hasattr(err, "add_note"):  # Python 3.11
                words = f"The source has failed.{where_errors_are(self.source)}"
                err.add_note(str(self.assembler.stalled(words)))
            if err is error:
                raise
            raise err from error

    def _pieces(self) -> Iterator[TensorDictBase | None]:
        """What the source yields.

        Raises:
            StalledError: it was silent for `patience` seconds, or one of its workers for too long.
        """
        if self.patience is None and not isinstance(self.source, MultiAsyncCollector):
            for piece in self.source:
                yield piece
                self._watch.check(self.assembler)
            return
        if self._reader is None or self._reader.is_over:
            self._reader = Reader(self.source)
            weakref.finalize(self, self._reader.close)
        reader, left = self._reader, self.patience
        while left is None or left > 0:
            # Also while batches wait: one of each worker does at most, so others come thrice only behind it.
            self._watch.check(self.assembler)
            asked = time.monotonic()
            try:
                piece = reader.get(LOOK if left is None else min(LOOK, left))
            except Empty:
                piece = _NOTHING
            # Only the wait counts, not what is done with a batch in between.
            waited = time.monotonic() - asked
            if piece is END:
                return
            silent = piece is None or piece is _NOTHING
            left = self.patience if not silent or left is None else left - waited
            if piece is not _NOTHING:
                yield piece
        words = f"The source has been silent for {self.patience:g} s.{where_errors_are(self.source)}"
        raise self.assembler.stalled(words)

    def own_state(self) -> dict[str, Any]:
        """The assembler's."""
        return {"assembler": self.assembler.state_dict()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the assembler's."""
        self.assembler.load_state_dict(state["assembler"])


_NOTHING = object()  # came in time


def where_errors_are(source: Any) -> str:
    """Where to look for what the worker processes of a collector raised, which TorchRL hands on to nobody."""
    return " What its workers raised is on stderr, above" if hasattr(source, "procs") else ""


def ended_workers(source: Any) -> list[str]:
    """The worker processes of a collector that have ended with an error, in words."""
    ended = []
    for number, process in enumerate(getattr(source, "procs", ())):
        with suppress(ValueError):  # it is closed, which was the collector
            if process.exitcode not in (None, 0, -SIGTERM):  # nor was it ended by the collector
                ended.append(f"worker {number} (exit code {process.exitcode})")
    return ended


# -- dispatch no more than can be trained in time: better than to drop what is slow, which is what is long --


class HasRoom(Protocol):
    """What is asked for room and told what was dispatched: an assembler, or one in an actor of Ray."""

    group_key: NestedKey

    @property
    def pending(self) -> int:
        """Groups that were dispatched, and are not whole."""

    def capacity(self, rollouts: int | None = None) -> int:
        """Groups of so many rollouts that may be dispatched now."""

    def announce(self, draws: TensorDictBase) -> None:
        """Say which were."""

    def stalled(self, why: str) -> StalledError:
        """The error that says who waits."""


def paced(
    draws: Iterable[TensorDictBase], assembler: HasRoom, *, patience: float | None = None
) -> Iterator[TensorDictBase]:
    """Hand on draws while there is room for their groups, and announce them.

    Who dispatches, in a thread, a process or an actor of its own, waits here until groups are whole or the
    policy has a newer version, as the limits of :meth:`GroupAssembler.capacity` say. A draw waits until there
    is room for all of its groups; where nothing is under way that could make more, it is handed on in parts.
    In the thread that trains nobody would ever make room: give it `patience`.

    With :func:`informative` over what is assembled, groups without information take no room: the loop goes on
    with any share of them below one, whatever the limits.

    Args:
        draws: as ``RepeatSampler.draws()`` yields them, or ``StampIds.draws()``.
        assembler: :class:`GroupAssembler` or :class:`RayAssembler`.
        patience: seconds for which to wait for room. None: without end.

    Raises:
        StalledError: when iterated: there was no room in time.
        BatchError: when iterated: as :meth:`GroupAssembler.announce`.
        ValueError: a `patience` that is not > 0; when iterated: as :meth:`GroupAssembler.capacity`.

    Example:
        >>> from headrace.pipeline import RepeatSampler
        >>> from headrace.transforms import GroupAssembler
        >>> assembler = GroupAssembler(groups=2, max_staleness=1)
        >>> draws = paced(RepeatSampler(9, group_size=8, prompts_per_batch=3).draws(), assembler)
        >>> next(draws)["group_id"].unique().tolist(), assembler.capacity()
        ([0, 1, 2], 1)
    """
    return _paced(draws, assembler, check_patience(patience))


def _paced(
    draws: Iterable[TensorDictBase], assembler: HasRoom, patience: float | None
) -> Iterator[TensorDictBase]:
    room = 0

    def has_room(groups: int, rollouts: int) -> bool:
        nonlocal room
        idle = assembler.pending == 0  # asked first: what is over later only makes more room
        room = assembler.capacity(rollouts)
        return room >= groups or (idle and room > 0)

    for draw in draws:
        if len(draw) == 0:
            yield draw
        while len(draw):
            ids = draw.get(assembler.group_key).reshape(-1)
            groups = list(dict.fromkeys(ids.tolist()))
            largest = int(ids.unique(return_counts=True)[1].max())
            if not wait_until(has_room, patience, len(groups), largest):
                raise assembler.stalled(f"There has been no room for {len(groups)} groups for {patience:g} s")
            part, rest = draw, draw[:0]
            if room < len(groups):
                now = torch.isin(ids, torch.tensor(groups[:room], device=ids.device))
                part, rest = draw[now], draw[~now]
            assembler.announce(part)
            yield part
            draw = rest

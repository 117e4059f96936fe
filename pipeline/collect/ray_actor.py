"""The actors of an assembler on Ray: one actor decides which groups are whole, one per node stores rows."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from headrace.transforms import GroupAssembler, StalledError, StreamWarning
from headrace.transforms.streams import Kinds, RowPiece, gather, narrowed

from .stored_rows import STORED, StoredGroups
from .thin_rows import unpack_thin
from .workers import WorkerWatch

# Waiting writers must not block the trainer: Ray's default limit is 1,000 concurrent calls.
MANY_CALLS: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1_000_000}
GONE = 60.0  # seconds after which groups that their taker has not fetched go to another taker


class Handed(NamedTuple):
    """Groups whose taker has not confirmed that it has their rows."""

    groups: StoredGroups
    taker: str
    """The taker's name; empty if the taker is gone and any other taker may get the groups."""
    at: float
    """When they were handed out, in seconds on the clock of the actor."""


class Reply(NamedTuple):
    """The answer that a taker gets."""

    ticket: int
    groups: StoredGroups | None
    puts: int
    """Number of puts so far."""
    warnings: list[Warning]
    """To be shown in the process of the taker."""


class TableAssembler(GroupAssembler):
    """A GroupAssembler that holds only the columns it reads, and references to the stored rows."""

    _journals_rows = False  # references end with the cluster

    def _joined(self, places: Any, numbers: Any, stale: Any) -> Any:
        places = list(places)
        rows, parts = gather(places, {}), [piece.holds[piece.place[arrival]] for piece, arrival in places]
        known = {part: number for number, part in enumerate(dict.fromkeys(parts))}
        return StoredGroups(
            list(known),
            narrowed(torch.tensor([known[part] for part in parts])),
            narrowed(rows[STORED][:, 1]),
            {key: narrowed(torch.tensor(values)) for key, values in numbers.items()},
            None if stale is None else torch.tensor(stale),
        )


def on_node(node: str) -> Any:
    """The option that makes an actor run on one node only."""
    import ray

    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


@cache
def store_on(node: str) -> Any:
    """Start the actor that stores rows on a node, once for all assemblers of this process."""
    import ray

    options: Any = {"max_restarts": -1, "scheduling_strategy": on_node(node), **MANY_CALLS}
    remote: Any = ray.remote(**options)(RowStore)
    return remote.remote()


class RowStore:
    """Runs in one actor per node and owns the rows that are stored there, so they outlive their writers."""

    async def keep(self, assembler: Any, method: str, packed: Sequence[Any], *args: Any) -> Any:
        """Store rows, and call a method of the assembler's actor with references to them."""
        import ray

        # If the writer sent the references, its death would free the rows. So their owner sends them.
        references = [ray.put(part) for part in packed]
        return await getattr(assembler, method).remote(references, *args)


class AssemblerActor:
    """Runs in the assembler's actor. Its methods are coroutines: one runs until it awaits.

    Args:
        max_ready: whole groups at which writers wait; None: no limit.
        options: of :class:`GroupAssembler`.
    """

    def __init__(self, max_ready: int | None, options: Mapping[str, Any]):
        self.options, self.max_ready = options, max_ready
        self.assembler = TableAssembler(**options)
        self.most, self.puts = max_ready, 0
        self.changed = asyncio.Condition()
        self.stall: StalledError | None = None
        self.silent: StalledError | None = None  # about a worker that is silent while others send rows
        self.warnings: list[Warning] = []  # to be shown in the trainer's process
        self.workers = WorkerWatch(None, None)
        self.handed: dict[int, Handed] = {}  # by ticket; keeps the rows alive until they are fetched
        self.tickets = count()
        self.saved: StoredGroups | None = None  # rows of the last state

    async def watch(self, patience: float | None, worker_patience: float | None) -> None:
        """Watch the workers for silence. Groups not fetched for `GONE` seconds may go to any taker."""
        old = time.monotonic() - GONE
        for ticket, handed in self.handed.items():
            if handed.at < old:
                self.handed[ticket] = handed._replace(taker="")
        self.workers.patience, self.workers.worker_patience = patience, worker_patience
        self.workers.begin()

    async def open_journal(self, path: str) -> None:
        """Go on from a journal. `__init__` cannot do this: Ray reports its errors as a dead actor."""
        self.assembler = TableAssembler(**self.options, journal=path)

    async def store(self, node: str) -> Any:
        """The actor that stores rows on a node."""
        return store_on(node)

    @staticmethod
    def _stored(parts: Sequence[Any], table: Any) -> tuple[TensorDict, list[Any]]:
        """The table of rows, and the reference to the part of each row."""
        if not parts:
            return TensorDict({}, batch_size=[0]), []
        rows = unpack_thin(torch.from_numpy(table))
        return rows, [parts[part] for part in rows[STORED][:, 0].tolist()]

    async def put(self, parts: Sequence[Any], table: Any, kinds: Kinds, patience: float | None) -> None:
        """Wait until fewer than `max_ready` groups are whole, and put rows.

        Args:
            parts: references to the parts of the rows; empty without rows.
            table: the columns that are read, packed; None without rows.
            kinds: the kinds of all columns of the rows.
            patience: seconds to wait until fewer groups are whole.
        """
        rows, holds = self._stored(parts, table)
        async with self.changed:
            if not await self._until(lambda: self.most is None or self.assembler.ready < self.most, patience):
                raise self.assembler.stalled(f"The trainer has taken no batch for {patience:g} s")
            self.puts += 1
            self.changed.notify_all()
            try:
                self.stall = None
                with warnings.catch_warnings(record=True) as caught:  # no other coroutine runs meanwhile
                    warnings.simplefilter("always", StreamWarning)
                    self.assembler._put(rows, kinds, holds)
                self.warnings += [each.message for each in caught if isinstance(each.message, Warning)]
                self.workers.saw(rows, self.assembler)
            except StalledError as err:  # concerns the stream, not this batch: raised in the trainer, too
                self.stall = err
                raise
            self.silent = None
            try:
                self.workers.check(self.assembler)
            except StalledError as err:  # about another worker: raised only in the trainer
                self.silent = err

    async def take(self, n: int | None, patience: float, taker: str, fetched: Sequence[int]) -> Reply:
        """Take groups, if there are enough of them within `patience`.

        Args:
            n: number of groups, as for :meth:`GroupAssembler.take`.
            patience: seconds to wait.
            taker: name of the thread that asks. If it has not fetched its last groups, it gets them again.
            fetched: tickets of the groups that the taker has fetched, as for :meth:`confirm`.
        """
        await self.confirm(fetched)
        async with self.changed:
            if (before := self._not_fetched(taker)) is not None:
                return self._hand_over(*before, taker)
            taken: list[StoredGroups] = []
            await self._until(lambda: self._take_into(taken, n), patience)
            return self._hand_over(next(self.tickets), taken[0] if taken else None, taker)

    async def take_rest(self, taker: str, fetched: Sequence[int]) -> Reply:
        """As :meth:`GroupAssembler.take_rest`."""
        await self.confirm(fetched)
        async with self.changed:
            if (before := self._not_fetched(taker)) is not None:
                return self._hand_over(*before, taker)
            rest: Any = self.assembler.take_rest()
            return self._hand_over(next(self.tickets), rest, taker)

    async def confirm(self, tickets: Sequence[int]) -> None:
        """Drop the references to rows, because these are fetched."""
        for ticket in tickets:
            self.handed.pop(ticket, None)

    def _not_fetched(self, taker: str) -> tuple[int, StoredGroups] | None:
        """The ticket and the groups of a reply that this taker, or a taker that is gone, has not fetched."""
        found = (ticket for ticket, each in self.handed.items() if each.taker in ("", taker))
        return None if (ticket := next(found, None)) is None else (ticket, self.handed[ticket].groups)

    def _hand_over(self, ticket: int, groups: StoredGroups | None, taker: str) -> Reply:
        """Note that groups are handed out; their references are held until :meth:`confirm`."""
        if groups is not None:
            self.handed[ticket] = Handed(groups, taker, time.monotonic())
        self.changed.notify_all()
        caught, self.warnings = self.warnings, []
        return Reply(ticket, groups, self.puts, caught)

    def _take_into(self, taken: list[Any], n: int | None) -> bool:
        if self.silent is not None:  # first, because other workers may keep the trainer busy
            silent, self.silent = self.silent, None
            raise silent
        if (batch := self.assembler.take(n)) is not None:
            taken.append(batch)
            self.most = self.max_ready
        elif self.stall is not None:
            stall, self.stall = self.stall, None
            raise stall
        elif self.max_ready is not None:  # the trainer needs more groups than are ready: let writers put
            self.most = self.assembler.ready + self.max_ready
            self.changed.notify_all()
        return bool(taken)

    async def _until(self, condition: Callable[[], bool], patience: float | None) -> bool:
        """Wait until the condition holds; False if it did not hold in time. Call this with the lock held."""
        try:
            return await asyncio.wait_for(self.changed.wait_for(condition), patience)
        except asyncio.TimeoutError:
            return condition()

    async def call(self, method: str, *args: Any, **words: Any) -> Any:
        """Call a method of the assembler."""
        async with self.changed:
            self.changed.notify_all()
            return getattr(self.assembler, method)(*args, **words)

    async def state(self) -> tuple[dict[str, Any], StoredGroups | None]:
        """The assembler's state, and all its rows in order of arrival."""
        async with self.changed:
            pieces = self.assembler._stream.pieces
            places = [(piece, arrival) for piece in pieces for arrival in piece.place]
            # Hold these rows until the next state, because the caller fetches them later.
            self.saved = self.assembler._joined(places, {}, None) if places else None
            return self.assembler.state_dict(), self.saved

    async def load(
        self,
        parts: Sequence[Any],
        table: Any,
        kinds: Kinds,
        state: Mapping[str, Any],
        arrivals: Sequence[int],
    ) -> None:
        """Restore a state. The caller has stored its rows again."""
        rows, holds = self._stored(parts, table)
        async with self.changed:
            self.changed.notify_all()
            self.assembler._load(state, RowPiece(rows, arrivals, holds), kinds)

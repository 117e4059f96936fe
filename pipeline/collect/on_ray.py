"""Run the assembler in a Ray actor: writers anywhere put rows, and a trainer takes whole groups."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.installed import import_extra
from headrace.transforms import GroupAssembler, StalledError, StreamWarning
from headrace.transforms.carry import from_plain, to_plain
from headrace.transforms.streams import (
    Kinds,
    RowPiece,
    columns_to_send,
    gather,
    joined_plain,
    kinds_of,
    narrowed,
)
from headrace.transforms.table import enter_rows, labels_in_errors, listing
from headrace.transforms.table.options import at_least, takes_options
from headrace.transforms.table.schema import ORIGIN, has_key
from headrace.transforms.table.tensordicts import device_of, number_column, take_rows

from .assembling import Leftovers, check_patience, rest_of
from .thin_rows import pack_thin, unpack_thin
from .workers import WorkerWatch

LISTENING = 0.2  # seconds that the actor waits for a whole group before the trainer checks the writers
# Waiting writers must not block the trainer: Ray's default limit is 1,000 concurrent calls.
MANY_CALLS = {"num_cpus": 0, "max_concurrency": 1_000_000}
GONE = 60.0  # seconds after which groups that were not fetched go to a taker that begins
MOST_PARTS = 16  # largest number of parts of one put
LEAST_BYTES = 2**18  # smallest size of a part; a smaller one costs the same
STORED = ("headrace", "stored")  # (N, 2) int64: the index of a row's part, and of the row in its part


def _ray() -> Any:
    return import_extra("ray", "RayAssembler")


def _number(name: str, meaning: str) -> Any:
    return property(lambda self: self._ask("call", "__getattribute__", name), doc=meaning)


@takes_options
class RayAssembler:
    """A :class:`GroupAssembler` in a Ray actor. This handle can be sent to any task or actor of the cluster.

    Writers call :meth:`put`. It returns when the rows are taken in, and raises the errors of the assembler in
    the writer. A writer waits only while `max_ready` whole groups are not taken yet. It never waits for
    incomplete groups, which may need its own rows. If the trainer needs more groups than there are, writers
    continue. The trainer iterates over :meth:`batches`.

    ::

        assembler = RayAssembler(groups=8, group_size=4)
        writers = [collect.remote(assembler, w) for w in range(2)]  # @ray.remote(max_retries=0)
        for batch in assembler.batches(writers, patience=600):
            optimise(pipeline.minibatches(batch), loss, optimizer)

    Set ``max_retries=0`` for writers. Otherwise Ray restarts a task whose process died, and its rows arrive
    twice and are refused.

    The actor gets only the columns it decides by, such as ids, ends and rewards: less than 200 bytes per row.
    The rows stay in Ray's object store on the writer's node until they are taken. A small actor per node owns
    them and lives as long as the assembler. So rows of a dead writer can still be trained.

    If the assembler's actor or a node is lost, its rows are lost, and its users get Ray's error. Continue
    with a new one from the last :meth:`state_dict`, which holds every put that had returned. A `journal` is
    not possible, because the rows are in Ray's store, which ends with the cluster.

    Args:
        max_ready: whole groups at which writers wait; None: twice `groups`, or no limit if that is None.
        actor: options of the actor for ``ray.remote``; by default it reserves no CPU.
        options: those of :class:`GroupAssembler`. Callables run in the actor.

    Raises:
        ImportError: the extra `ray` is not installed.
        ValueError: as :class:`GroupAssembler`.
    """

    def __init__(
        self, *, max_ready: int | None = None, actor: Mapping[str, Any] | None = None, **options: Any
    ):
        ray = _ray()
        if options.get("journal") is not None:
            raise ValueError(
                "RayAssembler takes no journal, because its rows are in Ray's object store, which ends with "
                "the cluster. Save state_dict(), or use GroupAssembler(journal=PATH) in one process"
            )
        self._local = GroupAssembler(**options)  # raises errors of options here, not in the actor
        self.group_key, groups = self._local.group_key, self._local.groups
        self.max_ready = at_least("max_ready", max_ready, 1) or (None if groups is None else 2 * groups)
        remote = ray.remote(**{**MANY_CALLS, **(actor or {})})(AssemblerActor)
        self._actor = remote.remote(self.max_ready, options)
        self._store: Any = None  # the RowStore of this process's node
        self._taker = ""  # names this process, as one that takes
        self._fetched: list[int] = []  # tickets that the actor is told of with the next question

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None, "_taker": "", "_fetched": []}

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the actor. Raises the actor's own exception, not Ray's wrapper."""
        return self._get(getattr(self._actor, method).remote(*args))

    def _keep(self, method: str, packed: Sequence[Any], *args: Any) -> Any:
        """Store rows on this node, and call a method of the actor with references to them."""
        if self._store is None:
            self._store = self._ask("store", _ray().get_runtime_context().get_node_id())
        return self._get(self._store.keep.remote(self._actor, method, packed, *args))

    def _get(self, found: Any) -> Any:
        ray = _ray()
        try:
            return ray.get(found)
        except ray.exceptions.RayTaskError as err:
            cause = err.cause
            while isinstance(cause, ray.exceptions.RayTaskError):  # the actor's error, at the RowStore
                cause = cause.cause
            raise cause from err

    # -- for writers --------------------------------------------------------------------------------

    def put(self, batch: TensorDictBase | None, *, patience: float | None = None) -> None:
        """Take in a batch of rows, as :meth:`GroupAssembler.put`. Waits while `max_ready` groups are ready.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack; None: no rows.
            patience: seconds to wait; None: forever.

        Raises:
            MissingKeyError, BatchError, StalledError: as :meth:`GroupAssembler.put`.
            StalledError: the trainer has taken no batch in time. The rows are not taken in.
        """
        check_patience(patience)
        keys = [self._local.group_key, self._local.rollout_key]
        batch = TensorDict({}, batch_size=[0]) if batch is None else batch
        with labels_in_errors(batch, keys):
            batch = enter_rows(batch, keys, reader=GroupAssembler.__name__)
            if len(batch):
                self._send("put", batch, patience)
            else:
                self._ask("put", [], None, {}, patience)

    def _send(self, method: str, rows: TensorDictBase, *args: Any) -> Any:
        """Store rows on this node, and send the columns that the actor reads.

        Args:
            method: of the actor.
            rows: at least one, after :func:`enter_rows`.
            args: further arguments of the method.
        """
        rows = rows if device_of(rows).type == "cpu" else rows.cpu()
        columns = columns_to_send(rows, self._local._options)
        table = TensorDict(columns, batch_size=[len(rows)])
        if has_key(rows, ORIGIN):
            table[ORIGIN] = number_column(rows, ORIGIN)
        parts, table[STORED] = cut_by_group(rows, table[self.group_key].reshape(-1))
        plain = [to_plain(part) for part in parts]
        return self._keep(method, plain, pack_thin(table).numpy(), kinds_of(rows), *args)

    def announce(self, draws: TensorDictBase) -> None:
        """As :meth:`GroupAssembler.announce`."""
        self._ask("call", "announce", draws.clone())

    def unfinished(self) -> list[TensorDictBase]:
        """As :meth:`GroupAssembler.unfinished`."""
        return self._ask("call", "unfinished")

    def never_announced(self, draws: TensorDictBase) -> TensorDictBase:
        """As :meth:`GroupAssembler.never_announced`."""
        return self._ask("call", "never_announced", draws)

    def capacity(self, rollouts: int | None = None) -> int:
        """As :meth:`GroupAssembler.capacity`. The number changes only after :meth:`announce`."""
        return self._ask("call", "capacity", rollouts)

    # -- for the trainer ----------------------------------------------------------------------------

    @takes_options
    def batches(
        self,
        writers: Sequence[Any] = (),
        *,
        patience: float | None = None,
        worker_patience: float | None = None,
        leftovers: Leftovers = "yield",
        on_lost: Literal["raise", "go_on"] = "raise",
    ) -> Iterator[TensorDictBase]:
        """Iterate over batches of whole groups, until all writers have ended and no group is left.

        Args:
            writers: the object that ``.remote()`` returned, for each task that puts rows. It shows whether
                the task has ended or died, and errors name the task by its position, from 0. Without writers,
                only your loop or `patience` ends the iteration.
            patience: seconds without a put after which this raises; None: never.
            worker_patience: as for :func:`assembled`: seconds after which a worker without rows raises, while
                another worker puts rows repeatedly.
            leftovers: as for :func:`assembled`, when all writers have ended.
            on_lost: when a writer died or raised: ``raise``, or ``go_on`` with the others. The groups that it
                had started do not become whole. If all writers are lost, this raises.

        Raises:
            StalledError: a writer is lost; there was no put in time; all writers ended without a batch; or a
                writer got this error from :meth:`GroupAssembler.put`.
            BatchError: groups are left over, under ``raise``; as :meth:`GroupAssembler.take`.
            ValueError: an option has an invalid value.
        """
        go_on = on_lost == "go_on"
        check_patience(patience, worker_patience)
        return RayBatches(self, self._listen(Writers(writers, go_on), patience, worker_patience, leftovers))

    def _listen(
        self, writers: Writers, patience: float | None, worker_patience: float | None, leftovers: Leftovers
    ) -> Iterator[TensorDictBase]:
        self._ask("watch", patience, worker_patience, *self._taker_and_tickets())
        puts, heard = 0, time.monotonic()
        while True:
            writers.look()  # before taking, so that the last puts of ended writers are taken
            listening = 0.0 if writers.are_over else LISTENING
            handed, now = self._ask("take", None, listening, *self._taker_and_tickets())
            for warning in self._ask("warned"):
                warnings.warn(warning, stacklevel=2)
            batch = self._fetch(handed)
            if batch is not None or now > puts:
                puts, heard = now, time.monotonic()
            if batch is not None:  # yield whole groups before raising any error
                yield batch
                heard = time.monotonic()
            elif writers.lost is not None:
                lost = f"{len(writers.failed)} of {len(writers.tasks)} writers lost: "
                lost += listing([f"writer {number}" for number in writers.failed])
                lost += f" ({type(writers.lost).__name__}: {writers.lost})"
                why = f"{lost}. Set on_lost='go_on' to continue without them"
                raise self.stalled(why) from writers.lost
            elif writers.are_over:
                break
            elif patience is not None and time.monotonic() - heard >= patience:
                raise self.stalled(f"The writers have been silent for {patience:g} s")
        yield from rest_of(self, leftovers)

    def take(self, n: int | None = None) -> TensorDictBase | None:
        """As :meth:`GroupAssembler.take`: None while there are too few groups."""
        return self._fetch(self._ask("take", n, 0.0, *self._taker_and_tickets())[0])

    def take_rest(self) -> TensorDictBase | None:
        """As :meth:`GroupAssembler.take_rest`."""
        return self._fetch(self._ask("take_rest", *self._taker_and_tickets()))

    def _taker_and_tickets(self) -> tuple[str, list[int]]:
        """Who asks, and what it has fetched. A call of its own might come after the question."""
        self._taker = self._taker or uuid4().hex
        fetched, self._fetched = self._fetched, []
        return self._taker, fetched

    def _fetch(self, handed: tuple[int, StoredGroups] | None) -> TensorDictBase | None:
        """Fetch the rows of groups from Ray's object store, and tell the actor that they are here."""
        if handed is None:
            return None
        ticket, groups = handed
        batch = groups.join(_ray().get(groups.references), self._local)
        self._fetched.append(ticket)
        self._actor.confirm.remote([ticket])
        return batch

    def discard_batch(self) -> int:
        """As :meth:`GroupAssembler.discard_batch`."""
        return self._ask("call", "discard_batch")

    def want(self, groups: int) -> None:
        """As :meth:`GroupAssembler.want`."""
        self._ask("call", "want", groups)

    def reject(self, groups: int) -> None:
        """As :meth:`GroupAssembler.reject`."""
        self._ask("call", "reject", groups)

    def stalled(self, why: str, worker: tuple[int, int] | None = None) -> StalledError:
        """As :meth:`GroupAssembler.stalled`."""
        return self._ask("call", "stalled", why, worker)

    # -- counts and state ---------------------------------------------------------------------------

    groups = _number("groups", "The option of :class:`GroupAssembler`.")
    max_staleness = _number("max_staleness", "The option of :class:`GroupAssembler`.")
    ready = _number("ready", "Number of whole groups that can be taken.")
    pending = _number("pending", "Number of groups that were announced or have rows, and are not whole.")
    held = _number("held", "Number of rows of ready and pending groups.")
    counts = _number("counts", "Number of rows that left without being taken, by reason.")
    blocked_by = _number("blocked_by", "The groups that the next step waits for.")
    restored = _number("restored", "Whether it continues from a state.")
    lost_groups = _number("lost_groups", "Number of groups that left without being taken, by reason.")
    emitted = _number("emitted", "Number of groups that were taken.")
    ages = _number("ages", "Number of groups that were taken at each age, in steps, with `max_staleness`.")

    @property
    def version(self) -> int:
        """The newest policy version. The trainer must update it."""
        return self._ask("call", "__getattribute__", "version")

    @version.setter
    def version(self, version: int) -> None:
        self._ask("call", "__setattr__", "version", version)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`GroupAssembler.state_dict`, with the rows themselves.

        Raises:
            ray.exceptions.ObjectLostError: a node or process that stored rows is gone.
        """
        state, groups = self._ask("state")
        if groups is not None:
            rows = groups.join(_ray().get(groups.references), self._local)
            state["rows"] = joined_plain([RowPiece(rows, state["rows"]["arrival"].tolist())])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`GroupAssembler.load_state_dict`."""
        piece = RowPiece.from_plain(state["rows"])
        rest = {name: value for name, value in state.items() if name != "rows"}
        self._local._check_options(state)
        if piece.place:
            self._send("load", piece.batch, rest, list(piece.place))
        else:
            self._ask("load", [], None, {}, rest, [])

    def shutdown(self) -> None:
        """End the actor. Its rows are lost."""
        _ray().kill(self._actor)


class RayBatches:
    """The iterator that :meth:`RayAssembler.batches` returns. It has the assembler as an attribute."""

    def __init__(self, assembler: RayAssembler, batches: Iterator[TensorDictBase]):
        self.assembler, self._batches = assembler, batches

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self._batches

    def __next__(self) -> TensorDictBase:
        return next(self._batches)


class Writers:
    """Watches whether the writers have ended or died.

    Args:
        tasks: the objects that ``.remote()`` returned.
        go_on: continue without lost writers, while there are others.
    """

    def __init__(self, tasks: Sequence[Any], go_on: bool):
        self.tasks, self.go_on = list(tasks), go_on
        self.open = list(tasks)
        self.failed: list[int] = []
        """The positions of lost writers among the tasks."""
        self.lost: BaseException | None = None
        """The error of a lost writer, if it ends the iteration."""

    @property
    def are_over(self) -> bool:
        """Whether all writers have ended, or a lost one ends the iteration. False without writers."""
        return self.lost is not None or bool(self.tasks and not self.open)

    def look(self) -> None:
        """Check which writers have ended or died."""
        if self.are_over or not self.open:
            return
        ray = _ray()
        ended, self.open = ray.wait(self.open, num_returns=len(self.open), timeout=0)
        for task in ended:
            try:
                ray.get(task)
            except ray.exceptions.RayError as err:
                self.failed.append(self.tasks.index(task))
                if not self.go_on or len(self.failed) == len(self.tasks):
                    self.lost = getattr(err, "cause", None) or err


class StoredGroups(NamedTuple):
    """Whole groups whose M rows are in Ray's object store."""

    references: list[Any]
    """References to parts, from :func:`to_plain`."""
    part: Tensor
    """(M,) int, the index of the part of each row."""
    row: Tensor
    """(M,) int, the index of each row in its part."""
    numbers: Mapping[NestedKey, Tensor]
    """Further columns, (M,) int each."""
    stale: Tensor | None
    """(M,) bool, True at rows to mask."""

    def join(self, parts: Sequence[Any], options: GroupAssembler) -> TensorDictBase:
        """Join the rows into a batch.

        Args:
            parts: what is stored under each reference.
            options: an assembler, which masks stale rows.
        """
        stored: list[Any] = [from_plain(part) for part in parts]
        pieces = [RowPiece(rows, range(len(rows))) for rows in stored]
        rows = zip(self.part.tolist(), self.row.tolist(), strict=True)
        numbers = {key: column.tolist() for key, column in self.numbers.items()}
        stale = None if self.stale is None else self.stale.tolist()
        return options._joined([(pieces[part], row) for part, row in rows], numbers, stale)


def cut_by_group(rows: TensorDictBase, group: Tensor) -> tuple[list[TensorDictBase], Tensor]:
    """Cut rows into parts of whole groups: one group per part, or several if groups are many or small.

    Args:
        rows: TensorDict ``[N]``, N ≥ 1.
        group: (N,) int64, the group of each row.

    Returns:
        - At most `MOST_PARTS` parts, of about `LEAST_BYTES` or more.
        - (N, 2) int64: the index of each row's part, and of the row in its part.

    Example:
        >>> rows = TensorDict({"x": torch.arange(3 * LEAST_BYTES).view(3, -1)}, batch_size=[3])
        >>> parts, places = cut_by_group(rows, torch.tensor([5, 9, 5]))
        >>> [len(part) for part in parts], places.tolist()
        ([2, 1], [[0, 0], [1, 0], [0, 1]])
    """
    names, own = group.unique(return_inverse=True)
    count = max(1, min(len(names), MOST_PARTS, rows.bytes() // LEAST_BYTES))
    part = own * count // len(names)
    places, parts = torch.stack([part, part], 1), []
    for number in range(count):
        members = (part == number).nonzero().flatten()
        places[members, 1] = torch.arange(len(members))
        parts.append(take_rows(rows, members, on_cpu=members, shared=True))  # a copy, if rows are dense
    return parts, places


class Handed(NamedTuple):
    """Groups that a taker has not confirmed."""

    taker: str
    at: float
    """Seconds on the clock of the actor."""
    groups: StoredGroups


class TableAssembler(GroupAssembler):
    """A GroupAssembler that holds only the columns it reads, and references to the stored rows."""

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


@cache
def store_on(node: str) -> Any:
    """Start the actor that stores rows on a node, once for all assemblers of this process."""
    ray = _ray()
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"max_restarts": -1, "scheduling_strategy": where, **MANY_CALLS}
    return ray.remote(**options)(RowStore).remote()


class RowStore:
    """Runs in one actor per node and owns the rows that are stored there, so they outlive their writers."""

    async def keep(self, assembler: Any, method: str, packed: Sequence[Any], *args: Any) -> Any:
        """Store rows, and call a method of the assembler's actor with references to them."""
        # The owner sends the references. If the writer did, its death would free the rows.
        references = [_ray().put(part) for part in packed]
        return await getattr(assembler, method).remote(references, *args)


class AssemblerActor:
    """Runs in the assembler's actor. Its methods are coroutines: another runs only while one awaits.

    Args:
        max_ready: whole groups at which writers wait; None: no limit.
        options: of :class:`GroupAssembler`.
    """

    def __init__(self, max_ready: int | None, options: Mapping[str, Any]):
        self.assembler, self.max_ready = TableAssembler(**options), max_ready
        self.most, self.puts = max_ready, 0
        self.changed = asyncio.Condition()
        self.stall: StalledError | None = None
        self.silent: StalledError | None = None  # one worker is silent while others send rows
        self.warnings: list[Warning] = []  # to be shown in the trainer's process
        self.workers = WorkerWatch(None, None)
        self.handed: dict[int, Handed] = {}
        self.tickets = count()
        self.returned: list[int] = []  # of takers that are gone
        self.saved: StoredGroups | None = None  # of the last state

    async def watch(
        self, patience: float | None, worker_patience: float | None, taker: str, fetched: Sequence[int]
    ) -> None:
        """Start to watch the workers for silence. What others have not fetched goes to this taker."""
        await self.confirm(fetched)
        old = time.monotonic() - GONE
        for ticket, handed in self.handed.items():
            if handed.taker != taker and handed.at < old and ticket not in self.returned:
                self.returned.append(ticket)
        self.workers.patience, self.workers.worker_patience = patience, worker_patience
        self.workers.begin()

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
        """Put rows, after waiting for room.

        Args:
            parts: references to the parts of the rows; empty without rows.
            table: the columns that are read, packed; None without rows.
            kinds: of all columns of the rows.
            patience: seconds to wait for room.
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

    async def take(
        self, n: int | None, patience: float, taker: str, fetched: Sequence[int]
    ) -> tuple[tuple[int, StoredGroups] | None, int]:
        """Take groups, if there are enough in time. Also returns the number of puts.

        The references are held until :meth:`confirm`. If this taker asks again before, it gets them again.
        """
        await self.confirm(fetched)
        async with self.changed:
            if (again := self._handed_before(taker)) is not None:
                return again, self.puts
            taken: list[StoredGroups] = []
            await self._until(lambda: self._take_into(taken, n), patience)
            self.changed.notify_all()
            return self._hand_over(taken[0] if taken else None, taker), self.puts

    async def take_rest(self, taker: str, fetched: Sequence[int]) -> tuple[int, StoredGroups] | None:
        """As :meth:`GroupAssembler.take_rest`."""
        await self.confirm(fetched)
        async with self.changed:
            self.changed.notify_all()
            groups: Any = None
            if (again := self._handed_before(taker)) is None:
                groups = self.assembler.take_rest()
            return again or self._hand_over(groups, taker)

    def _handed_before(self, taker: str) -> tuple[int, StoredGroups] | None:
        """Groups that this taker has not fetched, or one that is gone."""
        mine = (ticket for ticket, handed in self.handed.items() if handed.taker == taker)
        ticket = self.returned.pop(0) if self.returned else next(mine, None)
        if ticket is None or ticket not in self.handed:
            return None
        groups = self.handed[ticket].groups
        self.handed[ticket] = Handed(taker, time.monotonic(), groups)
        return ticket, groups

    def _hand_over(self, groups: StoredGroups | None, taker: str) -> tuple[int, StoredGroups] | None:
        if groups is None:
            return None
        ticket = next(self.tickets)
        self.handed[ticket] = Handed(taker, time.monotonic(), groups)
        return ticket, groups

    async def confirm(self, tickets: Sequence[int]) -> None:
        """The taker has fetched the rows: their references need not be held any more."""
        for ticket in tickets:
            self.handed.pop(ticket, None)

    async def warned(self) -> list[Warning]:
        """The warnings since the last call."""
        caught, self.warnings = self.warnings, []
        return caught

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
        """Wait until the condition holds; False if it did not in time. Call it with the lock held."""
        end = None if patience is None else time.monotonic() + patience
        while not condition():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                await asyncio.wait_for(self.changed.wait(), left)
            except asyncio.TimeoutError:
                return condition()
        return True

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the assembler."""
        async with self.changed:
            self.changed.notify_all()
            return getattr(self.assembler, method)(*args)

    async def state(self) -> tuple[dict[str, Any], StoredGroups | None]:
        """The assembler's state, and all its rows in order of arrival."""
        async with self.changed:
            pieces = self.assembler._stream.pieces
            places = [(piece, arrival) for piece in pieces for arrival in piece.place]
            # Held until the next state, for the caller fetches them later.
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
        """Restore a state, whose rows are stored again."""
        rows, holds = self._stored(parts, table)
        async with self.changed:
            self.changed.notify_all()
            self.assembler._load(state, RowPiece(rows, arrivals, holds), kinds)

"""The assembler in an actor of Ray: writers anywhere put rows into it, and a trainer takes whole groups."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args
from uuid import uuid4

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.pipeline.installed import import_extra
from headrace.transforms import BatchError, GroupAssembler, StalledError, StreamWarning
from headrace.transforms.assembler.arriving import find_columns
from headrace.transforms.assembler.pieces import (
    Kinds,
    RowPiece,
    check_kinds,
    gather,
    joined_plain,
    kinds_of,
    narrowed,
)
from headrace.transforms.entry import enter_rows, labels_in_errors
from headrace.transforms.options import at_least, one_of, takes_options
from headrace.transforms.schema import ORIGIN, has_key
from headrace.transforms.tensordicts import device_of, number_column

from .assembling import Leftovers, check_patience, rest_of
from .stored_rows import ROW, RowTable, cut_by_group, pack_rows, row_table, rows_of, unpack_rows
from .workers import WorkerWatch

LISTENING = 0.2  # seconds for which the actor waits for a whole group before the trainer looks at writers
KNOWN = 256  # kinds of rows that the actor remembers


def _number(name: str, meaning: str) -> Any:
    return property(lambda self: self._ask("call", "__getattribute__", name), doc=meaning)


@takes_options
class RayAssembler:
    """A :class:`GroupAssembler` in an actor: a handle that can be sent to any task or actor of the cluster.

    Writers call :meth:`put`, which returns when the rows are taken in, and raises there what the assembler
    refuses. A writer waits only while `max_ready` whole groups are there that nobody took, and never on
    groups that are not whole: these may wait for rows of its own. Where the trainer asks for more than there
    are, writers go on. It iterates over :meth:`batches`.

    ::

        assembler = RayAssembler(groups=8, group_size=4)
        writers = [collect.remote(assembler, w) for w in range(2)]  # @ray.remote(max_retries=0)
        for batch in assembler.batches(writers, patience=600):
            optimise(pipeline.minibatches(batch), loss, optimizer)

    Writers have ``max_retries=0``: Ray begins a task whose process died anew, whose rows then come twice, and
    are refused.

    The actor gets what it decides by: ids, ends, rewards and the like, less than 200 bytes a row. The rows
    themselves stay in Ray's object store on the writer's node, and go from there to whoever takes them. There
    they belong to a small actor of ours, one a node, which lives as long as the assembler: rows of a writer
    that died are trained. Where the node itself is lost, its rows are counted as ``lost``, a warning says so,
    and a batch has fewer groups.

    What the actor knows is gone when it dies: nothing restarts it, and whoever asks it gets Ray's error. Go
    on with a new one from the last :meth:`state_dict`, which has every put that had returned. There is no
    `journal` here: the rows are in Ray's store, which dies with the cluster.

    Args:
        max_ready: whole groups at which writers wait. None: twice `groups`, or any number where that is None.
        actor: options of the actor, as ``ray.remote`` takes them; it asks for no CPU of its own.
        options: those of :class:`GroupAssembler`. A callable among them runs in the actor.

    Raises:
        ImportError: the extra `ray` is not installed.
        ValueError: as :class:`GroupAssembler`.
    """

    def __init__(
        self, *, max_ready: int | None = None, actor: Mapping[str, Any] | None = None, **options: Any
    ):
        ray = import_extra("ray", "ray", type(self).__name__)
        if options.get("journal") is not None:
            raise ValueError(
                "RayAssembler takes no journal: rows stay in Ray's object store, which does not outlive the "
                "cluster. Save state_dict(), or put rows into a GroupAssembler(journal=PATH) of one process"
            )
        self._local = GroupAssembler(**options)  # a wrong one is refused here, and not in the actor
        self.group_key, groups = self._local.group_key, self._local.groups
        self.max_ready = at_least("max_ready", max_ready, 1) or (None if groups is None else 2 * groups)
        # Writers that wait must not keep the trainer out: Ray's own limit is 1,000 calls.
        own = {"num_cpus": 0, "max_concurrency": 1_000_000}
        remote = ray.remote(**{**own, **(actor or {})})(AssemblerActor)
        self._actor = remote.remote(self.max_ready, options)
        self._store: Any = None  # of this process's node
        self._like: RowsLike | None = None  # what the last rows that were put had in common

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None, "_like": None}

    def _ask(self, method: str, *args: Any) -> Any:
        """What the actor returns; what it raises is raised here as it is, after Ray's account of where."""
        return self._get(getattr(self._actor, method).remote(*args))

    def _keep(self, method: str, packed: Sequence[Any], *args: Any) -> Any:
        """The same, of a method that also gets references to rows, which are stored on this node."""
        ray = import_extra("ray", "ray", type(self).__name__)
        if self._store is None:
            self._store = self._ask("store", ray.get_runtime_context().get_node_id())
        ticket = uuid4().bytes
        answer = getattr(self._actor, method).remote(ticket, *args)
        return self._get([self._store.keep.remote(self._actor, ticket, packed), answer])[1]

    def _get(self, found: Any) -> Any:
        ray = import_extra("ray", "ray", type(self).__name__)
        try:
            return ray.get(found)
        except ray.exceptions.RayTaskError as err:
            raise err.cause from err

    # -- for writers --------------------------------------------------------------------------------

    def put(self, batch: TensorDictBase | None, *, patience: float | None = None) -> None:
        """Take in a batch of rows, as :meth:`GroupAssembler.put`, once there is room. None has no rows.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack.
            patience: seconds for which to wait for room. None: without end.

        Raises:
            MissingKeyError, BatchError, StalledError: as :meth:`GroupAssembler.put`.
            StalledError: nobody has made room in time; the rows are not taken in.
        """
        check_patience(patience)
        keys = [self._local.group_key, self._local.rollout_key]
        batch = TensorDict({}, batch_size=[0]) if batch is None else batch
        with labels_in_errors(batch, keys):
            kinds = kinds_of(batch) if isinstance(batch, TensorDictBase) and batch.batch_dims == 1 else None
            if self._like is None or kinds != self._like.kinds:
                batch = enter_rows(batch, keys, reader=GroupAssembler.__name__)
            if not len(batch):
                self._ask("put", None, None, None, patience)
            elif not self._send("put", batch, patience):  # the actor does not know such rows yet
                self._send("put", batch, patience, says=True)

    def _send(self, method: str, rows: TensorDictBase, *args: Any, says: bool = False) -> Any:
        """Store rows on this node, and say to the actor what it reads of them.

        Args:
            method: of the actor.
            rows: that were entered, at least one.
            args: further ones of the method.
            says: say also what they have in common, though it was said before.
        """
        rows = rows if device_of(rows).type == "cpu" else rows.cpu()
        kinds = kinds_of(rows)
        if self._like is None or self._like.kinds != kinds:
            self._like, says = self._find(rows, kinds), True
        like = self._like
        parts, places = cut_by_group(rows, number_column(rows, self._local.group_key).long().reshape(-1))
        packed = [pack_rows(part) for part in parts]
        table = row_table(rows, like.keys, places)
        said = like if says else like.digest
        return self._keep(method, packed, table, said, *args)

    def _find(self, rows: TensorDictBase, kinds: Kinds) -> RowsLike:
        """What the actor reads of rows like these."""
        try:
            found = find_columns(RowPiece(rows, range(len(rows))), self._local._options)
        except BatchError:
            self._ask("check", kinds)  # that they differ from those that wait says more
            raise
        keys = [*found.values(), *([ORIGIN] if has_key(rows, ORIGIN) else [])]
        keys = list(dict.fromkeys(keys))
        differ = bool(kinds.get(()))  # rows of a lazy stack, which are like no others
        digest = None if differ else hashlib.blake2b(pickle.dumps((kinds, keys)), digest_size=12).digest()
        return RowsLike(kinds, keys, digest)

    def announce(self, draws: TensorDictBase) -> None:
        """As :meth:`GroupAssembler.announce`."""
        self._ask("call", "announce", draws.clone())

    def capacity(self, rollouts: int | None = None) -> int:
        """As :meth:`GroupAssembler.capacity`. Calls before an announcement return the same number."""
        return self._ask("call", "capacity", rollouts)

    # -- for the trainer ----------------------------------------------------------------------------

    def batches(
        self,
        writers: Sequence[Any] = (),
        *,
        patience: float | None = None,
        worker_patience: float | None = None,
        leftovers: Leftovers = "yield",
        on_lost: Literal["raise", "go_on"] = "raise",
    ) -> Iterator[TensorDictBase]:
        """Iterate over batches of whole groups, until all writers have ended and nothing is left.

        Args:
            writers: of each task that puts rows what ``.remote()`` returned, by which it is known to have
                ended or died. None given: only the loop itself, or `patience`, ends the iteration.
            patience: seconds for which this waits though nobody puts. None: without end.
            worker_patience: as of :func:`assembled`: seconds for which one worker may be silent while another
                one puts rows again and again.
            leftovers: as of :func:`assembled`, when all writers have ended.
            on_lost: where a writer died or raised: ``raise``, or ``go_on`` with the others; groups that it
                had begun do not become whole. Where all are lost, that is raised.

        Raises:
            StalledError: a writer is lost; nobody puts; all have ended, and nothing has come out; as
                :meth:`GroupAssembler.put` raises it to a writer.
            BatchError: groups are left over, under ``raise``; as :meth:`GroupAssembler.take`.
            ValueError: an option with a wrong value.
        """
        one_of("leftovers", leftovers, get_args(Leftovers))
        go_on = one_of("on_lost", on_lost, ("raise", "go_on")) == "go_on"
        check_patience(patience, worker_patience)
        return RayBatches(self, self._listen(Writers(writers, go_on), patience, worker_patience, leftovers))

    def _listen(
        self, writers: Writers, patience: float | None, worker_patience: float | None, leftovers: Leftovers
    ) -> Iterator[TensorDictBase]:
        self._ask("watch", patience, worker_patience)
        puts, heard = 0, time.monotonic()
        while True:
            writers.look()  # before the assembler is asked: what they put is there then
            groups, now = self._ask("take", None, 0.0 if writers.are_over else LISTENING)
            for warning in self._ask("warned"):
                warnings.warn(warning, stacklevel=2)
            batch = self._fetch(groups)
            if batch is not None or now > puts:
                puts, heard = now, time.monotonic()
            if batch is not None:  # what is whole goes out before anything is raised
                yield batch
                heard = time.monotonic()
            elif writers.lost is not None:
                lost = f"{writers.failed} of {len(writers.tasks)} writers lost"
                why = f"{lost} ({type(writers.lost).__name__}: {writers.lost}). To go on without, set on_lost"
                raise self.stalled(why) from writers.lost
            elif writers.are_over:
                break
            elif patience is not None and time.monotonic() - heard >= patience:
                raise self.stalled(f"The writers have been silent for {patience:g} s")
        yield from rest_of(self, leftovers)

    def take(self, n: int | None = None) -> TensorDictBase | None:
        """As :meth:`GroupAssembler.take`: None while there are fewer."""
        return self._fetch(self._ask("take", n, 0.0)[0])

    def take_rest(self) -> TensorDictBase | None:
        """As :meth:`GroupAssembler.take_rest`."""
        return self._fetch(self._ask("call", "take_rest"))

    def _fetch(self, groups: StoredGroups | None) -> TensorDictBase | None:
        """The rows of groups, from where they are stored; None where all of them are lost."""
        if groups is None:
            return None
        ray = import_extra("ray", "ray", type(self).__name__)
        try:
            stored = ray.get(groups.references)
        except ray.exceptions.ObjectLostError:
            stored = [self._part(ray, part) for part in groups.references]
            lost = torch.tensor([part is None for part in stored])[groups.part.long()]
            odd = groups.group[lost].unique()
            gone = torch.isin(groups.group, odd)
            self._ask("lose", int(gone.sum()), len(odd))
            warnings.warn(
                f"{int(gone.sum())} rows of {len(odd)} groups were stored on a node or in a process that is "
                "gone. They are counted as 'lost' and not trained",
                StreamWarning,
                stacklevel=2,
            )
            if bool(gone.all()):
                return None
            groups = groups.only(~gone)
        return groups.join(stored, self._local)

    @staticmethod
    def _part(ray: Any, part: Any) -> Any:
        try:
            return ray.get(part)
        except ray.exceptions.ObjectLostError:
            return None

    def discard_batch(self) -> int:
        """As :meth:`GroupAssembler.discard_batch`."""
        return self._ask("call", "discard_batch")

    def want(self, groups: int) -> bool:
        """As :meth:`GroupAssembler.want`."""
        return self._ask("call", "want", groups)

    def reject(self, groups: int) -> None:
        """As :meth:`GroupAssembler.reject`."""
        self._ask("call", "reject", groups)

    def stalled(self, why: str, worker: tuple[int, int] | None = None) -> StalledError:
        """As :meth:`GroupAssembler.stalled`."""
        return self._ask("call", "stalled", why, worker)

    # -- what is there ------------------------------------------------------------------------------

    groups = _number("groups", "As the option of :class:`GroupAssembler`.")
    max_staleness = _number("max_staleness", "As the option of :class:`GroupAssembler`.")
    ready = _number("ready", "Whole groups.")
    pending = _number("pending", "Groups that are announced or begun, and not whole.")
    held = _number("held", "Rows that are neither handed out nor counted.")
    counts = _number("counts", "Rows that left, by reason.")
    emitted = _number("emitted", "Groups that were handed out.")

    @property
    def version(self) -> int:
        """The newest policy version; whoever trains counts it up."""
        return self._ask("call", "__getattribute__", "version")

    @version.setter
    def version(self, version: int) -> None:
        self._ask("call", "__setattr__", "version", version)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`GroupAssembler.state_dict`, with the rows themselves.

        Raises:
            ray.exceptions.ObjectLostError: a node or process is gone in which rows were stored.
        """
        state, groups = self._ask("state")
        if groups is not None:
            ray = import_extra("ray", "ray", type(self).__name__)
            rows = groups.join(ray.get(groups.references), self._local)
            state["chunks"] = joined_plain([RowPiece(rows, state["chunks"][0]["arrival"].tolist())])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`GroupAssembler.load_state_dict`."""
        pieces = [RowPiece.from_plain(chunk) for chunk in state["chunks"]]
        rest = {name: value for name, value in state.items() if name != "chunks"}
        places = [(piece, arrival) for piece in pieces for arrival in piece.place]
        self._local._check_options(state)
        if not places:
            self._ask("load", None, None, None, rest, [])
        else:
            arrivals = [arrival for _, arrival in places]
            self._send("load", gather(places, {}), rest, arrivals, says=True)

    def shutdown(self) -> None:
        """End the actor, and with it what it holds."""
        import_extra("ray", "ray", type(self).__name__).kill(self._actor)


class RayBatches:
    """What :meth:`RayAssembler.batches` returns: an iterator that says from which assembler it is."""

    def __init__(self, assembler: RayAssembler, batches: Iterator[TensorDictBase]):
        self.assembler, self._batches = assembler, batches

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self._batches

    def __next__(self) -> TensorDictBase:
        return next(self._batches)


class Writers:
    """Who puts rows, and whether they still do.

    Args:
        tasks: what their ``.remote()`` returned.
        go_on: without those that are lost, while there are others.
    """

    def __init__(self, tasks: Sequence[Any], go_on: bool):
        self.tasks, self.go_on = list(tasks), go_on
        self.open, self.failed = list(tasks), 0
        self.lost: BaseException | None = None
        """What a writer raised, or Ray about its death, where that ends it all."""

    @property
    def are_over(self) -> bool:
        """All have ended, or one is missed. Where none was named, nobody knows."""
        return self.lost is not None or bool(self.tasks and not self.open)

    def look(self) -> None:
        """See who has ended, and how."""
        if self.are_over or not self.open:
            return
        ray = import_extra("ray", "ray", "RayAssembler")
        ended, self.open = ray.wait(self.open, num_returns=len(self.open), timeout=0)
        for task in ended:
            try:
                ray.get(task)
            except ray.exceptions.RayError as err:
                self.failed += 1
                if not self.go_on or self.failed == len(self.tasks):
                    self.lost = getattr(err, "cause", None) or err


class RowsLike(NamedTuple):
    """What rows have in common."""

    kinds: Kinds
    """Of all of their columns."""
    keys: list[NestedKey]
    """Of those that the assembler reads."""
    digest: bytes | None
    """By which the actor knows both; None: they are like no others."""


class StoredGroups(NamedTuple):
    """Whole groups whose M rows are stored elsewhere."""

    references: list[Any]
    """To rows that :func:`pack_rows` packed."""
    part: Tensor
    """(M,) in which part each row is."""
    row: Tensor
    """(M,) where in its part."""
    group: Tensor
    """(M,) int, its group."""
    numbers: Mapping[NestedKey, Tensor]
    """(M,) int each: further columns."""
    stale: Tensor | None
    """(M,) bool: rows that are masked."""

    def only(self, rows: Tensor) -> StoredGroups:
        """Some of the rows, by (M,) bool."""
        numbers = {key: column[rows] for key, column in self.numbers.items()}
        stale = None if self.stale is None else self.stale[rows]
        return StoredGroups(
            self.references, self.part[rows], self.row[rows], self.group[rows], numbers, stale
        )

    def join(self, parts: Sequence[Any], options: GroupAssembler) -> TensorDictBase:
        """The batch of the rows.

        Args:
            parts: packed rows, for each reference; None where no row is of it.
            options: how rows are masked.
        """
        pieces: list[Any] = [None if part is None else unpack_rows(part) for part in parts]
        pieces = [None if rows is None else RowPiece(rows, range(len(rows))) for rows in pieces]
        rows = zip(self.part.tolist(), self.row.tolist(), strict=True)
        numbers = {key: column.tolist() for key, column in self.numbers.items()}
        stale = None if self.stale is None else self.stale.tolist()
        return options._joined([(pieces[part], row) for part, row in rows], numbers, stale)


class TableAssembler(GroupAssembler):
    """A GroupAssembler of rows that are stored elsewhere: it holds what it reads of them, and references."""

    def _joined(self, places: Any, numbers: Any, stale: Any) -> Any:
        places = list(places)
        rows, parts = gather(places, {}), [piece.holds[piece.place[arrival]] for piece, arrival in places]
        known = {part: number for number, part in enumerate(dict.fromkeys(parts))}
        return StoredGroups(
            list(known),
            narrowed(torch.tensor([known[part] for part in parts])),
            narrowed(rows[ROW]),
            narrowed(rows[self.group_key].reshape(-1).long()),
            {key: narrowed(torch.tensor(values)) for key, values in numbers.items()},
            None if stale is None else torch.tensor(stale),
        )


@cache
def store_on(node: str) -> Any:
    """The actor that stores rows on a node for all assemblers of this process."""
    ray = import_extra("ray", "ray", "RayAssembler")
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=where)(RowStore).remote()


class RowStore:
    """What runs in an actor a node: the rows that were put there belong to it, whoever of others dies."""

    def keep(self, assembler: Any, ticket: bytes, packed: Sequence[Any]) -> None:
        """Store rows, and give the assembler's actor references to them."""
        ray = import_extra("ray", "ray", "RayAssembler")
        # The owner itself gives them away: had the writer done, they would be freed where it dies.
        assembler.keep.remote(ticket, [ray.put(part) for part in packed])


class AssemblerActor:
    """What runs in the actor: one thing at a time, since only who waits lets others in.

    Args:
        max_ready: whole groups at which writers wait; None: they never do.
        options: of :class:`GroupAssembler`.
    """

    def __init__(self, max_ready: int | None, options: Mapping[str, Any]):
        self.assembler, self.max_ready = TableAssembler(**options), max_ready
        self.known: OrderedDict[bytes, RowsLike] = OrderedDict()
        self.stored: dict[bytes, asyncio.Future[list[Any]]] = {}
        self.most, self.puts = max_ready, 0
        self.changed = asyncio.Condition()
        self.stall: StalledError | None = None
        self.silent: StalledError | None = None  # a worker is, whatever the others send
        self.said: list[Warning] = []  # which nobody sees here
        self.workers = WorkerWatch(None, None)

    async def watch(self, patience: float | None, worker_patience: float | None) -> None:
        """Watch the workers from now on; what they sent before is known."""
        self.workers.patience, self.workers.worker_patience = patience, worker_patience
        self.workers.begin()

    async def store(self, node: str) -> Any:
        """The actor that stores rows on a node."""
        return store_on(node)

    async def keep(self, ticket: bytes, parts: list[Any]) -> None:
        """Take references from who stores the rows, for whoever asks for them."""
        self.stored.setdefault(ticket, asyncio.get_running_loop().create_future()).set_result(parts)

    async def _parts_of(self, ticket: bytes | None) -> list[Any]:
        """The references of a ticket, when they are here."""
        if ticket is None:
            return []
        parts = await self.stored.setdefault(ticket, asyncio.get_running_loop().create_future())
        del self.stored[ticket]
        return parts

    async def check(self, kinds: Kinds) -> None:
        """Refuse rows of such kinds if they do not fit those that wait."""
        if self.assembler.held:
            check_kinds(self.assembler._kinds, kinds)

    def like(self, said: RowsLike | bytes | None) -> RowsLike | None:
        """What rows have in common, which was said now or before; None: it is not known."""
        if isinstance(said, RowsLike) and said.digest is not None:
            self.known[said.digest] = said
            while len(self.known) > KNOWN:
                self.known.popitem(last=False)
        return said if isinstance(said, RowsLike) else self.known.get(said or b"")

    async def put(
        self,
        ticket: bytes | None,
        table: RowTable | None,
        said: RowsLike | bytes | None,
        patience: float | None,
    ) -> bool:
        """Put rows once there is room.

        Args:
            ticket: of references to them. None: there are none.
            table: what is read of them. None: there are none.
            said: what they have in common, or its digest.
            patience: seconds for which to wait for room.

        Returns:
            False: nobody has said what they have in common, and they are not taken in.
        """
        parts = await self._parts_of(ticket)
        rows, holds, like = TensorDict({}, batch_size=[0]), [], self.like(said)
        if table is not None:
            if like is None:
                return False
            rows, holds = rows_of(table, like.keys), [parts[part] for part in table.part.tolist()]
        async with self.changed:
            if not await self._until(lambda: self.most is None or self.assembler.ready < self.most, patience):
                raise self.assembler.stalled(f"Nobody has made room for {patience:g} s")
            self.puts += 1
            self.changed.notify_all()
            try:
                self.stall = None
                with warnings.catch_warnings(record=True) as noted:  # nothing else runs here meanwhile
                    warnings.simplefilter("always", StreamWarning)
                    self.assembler._put(rows, like.kinds if like else {}, holds)
                self.said += [each.message for each in noted if isinstance(each.message, Warning)]
                self.workers.saw(rows, self.assembler)
            except StalledError as err:  # is of the stream, and not of this batch: the trainer is to know
                self.stall = err
                raise
            self.silent = None
            try:
                self.workers.check(self.assembler)
            except StalledError as err:  # is of another worker
                self.silent = err
        return True

    async def take(self, n: int | None, patience: float) -> tuple[StoredGroups | None, int]:
        """Groups, if one is there in time, and how many puts there were."""
        async with self.changed:
            taken: list[StoredGroups] = []
            await self._until(lambda: self._take_into(taken, n), patience)
            self.changed.notify_all()
            return (taken[0] if taken else None), self.puts

    async def warned(self) -> list[Warning]:
        """What the assembler has warned of since this was last asked."""
        said, self.said = self.said, []
        return said

    def _take_into(self, taken: list[Any], n: int | None) -> bool:
        if self.silent is not None:  # at once: others may send more than is taken
            silent, self.silent = self.silent, None
            raise silent
        if (batch := self.assembler.take(n)) is not None:
            taken.append(batch)
            self.most = self.max_ready
        elif self.stall is not None:
            stall, self.stall = self.stall, None
            raise stall
        elif self.max_ready is not None:  # what is whole is not enough: writers go on
            self.most = self.assembler.ready + self.max_ready
            self.changed.notify_all()
        return bool(taken)

    async def _until(self, condition: Callable[[], bool], patience: float | None) -> bool:
        """Wait, with the lock, until something holds; False: it did not in time."""
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
        """What a method of the assembler returns."""
        async with self.changed:
            self.changed.notify_all()
            return getattr(self.assembler, method)(*args)

    async def lose(self, rows: int, groups: int) -> None:
        """Count rows of groups that were handed out, and could not be fetched."""
        self.assembler._stream.counts["lost"] += rows
        self.assembler._stream.emitted -= groups

    async def state(self) -> tuple[dict[str, Any], StoredGroups | None]:
        """The assembler's state, and all rows in the order in which it has them."""
        async with self.changed:
            pieces = self.assembler._stream.pieces
            places = [(piece, arrival) for piece in pieces for arrival in piece.place]
            groups = self.assembler._joined(places, {}, None) if places else None
            return self.assembler.state_dict(), groups

    async def load(
        self,
        ticket: bytes | None,
        table: RowTable | None,
        like: RowsLike | None,
        state: Mapping[str, Any],
        arrivals: Sequence[int],
    ) -> bool:
        """Go on from a state, whose rows are stored again."""
        parts, pieces = await self._parts_of(ticket), []
        if table is not None and like is not None:
            holds = [parts[part] for part in table.part.tolist()]
            pieces = [RowPiece(rows_of(table, like.keys), arrivals, holds)]
        async with self.changed:
            self.changed.notify_all()
            self.assembler._load(state, pieces, like.kinds if like else {})
        return True

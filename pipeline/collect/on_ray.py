"""Run the assembler in a Ray actor: writers anywhere put rows, and a trainer takes whole groups."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from tensordict import TensorDict, TensorDictBase

from headrace.installed import import_extra
from headrace.transforms import GroupAssembler, StalledError
from headrace.transforms.streams import RowPiece, columns_to_send, joined_plain, kinds_of, measures
from headrace.transforms.table import enter_rows, labels_in_errors, listing
from headrace.transforms.table.options import at_least, takes_options
from headrace.transforms.table.schema import ORIGIN, has_key
from headrace.transforms.table.tensordicts import device_of, number_column, number_of

from .assembling import Leftovers, check_patience, rest_of
from .ray_actor import MANY_CALLS, AssemblerActor, Reply, on_node
from .stored_rows import STORED, cut_by_group, pack_rows
from .thin_rows import pack_thin

LISTENING = 0.2  # seconds that the actor waits for a whole group before the trainer checks the writers


def _ray() -> Any:
    return import_extra("ray", "RayAssembler")


def _number(name: str, meaning: str) -> Any:
    return property(lambda self: self._ask("call", "__getattribute__", name), doc=meaning)


@takes_options
class RayAssembler:
    """A :class:`GroupAssembler` in a Ray actor. This handle can be sent to any task or actor of the cluster.

    Writers call :meth:`put`. It returns when the rows are taken in, and raises the errors of the assembler in
    the writer. A writer waits only while `max_ready` whole groups are not taken yet. It never waits for
    incomplete groups, which may need its own rows. If the trainer needs more groups than are ready, writers
    continue. The trainer iterates over :meth:`batches`.

    ::

        assembler = RayAssembler(groups=8, group_size=4)
        writers = [collect.remote(assembler, w) for w in range(2)]  # @ray.remote(max_retries=0)
        for batch in assembler.batches(writers, patience=600):
            optimise(pipeline.minibatches(batch), loss, optimizer)

    Set ``max_retries=0`` for writers. Otherwise Ray restarts a task whose process died, and its rows arrive
    twice and are refused.

    The actor gets only the columns that its decisions need, such as ids, ends and rewards: under 200 bytes
    per row. The rows stay in Ray's object store on the writer's node until they are taken. A small actor per
    node owns them and lives as long as the assembler. So rows of a dead writer can still be trained.

    If the assembler's actor or a node is lost, its rows are lost, and calls raise Ray's error. Continue with
    a new assembler from a `journal`, or from the last :meth:`state_dict`, which holds every put that had
    returned. A journal holds what was announced and committed. It has no rows, because these are in Ray's
    store, which ends with the cluster. After a crash, all announced groups that were not committed are
    :meth:`unfinished`.

    Args:
        max_ready: number of whole groups at which writers wait; None: twice `groups`, or no limit if `groups`
            is None.
        actor: options of the actor for ``ray.remote``. By default it reserves no CPU, and with a `journal`
            runs on the node of this process, where the file is.
        options: options of :class:`GroupAssembler`. Callables run in the actor.

    Raises:
        ImportError: the extra `ray` is not installed.
        ValueError, OSError: :class:`GroupAssembler` raises it.
    """

    def __init__(
        self, *, max_ready: int | None = None, actor: Mapping[str, Any] | None = None, **options: Any
    ):
        ray, self.journal, own = _ray(), options.pop("journal", None), dict(MANY_CALLS)
        self._local = GroupAssembler(**options)  # raises errors of options here, not in the actor
        self.group_key, self.rollout_key = self._local.group_key, self._local.rollout_key
        groups = self._local.groups
        self.max_ready = at_least("max_ready", max_ready, 1) or (None if groups is None else 2 * groups)
        if self.journal is not None:
            here = ray.get_runtime_context().get_node_id()
            own["scheduling_strategy"] = on_node(here)
        remote = ray.remote(**{**own, **(actor or {})})(AssemblerActor)
        self._actor = remote.remote(self.max_ready, options)
        if self.journal is not None:
            self._ask("open_journal", str(Path(self.journal).absolute()))  # the actor's folder may differ
        self._store: Any = None  # the RowStore of this process's node
        self._taker = Taker()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_taker"} | {"_store": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _taker=Taker())

    def _ask(self, method: str, *args: Any, **words: Any) -> Any:
        """Call a method of the actor. Raises the actor's own exception, not Ray's wrapper."""
        return self._get(getattr(self._actor, method).remote(*args, **words))

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
        """Take in a batch of rows, like :meth:`GroupAssembler.put`. Waits while `max_ready` groups are ready.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack; None: no rows.
            patience: seconds to wait; None: forever.

        Raises:
            MissingKeyError, BatchError, StalledError: :meth:`GroupAssembler.put` raises it.
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
            method: a method of the actor.
            rows: at least one, after :func:`enter_rows`.
            args: further arguments of the method.
        """
        rows = rows if device_of(rows).type == "cpu" else rows.cpu()
        columns = columns_to_send(rows, self._local._options)
        table = TensorDict(columns, batch_size=[len(rows)])
        keys = {"lengths": number_of(self._local.loss_mask_key), "rewards": self._local.reward_key}
        for name, numbers in measures(rows, self._local.loss_mask_key, self._local.reward_key).items():
            table[keys[name]] = numbers
        if has_key(rows, ORIGIN):
            table[ORIGIN] = number_column(rows, ORIGIN)
        parts, table[STORED] = cut_by_group(rows, table[self.group_key].reshape(-1))
        return self._keep(
            method, list(map(pack_rows, parts)), pack_thin(table).numpy(), kinds_of(rows), *args
        )

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
        """Like :meth:`GroupAssembler.capacity`. Asking reserves nothing; :meth:`announce` does."""
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
            leftovers: what to do with leftover groups when all writers have ended, as for :func:`assembled`.
            on_lost: what to do when a writer died or raised: ``raise``, or ``go_on`` with the others. The
                groups of the lost writer do not become whole. If all writers are lost, this raises.

        Raises:
            StalledError: a writer is lost; there was no put in time; all writers ended without a batch; or a
                writer got this error from :meth:`GroupAssembler.put`.
            BatchError: groups are left over, with ``raise``; or :meth:`GroupAssembler.take` raised.
            ValueError: an option has an invalid value.
        """
        go_on = on_lost == "go_on"
        check_patience(patience, worker_patience)
        watched = Writers(writers, go_on=go_on)
        return RayBatches(self, self._listen(watched, patience, worker_patience, leftovers))

    def _listen(
        self, writers: Writers, patience: float | None, worker_patience: float | None, leftovers: Leftovers
    ) -> Iterator[TensorDictBase]:
        self._ask("watch", patience, worker_patience)
        puts, heard = 0, time.monotonic()
        while True:
            writers.look()  # before taking, so that the last puts of ended writers are taken
            listening = 0.0 if writers.are_over else LISTENING
            batch, now = self._fetch("take", None, listening)
            if batch is not None or now > puts:
                puts, heard = now, time.monotonic()
            if batch is not None:  # yield whole groups before raising any error
                yield batch
                heard = time.monotonic()
            elif writers.are_over:
                writers.refuse_lost(self, "Set on_lost='go_on' to continue without them")
                break
            elif patience is not None and time.monotonic() - heard >= patience:
                raise self.stalled(f"The writers have been silent for {patience:g} s")
        yield from rest_of(self, leftovers)

    def take(self, n: int | None = None) -> TensorDictBase | None:
        """Like :meth:`GroupAssembler.take`: None while there are too few groups."""
        return self._fetch("take", n, 0.0)[0]

    def take_rest(self) -> TensorDictBase | None:
        """As :meth:`GroupAssembler.take_rest`."""
        return self._fetch("take_rest")[0]

    def _fetch(self, method: str, *args: Any) -> tuple[TensorDictBase | None, int]:
        """Ask for groups, fetch their rows from Ray's object store, and confirm this to the actor.

        Also returns the number of puts, and shows the warnings of the actor.
        """
        # Fetched tickets are also sent with the next request, because a separate confirmation might arrive
        # later.
        fetched, self._taker.fetched = self._taker.fetched, []
        reply: Reply = self._ask(method, *args, self._taker.name, fetched)
        for warning in reply.warnings:
            warnings.warn(warning, stacklevel=3)
        if reply.groups is None:
            return None, reply.puts
        batch = reply.groups.join(self._get(reply.groups.references), self._local)
        self._taker.fetched.append(reply.ticket)
        self._actor.confirm.remote([reply.ticket])
        return batch, reply.puts

    def discard_batch(self) -> int:
        """As :meth:`GroupAssembler.discard_batch`."""
        return self._ask("call", "discard_batch")

    def want(self, groups: int) -> None:
        """As :meth:`GroupAssembler.want`."""
        self._ask("call", "want", groups)

    def reject(self, groups: int) -> None:
        """As :meth:`GroupAssembler.reject`."""
        self._ask("call", "reject", groups)

    def commit(self, step: int | None = None, *, emitted: int | None = None) -> None:
        """As :meth:`GroupAssembler.commit`."""
        self._ask("call", "commit", step, emitted=emitted)

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
    restored = _number("restored", "Whether the assembler continues from a journal or a state.")
    committed = _number("committed", "The step of the last :meth:`commit` with a step, else None.")
    lost_groups = _number("lost_groups", "Number of groups that left without being taken, by reason.")
    survivors = _number("survivors", "Counts of trained and lost groups: :attr:`GroupAssembler.survivors`.")
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
        """Like :meth:`GroupAssembler.state_dict`, with the rows themselves.

        Raises:
            ray.exceptions.ObjectLostError: a node or process that stored rows is gone.
        """
        state, groups = self._ask("state")
        if groups is not None:
            rows = groups.join(self._get(groups.references), self._local)
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


class Taker(threading.local):
    """What the current thread has fetched since it last asked for groups."""

    def __init__(self) -> None:
        self.name, self.fetched = uuid4().hex, list[int]()


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
        tasks: the objects that ``.remote()`` returned, or the futures of an executor of Python.
        go_on: whether to continue without lost writers, while there are others.
    """

    def __init__(self, tasks: Sequence[Any] = (), *, go_on: bool = False):
        self.go_on, self.number = go_on, 0
        self.open: dict[Any, int] = {}
        """The writers that have not ended, with their positions among all."""
        self.failed: list[int] = []
        """The positions of lost writers."""
        self.lost: BaseException | None = None
        """The error of a lost writer, if this writer ends the iteration."""
        self.watch(tasks)

    def watch(self, tasks: Sequence[Any]) -> None:
        """Watch further writers.

        Raises:
            TypeError: a task is neither a reference of Ray nor a future.
        """
        for task in tasks:
            if not isinstance(task, Future) and not type(task).__module__.startswith("ray"):
                raise TypeError(
                    "a task to watch is what .remote() of Ray or submit() of an executor returned; got "
                    f"{task!r:.200}. Run a function in a thread with ThreadPoolExecutor().submit(function)"
                )
            self.open[task] = self.number
            self.number += 1

    @property
    def are_over(self) -> bool:
        """Whether all writers have ended, or a lost one ends the iteration. False without writers."""
        return self.lost is not None or bool(self.number and not self.open)

    def look(self) -> None:
        """Check which writers have ended or died."""
        if self.are_over or not self.open:
            return
        of_ray = [task for task in self.open if not isinstance(task, Future)]
        done = [task for task in self.open if isinstance(task, Future) and task.done()]
        done += _ray().wait(of_ray, num_returns=len(of_ray), timeout=0)[0] if of_ray else []
        for task in done:
            position, error = self.open.pop(task), _error_of(task)
            if error is not None:
                self.failed.append(position)
                if not self.go_on or len(self.failed) == self.number:
                    self.lost = error

    def refuse_lost(self, assembler: Any, remedy: str) -> None:
        """Raise if a lost writer ends the iteration."""
        if self.lost is not None:
            names = listing([f"writer {number}" for number in self.failed])
            why = f"{len(self.failed)} of {self.number} writers lost: {names} ({type(self.lost).__name__}: "
            raise assembler.stalled(f"{why}{self.lost}). {remedy}") from self.lost


def _error_of(task: Any) -> BaseException | None:
    """The error of a task that has ended."""
    if isinstance(task, Future):
        return CancelledError() if task.cancelled() else task.exception()
    ray = _ray()
    try:
        ray.get(task)
    except ray.exceptions.RayError as err:
        return getattr(err, "cause", None) or err
    return None

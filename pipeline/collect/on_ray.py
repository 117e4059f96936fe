"""The assembler in an actor of Ray: writers anywhere put rows into it, and a trainer takes whole groups."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from tensordict import TensorDict, TensorDictBase

from headrace.pipeline.installed import import_extra
from headrace.transforms import GroupAssembler, StalledError, StreamWarning
from headrace.transforms.options import at_least, one_of, takes_options

from .assembling import Leftovers, check_patience, rest_of
from .workers import WorkerWatch

LISTENING = 0.2  # seconds for which the actor waits for a whole group before the trainer looks at writers


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

    What the actor holds is gone when it dies: nothing restarts it, and whoever asks it gets Ray's error. Go
    on with a new one from the last :meth:`state_dict`, which has every put that had returned; or give it a
    `journal`, a path on the node of the actor or one that all nodes see, from which a new one goes on.

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
        # A wrong one is refused here, and not in the actor, which alone opens the journal.
        own_options = GroupAssembler(**{**options, "journal": None})
        self.group_key, groups = own_options.group_key, own_options.groups
        self.max_ready = at_least("max_ready", max_ready, 1) or (None if groups is None else 2 * groups)
        # Writers that wait must not keep the trainer out: Ray's own limit is 1,000 calls.
        own = {"num_cpus": 0, "max_concurrency": 1_000_000}
        remote = ray.remote(**{**own, **(actor or {})})(AssemblerActor)
        self._actor = remote.remote(self.max_ready, options)

    def _ask(self, method: str, *args: Any) -> Any:
        """What the actor returns; what it raises is raised here as it is, after Ray's account of where."""
        ray = import_extra("ray", "ray", type(self).__name__)
        try:
            return ray.get(getattr(self._actor, method).remote(*args))
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
        # A copy, since of a view all would be sent that shares its memory.
        rows = TensorDict({}, batch_size=[0]) if batch is None else batch.clone()
        self._ask("put", rows, check_patience(patience))

    def announce(self, draws: TensorDictBase) -> None:
        """As :meth:`GroupAssembler.announce`."""
        self._ask("call", "announce", draws.clone())

    def room(self, rollouts: int | None = None) -> int:
        """As :meth:`GroupAssembler.room`. Who asks before another has announced is given the same room."""
        return self._ask("call", "room", rollouts)

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
            batch, now = self._ask("take", None, 0.0 if writers.are_over else LISTENING)
            for warning in self._ask("warned"):
                warnings.warn(warning, stacklevel=2)
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
        return self._ask("take", n, 0.0)[0]

    def take_rest(self) -> TensorDictBase | None:
        """As :meth:`GroupAssembler.take_rest`."""
        return self._ask("call", "take_rest")

    def give_up(self) -> int:
        """As :meth:`GroupAssembler.give_up`."""
        return self._ask("call", "give_up")

    def want(self, groups: int) -> bool:
        """As :meth:`GroupAssembler.want`."""
        return self._ask("call", "want", groups)

    def reject(self, groups: int) -> None:
        """As :meth:`GroupAssembler.reject`."""
        self._ask("call", "reject", groups)

    def commit(self) -> None:
        """As :meth:`GroupAssembler.commit`."""
        self._ask("call", "commit")

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
        """As :meth:`GroupAssembler.state_dict`."""
        return self._ask("call", "state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`GroupAssembler.load_state_dict`."""
        self._ask("call", "load_state_dict", state)

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


class AssemblerActor:
    """What runs in the actor: one thing at a time, since only who waits lets others in.

    Args:
        max_ready: whole groups at which writers wait; None: they never do.
        options: of :class:`GroupAssembler`.
    """

    def __init__(self, max_ready: int | None, options: Mapping[str, Any]):
        self.assembler, self.max_ready = GroupAssembler(**options), max_ready
        self.most, self.puts = max_ready, 0
        self.changed = asyncio.Condition()
        self.stall: StalledError | None = None
        self.silent: StalledError | None = None  # a worker is, whatever the others send
        self.said: list[Warning] = []  # which nobody sees here
        self.workers = WorkerWatch(None, None)

    async def watch(self, patience: float | None, worker_patience: float | None) -> None:
        """Watch the workers from now on."""
        self.workers = WorkerWatch(patience, worker_patience)
        self.workers.begin()

    async def put(self, batch: TensorDictBase, patience: float | None) -> None:
        """Put rows once there is room."""
        async with self.changed:
            if not await self._until(lambda: self.most is None or self.assembler.ready < self.most, patience):
                raise self.assembler.stalled(f"Nobody has made room for {patience:g} s")
            self.puts += 1
            self.changed.notify_all()
            try:
                self.stall = None
                with warnings.catch_warnings(record=True) as said:  # nothing else runs here meanwhile
                    warnings.simplefilter("always", StreamWarning)
                    self.assembler.put(batch)
                self.said += [each.message for each in said if isinstance(each.message, Warning)]
                self.workers.saw(batch, self.assembler)
            except StalledError as err:  # is of the stream, and not of this batch: the trainer is to know
                self.stall = err
                raise
            self.silent = None
            try:
                self.workers.check(self.assembler)
            except StalledError as err:  # is of another worker
                self.silent = err

    async def take(self, n: int | None, patience: float) -> tuple[TensorDictBase | None, int]:
        """A batch, if one is there in time, and how many puts there were."""
        async with self.changed:
            taken: list[TensorDictBase] = []
            await self._until(lambda: self._take_into(taken, n), patience)
            self.changed.notify_all()
            return (taken[0] if taken else None), self.puts

    async def warned(self) -> list[Warning]:
        """What the assembler has warned of since this was last asked."""
        said, self.said = self.said, []
        return said

    def _take_into(self, taken: list[TensorDictBase], n: int | None) -> bool:
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

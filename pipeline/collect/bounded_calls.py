"""Limit the time of calls to the workers of a source. Errors name a worker that died or does not answer."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import Finalize
from queue import Empty
from signal import SIGTERM
from typing import Any

import torch

from headrace.transforms import GroupAssembler, StalledError
from headrace.transforms.table import listing

from .reading import HeardQueue
from .workers import WorkerWatch

ANSWER = 600.0
"""Default seconds for an answer: an update of a large model takes minutes. NCCL waits as long."""
LOOK = 0.2  # seconds between two checks for workers that have ended
END = 1.0  # seconds to wait for the exit of a worker, after an error that says that it ended
UPDATE = "update_policy_weights_"
CALLS = frozenset(
    f"{UPDATE} set_seed reset state_dict load_state_dict map_fn get_distant_attr getattr_policy getattr_env "
    "stats".split()
)
"""Methods of TorchRL's collectors that wait for an answer of workers."""


# -- the workers of a source --------------------------------------------------------------------------------


class Workers:
    """The workers of a source of unknown kind. Subclasses know more."""

    hint = ""
    """Where to find the errors of workers, if the source does not raise them."""

    def ask(self) -> None:
        """Begin to find out which workers answer."""

    def ended(self) -> dict[int, str]:
        """The exit of each worker that has ended, by its number."""
        return {}

    def failed(self, error: Exception) -> dict[int, str]:
        """The workers that have failed, if the error of the source can be due to their failure."""
        return {}

    def silent(self) -> list[int]:
        """The workers that have not answered."""
        return []

    def without_rows(self) -> list[int]:
        """The workers without rows for the batch that is waited for."""
        return []


class WorkerProcesses(Workers):
    """The workers of a MultiSyncCollector or MultiAsyncCollector."""

    hint = " The errors of its workers are on stderr, above"

    def __init__(self, source: Any):
        # The collector keeps a reference to this object. A reference back would be a cycle, and then TorchRL
        # would not end the processes of a collector that is no longer used.
        self.processes = source.procs
        self._queue = HeardQueue.of(source) if hasattr(source, "queue_out") else None

    def ended(self) -> dict[int, str]:
        """The workers with an exit code. If some failed, only these: the collector ends the others."""
        return self._failed() or {worker: f"exit code {code}" for worker, code in self._codes().items()}

    def failed(self, error: Exception) -> dict[int, str]:
        """The workers that failed, if the error is one that TorchRL raises for a closed process or pipe."""
        if not isinstance(error, ValueError | OSError | EOFError):
            return {}
        end = time.monotonic() + (0.0 if isinstance(error, ValueError) else END)
        while not (failed := self._failed()) and time.monotonic() < end:
            time.sleep(LOOK / 10)
        return failed

    def _failed(self) -> dict[int, str]:
        codes = self._codes().items()  # SIGTERM is from the collector
        return {worker: f"exit code {code}" for worker, code in codes if code not in (0, -SIGTERM)}

    def _codes(self) -> dict[int, int]:
        codes = {}
        for worker, process in enumerate(self.processes):
            with suppress(ValueError):  # raised for a process that the collector has closed
                codes[worker] = process.exitcode
        return {worker: code for worker, code in codes.items() if code is not None}

    def without_rows(self) -> list[int]:
        """The workers that have sent no rows to the queue."""
        return [] if self._queue is None else self._queue.without_rows()


class WorkerActors(Workers):
    """The workers of a RayCollector."""

    def __init__(self, source: Any):
        self._running = source.remote_collectors
        self.actors = list(self._running)
        self._asked: list[Any] = []

    def ask(self) -> None:
        """Ask each actor. An actor answers after its earlier calls. A dead actor fails at once."""
        self._asked = [actor.__ray_ready__.remote() for actor in self.actors]

    def ended(self) -> dict[int, str]:
        """The actors that have died since they were asked."""
        ray, ended = _ray(), {}
        for worker, asked in enumerate(self._asked):
            if not ray.wait([asked], timeout=0)[1]:
                try:
                    ray.get(asked)
                except ray.exceptions.RayActorError as error:
                    ended[worker] = type(error).__name__
        return ended

    def failed(self, error: Exception) -> dict[int, str]:
        """The actor that the error names; if it names none, the actors that are dead."""
        dead = getattr(error, "actor_id", None)
        found = [worker for worker, actor in enumerate(self.actors) if actor._actor_id.hex() == dead]
        # After an error in its iteration, the collector has no actors, because it has ended them all.
        if found or isinstance(error, _ray().exceptions.RayTaskError) or not self._running:
            return {worker: type(error).__name__ for worker in found}
        self._wait()
        return self.ended()

    def silent(self) -> list[int]:
        """The actors that have not answered since they were asked."""
        ray = _ray()
        return [worker for worker, asked in enumerate(self._asked) if ray.wait([asked], timeout=0)[1]]

    def without_rows(self) -> list[int]:
        """The actors that are busy."""
        self._wait()
        return self.silent()

    def _wait(self) -> None:
        self.ask()
        _ray().wait(self._asked, num_returns=len(self._asked), timeout=END)


def _ray() -> Any:
    return sys.modules["ray"]


def workers_of(source: Any) -> Workers:
    """Return the workers of a source."""
    if hasattr(source, "remote_collectors"):
        return WorkerActors(source)
    if not hasattr(source, "procs"):
        return Workers()
    if hasattr(source, "shutdown"):  # Python waits for worker processes when it ends, also for one that hangs
        Finalize(None, _shut_down, (weakref.ref(source),), exitpriority=0)
    return WorkerProcesses(source)


def _shut_down(collector: weakref.ref[Any]) -> None:
    """End the worker processes of a collector; those that still run after 10 s are killed."""
    found = collector()
    if found is not None:
        found.shutdown(raise_on_error=False)


# -- calls --------------------------------------------------------------------------------------------------


class BoundedCalls:
    """Waits for the answers of a source's workers, but not forever.

    The collectors of TorchRL 0.14.1 with worker processes wait for new weights without checking the workers
    (``SharedMemWeightSyncScheme._wait_for_ack``), and for other answers without a limit
    (``_recv_and_check``). Methods of this class replace both. So the limits also hold for calls of
    the collector itself, and for its option ``update_at_each_batch``. Calls of other sources run in a thread.

    Args:
        source: a collector, or another iterable.
        assembler: lists the waiting groups in errors.
        watch: knows the worker of each group.
        patience: seconds that a worker may take to answer; None: `ANSWER`.
    """

    def __init__(
        self, source: Any, assembler: GroupAssembler, watch: WorkerWatch, patience: float | None = None
    ):
        # A source may pass on the methods of a collector. Then use this collector.
        source = getattr(getattr(source, "shutdown", None), "__self__", source)
        self.assembler, self.patience = assembler, ANSWER if patience is None else patience
        self.workers = workers_of(source)
        self._watch = watch
        self._late: dict[tuple[int, int], int] = {}  # number of answers that are late, by worker
        self._before: threading.Thread | None = None  # a call that has not returned
        self._names = CALLS if hasattr(source, "num_workers") else frozenset({UPDATE})
        self._in_thread = self._names
        if isinstance(self.workers, WorkerProcesses):
            self._replace_waits(source)

    def _replace_waits(self, source: Any) -> None:
        schemes = list((getattr(source, "_weight_sync_schemes", None) or {}).values())
        queues = [getattr(scheme, "_ack_queues", None) for scheme in schemes]
        for number, (scheme, waited) in enumerate(zip(schemes, queues, strict=True)):
            if waited:
                scheme._wait_for_ack = partial(self._wait_for_weights, number, waited)
        # A weight updater or another kind of scheme waits in its own code, so it is called in a thread.
        self._in_thread = frozenset() if schemes and all(queues) else frozenset({UPDATE})
        if hasattr(source, "_recv_and_check"):
            source._recv_and_check = self._receive

    def bounded(self, name: str, found: Any) -> Any:
        """An attribute of the source. If it is a method that waits for workers, its wait is limited."""
        return partial(self._call, name, found) if name in self._names and callable(found) else found

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        call = partial(method, *args, **options)
        with self._naming():
            return self._watched(name, call) if name in self._in_thread else call()

    def _watched(self, name: str, call: Callable[[], Any]) -> Any:
        """Call in a thread. If the call does not return in time, the thread is abandoned."""
        found: list[Callable[[], Any]] = []
        before, call = self._before, with_settings(call)

        def run() -> None:
            if before is not None:
                before.join()  # one call at a time
            try:
                found.append(partial(_same, call()))
            except BaseException as error:  # raised in the caller's thread
                found.append(partial(_raise, error))

        self._before = thread = threading.Thread(target=run, daemon=True)
        end = time.monotonic() + self.patience
        thread.start()
        thread.join(min(LOOK, self.patience))
        if thread.is_alive():
            self.workers.ask()
        while thread.is_alive():
            self._check()
            if time.monotonic() >= end:
                raise self._unanswered(self.workers.silent(), name)
            thread.join(LOOK)
        self._before = None
        return found[0]()

    def _wait_for_weights(
        self,
        scheme: int,
        queues: dict[int, Any],
        worker_ids: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Replace ``_wait_for_ack``: wait for the answer that each worker puts into its queue."""
        workers = list(queues) if worker_ids is None else worker_ids
        silent, end = [], time.monotonic() + (self.patience if timeout is None else timeout)
        for worker in [workers] if isinstance(workers, int) else workers:
            left = 1 + self._late.pop((scheme, worker), 0)
            while left:
                try:
                    queues[worker].get(timeout=max(0.0, min(LOOK, end - time.monotonic())))
                    left -= 1
                except Empty:
                    self._check()
                    if time.monotonic() >= end:  # go on: others may have answered
                        self._late[scheme, worker] = left
                        silent.append(worker)
                        break
        if silent:
            raise self._unanswered(silent, UPDATE)

    def _receive(
        self, pipe: Any, *, timeout: float | None = None, worker_idx: int | None = None, **_: Any
    ) -> Any:
        """Replace ``_recv_and_check``: return the answer of a worker to a message."""
        end = time.monotonic() + (self.patience if timeout is None else timeout)
        while not pipe.poll(LOOK):
            self._check()
            if time.monotonic() >= end:
                raise self._unanswered([] if worker_idx is None else [worker_idx], "a message")
        with self._naming():
            return pipe.recv()

    # -- errors -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if ended := self.workers.ended():
            raise self._failure(ended)

    def _failure(self, ended: dict[int, str]) -> Exception:
        words = listing([f"worker {worker} ({how})" for worker, how in ended.items()])
        return self.noted(RuntimeError(f"At least one process failed: {words}"))

    def _unanswered(self, workers: list[int], call: str) -> StalledError:
        who = listing([f"worker {worker}" for worker in workers]) or "the source"
        return self.assembler.stalled(
            f"{who} has not answered {call} for {self.patience:g} s. Check whether it hangs. If it is only "
            f"slow, raise worker_patience.{self.workers.hint}",
            worker=self._watch.numbered(workers),
        )

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if (named := self.named(error)) is not error:
                raise named from error
            raise

    def named(self, error: Exception) -> Exception:
        """An error that names the failed worker; if none is known, the error of the source itself."""
        if isinstance(error, StalledError) or not (failed := self.workers.failed(error)):
            return error
        return self._failure(failed)

    def noted(self, error: Exception) -> Exception:
        """An error of the source with a note that lists the waiting groups."""
        if hasattr(error, "add_note") and not getattr(error, "__notes__", ()):  # Python 3.11
            words = f"The source has failed.{self.workers.hint}"
            error.add_note(str(self.assembler.stalled(words)))
        return error


def _same(result: Any) -> Any:
    return result


def _raise(error: BaseException) -> None:
    raise error


def with_settings(call: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a call for another thread, so that it runs with the settings of this thread."""
    context = contextvars.copy_context()
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # also the device

    def run() -> Any:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            return context.run(call)

    return run

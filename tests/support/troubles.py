"""Faults of an environment behind each source of rollouts, and how soon each is reported.

Each cell runs in its own processes: an `assembled` source of two workers, one of which has the trouble, and a
pipeline over each batch, after which the workers get new weights. `CELLS` has the required reports;
docs/streams.md shows them as a table.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from processes import process_context
from quizzes import collect, make_quiz
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import SerialEnv
from turns import OneAction

from headrace.pipeline import RayAssembler, assembled, load_pipeline
from headrace.transforms import GroupAssembler, StreamWarning

AT = 12  # number of steps of an environment before its trouble begins
UPDATE = 3  # number of updates of a worker's weights before its trouble begins in an update
FRAMES = 12
PATIENCE = 5.0  # seconds
BOUND = 45.0  # seconds that a cell may take on a machine that starts processes slowly
AFTER = PATIENCE + 10  # seconds for an error to follow a warning, with the time of a batch
ALONE = PATIENCE + 2  # seconds to wait if no error may follow


class Found(NamedTuple):
    """The first report, or that there was no report."""

    kind: str
    """The class of the error or warning, or ``ends`` if the training process ended."""
    words: str
    after: float = 0.0
    """Seconds since the trouble began."""
    stderr: str = ""
    ends: bool = True
    """Whether the process then ended by itself."""


# -- what goes wrong --------------------------------------------------------------------------------------


class At:
    """Does something at a step, and writes the time to a file.

    Args:
        what: what happens; it may return a function that changes the rows of the step.
        begun: file for the time.
        again: whether `what` happens again at each later step.
        at: number of earlier steps.
    """

    def __init__(self, what: Callable[[], Any], begun: Path, again: bool = False, at: int = AT):
        self.what, self.begun, self.again, self.at = what, begun, again, at

    def __call__(self, steps: int) -> Any:
        if steps == self.at:
            self.begun.write_text(str(time.monotonic()))
        pace(steps)
        return self.what() if steps == self.at or (self.again and steps > self.at) else None


def pace(steps: int) -> None:
    """Leave time for other processes after the trouble has begun."""
    if steps > AT:
        time.sleep(0.02)


def fail() -> None:
    raise ArithmeticError("the reward model is gone")


def hang(until: Path) -> None:
    while not until.exists():
        time.sleep(0.1)


def never_end() -> Callable[[TensorDict], TensorDict]:
    def change(rows: TensorDict) -> TensorDict:
        rows["done"][0] = False
        return rows

    return change


def give_nan() -> Callable[[TensorDict], TensorDict]:
    return lambda rows: rows.set("reward", torch.full_like(rows["reward"], torch.nan))


def give_two() -> Callable[[TensorDict], TensorDict]:
    return lambda rows: rows.set("reward", rows["reward"].repeat(1, 2))


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


class Trouble(NamedTuple):
    """A fault, and when it happens."""

    what: Callable[..., Any] | None
    again: bool = False
    in_update: bool = False
    """Whether the fault happens while the worker takes new weights."""


TROUBLES: dict[str, Trouble] = {
    "raises an error": Trouble(fail),
    "hangs": Trouble(hang),
    "has a rollout that never ends": Trouble(never_end, again=True),
    "gives NaN as reward": Trouble(give_nan),
    "is killed (SIGKILL)": Trouble(be_killed),
    "ends (os._exit)": Trouble(leave),
    "is killed during a weight update": Trouble(be_killed, in_update=True),
    "hangs during a weight update": Trouble(hang, in_update=True),
    "uses the ids of another worker": Trouble(None),
    "gives a reward of another shape": Trouble(give_two),
}
TAKE_WEIGHTS = Collector.update_policy_weights_  # each worker runs this function, too


def maker(worker: int, trouble: str, begun: Path) -> Callable[[], Any]:
    """Return a function that makes the environment of one of two workers. The second has the trouble."""
    what, again, in_update = TROUBLES[trouble]
    if what is None:
        return make_quiz
    if what is hang:
        what = functools.partial(hang, begun.with_name("stop"))
    if in_update:
        at = At(what, begun, at=UPDATE) if worker == 1 else None
        return functools.partial(make_with_updates, worker, at)
    troubles = {0: pace, 1: At(what, begun, again)}
    return functools.partial(make_quiz, worker, 2, troubles=troubles)


def make_with_updates(worker: int, at: At | None) -> Any:
    """Make an environment. In its process, the trouble happens at an update of the weights."""
    updates = itertools.count()

    def take_weights(*args: Any, **options: Any) -> None:
        at(next(updates))
        TAKE_WEIGHTS(*args, **options)

    if at is not None:
        Collector.update_policy_weights_ = take_weights
    return make_quiz(worker, 2, troubles=dict.fromkeys((0, 1), pace))


# -- what must be reported ---------------------------------------------------------------------------------


LOST = " got lost between their worker and the assembler"


class Cell(NamedTuple):
    """A required report. ``…`` in its words stands for any text."""

    kind: str
    words: str
    unless_lost: bool = False
    """Whether the rollout may be lost instead, because a slow reader of this source loses rows."""

    @property
    def shown(self) -> str:
        """The class of the error or warning, as on the page."""
        return "the process ends" if self.kind == "ends" else f"`{self.kind}`"

    def is_in(self, found: Found) -> bool:
        """Whether this was reported."""
        words = ".*".join(re.escape(part.strip()) for part in self.words.split("…"))
        if self.unless_lost and LOST in found.words:
            words = LOST + r".*of group \d*[13579]\b"  # the second worker has the odd groups
        return self.kind == found.kind and re.search(words, found.words, re.DOTALL) is not None


PLACES = ("Collector", "MultiSyncCollector", "MultiAsyncCollector", "Ray")


def _worker(code: int) -> Cell:
    words = f"worker 1 (exit code {code}) … The errors of its workers are on stderr … Waiting: group"
    return Cell("RuntimeError", words)


def _writer(words: str, number: str = "1") -> Cell:
    return Cell(
        "StalledError",
        f"1 of 2 writers lost: writer {number} ({words}…). Set on_lost='go_on' to continue … Waiting: group",
    )


_source_silent = Cell("StalledError", f"The source has been silent for {PATIENCE:g} s. Waiting: group")
_no_rows = Cell(
    "StalledError", f"The source has been silent for {PATIENCE:g} s: no rows of worker 1. … Waiting: group"
)
_no_answer = Cell(
    "StalledError",
    f"worker 1 has not answered update_policy_weights_ for {PATIENCE:g} s … on stderr … Waiting: group",
)
_worker_silent = Cell(
    "StalledError", "worker 1 has been silent … while others sent rows; its last was row … Waiting: group"
)
_no_end = Cell("StreamWarning", "rollouts do not end: rollout … Set timeout or timeout_seconds")
_nan = Cell("BatchError", "every reward must be finite; found nan at row … Score those rollouts")
_again = Cell("BatchError", "found again rollout … Do two workers use the same numbers")
CELLS: dict[str, tuple[Cell, ...]] = {
    "raises an error": (
        Cell("ArithmeticError", "the reward model is gone … Waiting: group"),
        _worker(1),
        _worker(1),
        _writer("ArithmeticError: the reward model is gone"),
    ),
    "hangs": (_source_silent, _no_rows, _worker_silent, _worker_silent),
    "has a rollout that never ends": (_no_end, _no_end, _no_end._replace(unless_lost=True), _no_end),
    "gives NaN as reward": (_nan,) * 4,
    "is killed (SIGKILL)": (
        Cell("ends", "exit code -9"),
        _worker(-9),
        _worker(-9),
        _writer("WorkerCrashedError"),
    ),
    "ends (os._exit)": (Cell("ends", "exit code 3"), _worker(3), _worker(3), _writer("WorkerCrashedError")),
    "is killed during a weight update": (
        Cell("ends", "exit code -9"),
        _worker(-9),
        _worker(-9),
        _writer("WorkerCrashedError"),
    ),
    "hangs during a weight update": (
        Cell("StalledError", f"the source has not answered update_policy_weights_ for {PATIENCE:g} s"),
        _no_answer,
        _no_answer,
        _worker_silent,
    ),
    "uses the ids of another worker": (
        _again,
        _again,
        _again,
        _writer("BatchError: … found again rollout … Do two workers use the same numbers", "…"),
    ),
    "gives a reward of another shape": (
        Cell("RuntimeError", "doesn't match the broadcast shape … Waiting: group"),
        _worker(1),
        _worker(1),
        _writer("RuntimeError: shape"),
    ),
}
"""For each trouble, the cells in the order of `PLACES`."""


# -- sources ----------------------------------------------------------------------------------------------


def of_collector(trouble: str, begun: Path, policy: OneAction) -> Iterable[Any]:
    """A collector with both environments in this process."""
    makers = [maker(worker, trouble, begun) for worker in (0, 1)]
    return collect(SerialEnv(2, makers), 2 * FRAMES, 10**6, policy=policy, **PLAIN)


def of_workers(kind: type, trouble: str, begun: Path, policy: OneAction) -> Iterable[Any]:
    makers = [maker(worker, trouble, begun) for worker in (0, 1)]
    frames = FRAMES * (2 if kind is MultiSyncCollector else 1)
    return kind(makers, policy, frames_per_batch=frames, total_frames=-1, **PLAIN)


PLAIN = {"auto_register_policy_transforms": False}
SOURCES: dict[str, Callable[[str, Path, OneAction], Iterable[Any]]] = {
    "Collector": of_collector,
    "MultiSyncCollector": functools.partial(of_workers, MultiSyncCollector),
    "MultiAsyncCollector": functools.partial(of_workers, MultiAsyncCollector),
}


# -- what is reported -------------------------------------------------------------------------------------


def report(stream: Iterator[Any], update: Callable[[], None], trouble: str, begun: Path) -> Found:
    """Train on batches, and update the workers' weights, until a fault is reported."""
    longest = ALONE if trouble == "has a rollout that never ends" else AFTER
    pipeline = load_pipeline(
        "pipeline=grpo",
        "pipeline.stages.collapse.reward=sum",
        "pipeline.stages.split.minibatches=1",
        "~pipeline.stages.filter",
        "~pipeline.stages.weight",
    )
    warned, end = None, time.monotonic() + BOUND
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for batch in stream:
                pipeline(batch)
                update()
                if not begun.exists():
                    said.clear()
                mine = [str(each.message) for each in said if issubclass(each.category, StreamWarning)]
                mine.sort(key=lambda words: LOST in words)  # these reports go last
                if mine and (warned is None or warned.words != mine[0]):
                    warned = Found("StreamWarning", mine[0], since(begun))
                told = warned is not None and LOST not in warned.words
                if warned is not None and told and since(begun) > warned.after + longest:
                    return warned
                if time.monotonic() > end:
                    return warned or Found("nothing", f"silent for {BOUND:g} s")
            return Found("nothing", "the stream has ended")
        except Exception as err:
            words = " ".join([str(err), *getattr(err, "__notes__", ())])
            return Found(type(err).__name__, words, since(begun))


def since(begun: Path) -> float:
    return time.monotonic() - float(begun.read_text() or "nan") if begun.exists() else float("nan")


def in_a_process(told: Any, place: str, trouble: str, folder: Path) -> None:
    """Run a cell in a process that leads its own process group. The collector is not shut down."""
    os.setsid()
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)
    policy = OneAction("left")
    source = SOURCES[place](trouble, folder / "begun", policy)
    if TROUBLES[trouble].what is None:
        (folder / "begun").write_text(str(time.monotonic()))
    stream = assembled(source, GroupAssembler(), patience=PATIENCE, worker_patience=PATIENCE)

    def update() -> None:
        policy.weight.data += 1
        stream.update_policy_weights_()

    told.send(report(iter(stream), update, trouble, folder / "begun"))
    told.close()


def look_at(place: str, trouble: str) -> Found:
    """The report of a trouble, in bounded time."""
    context = process_context()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=in_a_process, args=(theirs, place, trouble, folder))
        process.start()
        theirs.close()
        try:
            found = Found("nothing", f"silent for {BOUND:g} s")
            if mine.poll(BOUND + AFTER):
                found = mine.recv()
            process.join(BOUND)
            found = found._replace(ends=process.exitcode == 0)
        except EOFError:
            process.join()
            found = Found("ends", f"exit code {process.exitcode}", since(folder / "begun"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return found._replace(stderr=(folder / "stderr").read_text(errors="replace"))


def write(assembler: Any, worker: int, trouble: str, folder: Path) -> None:
    """Put rows into an assembler in an actor of Ray, from the common start of both writers until they may
    stop.

    After each put the writer takes the newest weights of the trainer, from a file.
    """
    policy, weights, seen = OneAction("left"), folder / "weights", b""
    rows = collect(maker(worker, trouble, folder / "begun")(), FRAMES, 10**6, policy=policy, **PLAIN)
    try:
        (folder / f"ready {worker}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        if TROUBLES[trouble].what is None:
            (folder / "begun").write_text(str(time.monotonic()))
        for some in rows:
            if (folder / "stop").exists():
                return
            assembler.put(some)
            if weights.exists() and weights.read_bytes() != seen:
                seen = weights.read_bytes()
                policy.load_state_dict(torch.load(io.BytesIO(seen)))
                rows.update_policy_weights_()
    finally:
        Collector.update_policy_weights_ = TAKE_WEIGHTS  # this process serves the next trouble, too


@functools.cache
def on_ray() -> RayAssembler:
    """An assembler in an actor. It is reset for each cell, because starting a process takes seconds."""
    assembler = RayAssembler()
    assembler.put(next(iter(collect(make_quiz(), FRAMES, 1))))  # starts the process that stores rows
    return assembler


def start_when_heard(assembler: RayAssembler, folder: Path) -> None:
    """Let the writers start when the trainer listens: earlier puts are not noted."""
    import ray

    while not ray.get(assembler._actor.__ray_call__.remote(lambda actor: actor.workers.worker_patience)):
        time.sleep(0.01)
    (folder / "go").touch()


def look_at_ray(trouble: str) -> Found:
    """The report of a writer's trouble, in bounded time. Ray must be running."""
    import ray

    assembler = on_ray()
    ray.get(assembler._actor.__ray_call__.remote(lambda actor: actor.__init__(None, {})))
    task = ray.remote(num_cpus=0, max_retries=0)(write)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writers = [task.remote(assembler, worker, trouble, folder) for worker in (0, 1)]
        try:
            while len(list(folder.glob("ready*"))) < len(writers):
                ended, _ = ray.wait(writers, timeout=0.05)
                ray.get(ended)  # raises if a writer has failed or ended too early
            stream = assembler.batches(writers, patience=PATIENCE, worker_patience=PATIENCE)
            threading.Thread(target=start_when_heard, args=(assembler, folder), daemon=True).start()
            policy = OneAction("left")

            def update() -> None:
                policy.weight.data += 1
                torch.save(policy.state_dict(), folder / "new")
                (folder / "new").replace(folder / "weights")

            return report(stream, update, trouble, folder / "begun")
        finally:
            (folder / "stop").touch()
            ray.wait(writers, num_returns=len(writers), timeout=BOUND)  # the next cell reuses the processes


def look_at_all(place: str, at_once: int = len(TROUBLES)) -> dict[str, Found]:
    """The report of each trouble; `at_once` cells run in parallel."""
    if place == "Ray":  # one by one, because all threads of a process share its warnings
        return {trouble: look_at_ray(trouble) for trouble in TROUBLES}
    process_context()  # creates the context that the threads share
    look = functools.partial(look_at, place)
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(TROUBLES, pool.map(look, TROUBLES), strict=True))

"""Calls of a source end in bounded time. The error names a worker that has died or does not answer."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clocks import Clock
from command import Started
from processes import quick_starts
from ray_here import Stored, ray_here

from headrace.pipeline import RepeatSampler, RolloutStream, assembled, informative
from headrace.pipeline.collect.reading import HeardQueue, HeldPipe, Reader
from headrace.transforms import GroupAssembler, StalledError

torchrl, slow = pytest.mark.torchrl, pytest.mark.slow
PATIENCE = 0.5  # seconds
SAID = "worker 1 has not answered {}"


def test_a_copy_of_a_queue_or_pipe_of_workers_reads_the_same_one():
    """While it is copied, it has no queue yet, and asks itself for one."""
    queue, pipe = Queue[int](), Queue[int]()
    assert copy.copy(HeardQueue(queue, 1, True)).full == queue.full
    assert copy.copy(HeldPipe(pipe, None)).empty == pipe.empty


def test_a_closed_reader_reads_no_further_batch_and_its_thread_ends():
    batches = iter(range(3))
    reader = Reader(batches)
    assert reader.get(10) == 0
    reader.close()
    reader.thread.join(10)
    assert (reader.thread.is_alive(), [*batches]) == (False, [1, 2])


@pytest.mark.parametrize(("in_step", "waits"), [(True, [1, 2]), (False, [0, 1, 2])])
def test_the_workers_without_rows_for_the_next_batch_have_sent_the_fewest(in_step, waits):
    """Worker 0 has sent two batches and the others one. A message without a number is no batch."""
    queue = Queue[Any]()
    for message in (((None, 0), 1), (2, 1), ((None, 1), 0), ((None, 2), "paused"), (0, 2)):
        queue.put(message)
    heard = HeardQueue(queue, 3, in_step)
    assert heard.without_rows() == [0, 1, 2]
    while not queue.empty():
        heard.get(timeout=1)
    assert heard.without_rows() == waits


def test_a_worker_goes_on_only_when_its_batch_is_wanted():
    """The first message starts the worker. Other messages, and those of another thread, are sent at once."""
    sent, reader = [], SimpleNamespace(held=[], thread=threading.current_thread())
    pipe = HeldPipe(SimpleNamespace(send=sent.append), reader)
    start, other, goes_on = (None, "continue_random"), (None, "seed"), (1, "continue")
    for message in (other, start, goes_on, other):
        pipe.send(message)
    assert sent == [other, start, other]
    thread = threading.Thread(target=pipe.send, args=(goes_on,))
    thread.start()
    thread.join()
    assert sent[3:] == [goes_on]
    for call in reader.held:
        call()
    assert sent[3:] == [goes_on] * 2
    assert len(reader.held) == 1


# -- worker processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def collecting(kind: str, worker_patience: float = 30.0) -> Iterator[Any]:
    """An assembled collector with two workers, and its own iterator. The assembler has the first batch."""
    from torchrl import collectors
    from turns import OneAction, makers

    with quick_starts():
        collector = getattr(collectors, kind)(
            makers(2),
            OneAction(),
            frames_per_batch=24,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
    try:
        stream, batches = (
            assembled(collector, GroupAssembler(), worker_patience=worker_patience),
            iter(collector),
        )
        stream.assembler.put(next(batches))
        yield stream, batches
    finally:
        for process in collector.procs:
            with contextlib.suppress(ValueError):  # the process is closed
                process.kill()  # TorchRL would wait for a stopped worker
        collector.shutdown(raise_on_error=False)


@torchrl
@slow
@pytest.mark.parametrize("kind", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_an_update_of_the_collector_names_a_dead_worker(kind):
    """The end of the worker is detected at once, not after a timeout."""
    with collecting(kind) as (stream, _):
        stream.procs[1].kill()
        stream.procs[1].join()
        with pytest.raises(RuntimeError, match=r"worker 1 \(exit code -9\)") as caught:
            stream.source.update_policy_weights_()
        if hasattr(caught.value, "add_note"):  # Python 3.11
            (note,) = caught.value.__notes__
            assert "on stderr, above. Waiting: group" in note
        with pytest.raises(RuntimeError, match=r"worker 1 \(exit code -9\)"):
            stream.getattr_env("batch_size")


class WithWorkers:
    """A source with worker processes that says how it is shut down."""

    procs = ()

    def shutdown(self, **options: Any) -> None:
        print(options, flush=True)


def leave_a_source() -> None:
    global source  # it lives until the program ends
    source = WithWorkers()
    assembled(source, GroupAssembler())
    assembled(WithWorkers(), GroupAssembler())


@slow
def test_the_end_of_a_program_shuts_down_the_sources_that_are_left_without_their_errors(tmp_path):
    done = Started(leave_a_source, tmp_path).ends()
    assert (done.stdout, done.stderr) == ("{'raise_on_error': False}\n", "")


@torchrl
@slow
def test_an_update_names_a_worker_that_another_signal_ended():
    """One of the signals is SIGTERM, with which the collector itself ends workers."""
    with collecting("MultiSyncCollector") as (stream, _):
        stream.procs[0].terminate()
        stream.procs[0].join()
        with pytest.raises(RuntimeError, match=r"worker 0 \(exit code -15\)"):
            stream.update_policy_weights_()


@torchrl
@slow
def test_each_call_names_a_stopped_worker_until_it_continues():
    calls: dict[str, Callable[[Any], Any]] = {
        "update_policy_weights_": lambda stream: stream.source.update_policy_weights_(),
        "a message": lambda stream: stream.source.get_distant_attr("frames_per_batch"),
    }
    with collecting("MultiSyncCollector", worker_patience=PATIENCE) as (stream, batches):
        os.kill(stream.procs[1].pid, signal.SIGSTOP)
        for said, call in calls.items():
            with pytest.raises(StalledError, match=rf"{SAID.format(said)} for 0.5 s.*on stderr.*Wait"):
                call(stream)
        os.kill(stream.procs[1].pid, signal.SIGCONT)
        assert stream.pipes[1].poll(60)
        stream.pipes[1].recv()
        stream.policy.weight.data.fill_(2.0)
        stream.update_policy_weights_()
        assert next(batches)["action"].unique().tolist() == [2.0]


@torchrl
@slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_dead_and_a_stopped_actor_of_a_ray_collector_are_named():
    import ray
    from torchrl.collectors.distributed import RayCollector
    from turns import OneAction, makers

    collector = RayCollector(
        makers(2),
        OneAction(),
        frames_per_batch=24,
        remote_configs={"num_cpus": 0},
        collector_kwargs={"auto_register_policy_transforms": False},
    )
    collector.update_policy_weights_()  # connects the actors, which takes seconds
    stream = assembled(collector, GroupAssembler(), worker_patience=PATIENCE)
    process = ray.get(collector.remote_collectors[1].__ray_call__.remote(lambda _: os.getpid()))
    try:
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(StalledError, match=SAID.format("update_policy_weights_")):
            stream.update_policy_weights_()
        os.kill(process, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"worker 1 \(ActorDiedError\)"):
            stream.get_distant_attr("frames_per_batch")
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    ("error", "ends_after", "named"),
    [
        (ValueError("closed"), 0.0, True),
        (ValueError("closed"), 0.05, False),  # its worker has ended before this error is raised
        (OSError("the pipe"), 0.9, True),
        (EOFError("the pipe"), 0.9, True),
        (OSError("the pipe"), 1.1, False),
        (KeyError("else"), 0.0, False),
    ],
)
def test_an_error_of_a_closed_pipe_waits_a_second_for_the_exit_of_its_worker(
    error, ends_after, named, monkeypatch
):
    """Worker 0 was ended by the collector, 1 runs, 2 and 3 fail, and 4 ends well."""
    clock = Clock(monkeypatch, 100.0)

    class Process:
        def __init__(self, code: int | None):
            self.code = code

        @property
        def exitcode(self) -> int | None:
            return self.code if clock.now >= 100.0 + ends_after else None

    def update() -> None:
        raise error

    processes = [Process(code) for code in (-15, None, 1, -9, 0)]
    scheme = SimpleNamespace(_ack_queues={0: Queue()})
    schemes = {"policy": scheme}
    source = Source(update, procs=processes, num_workers=5, _weight_sync_schemes=schemes)
    stream = assembled(source, GroupAssembler())
    with pytest.raises(RuntimeError if named else type(error)) as caught:
        stream.update_policy_weights_()
    if named:
        assert str(caught.value) == (
            "At least one process failed: worker 2 (exit code 1), worker 3 (exit code -9)"
        )
        assert caught.value.__cause__ is error
    assert clock.now - 100.0 <= 1.05


def test_an_error_of_a_call_has_all_its_words():
    """No worker answers, and the source knows only the number of its workers."""
    scheme = SimpleNamespace(_ack_queues={number: Queue() for number in range(3)})
    scheme._ack_queues[1].put("updated")
    source = Source(
        lambda: scheme._wait_for_ack(), procs=(), num_workers=3, _weight_sync_schemes={"policy": scheme}
    )
    stream = assembled(source, GroupAssembler(), worker_patience=0.01)
    words = (
        "worker 0, worker 2 has not answered update_policy_weights_ for 0.01 s. Check whether it hangs. If "
        "it is only slow, raise worker_patience. The errors of its workers are on stderr, above. Waiting: no "
    )
    with pytest.raises(StalledError) as caught:
        stream.update_policy_weights_()
    assert str(caught.value).startswith(words)
    for worker in (0, 1, 2):
        scheme._ack_queues[worker].put("updated")
    with pytest.raises(StalledError, match="worker 0, worker 2 has not"):  # these are the late answers
        scheme._wait_for_ack([0, 2])
    scheme._wait_for_ack(1)
    assert scheme._ack_queues[1].empty()


# -- calls of any source ----------------------------------------------------------------------------------


class Source:
    """A source with a given update, which may wait.

    Args:
        update: the function that an update of the weights calls.
        more: further attributes.
    """

    def __init__(self, update: Callable[..., Any], **more: Any):
        self.update, self.threads = update, []
        self.__dict__ |= more

    def __iter__(self) -> Iterator[None]:
        return iter(())

    def update_policy_weights_(self, *args: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread())
        return self.update(*args, **options)

    def state_dict(self) -> dict[str, Any]:
        self.threads.append(threading.current_thread())
        return {"threads": len(self.threads)}


def test_a_call_without_an_answer_raises_and_the_next_call_runs_after_it():
    may, done = threading.Event(), []

    def update(number: int) -> None:
        assert may.wait(60)
        time.sleep(0.3 / number)
        done.append(number)

    stream = assembled(Source(update), GroupAssembler(), patience=PATIENCE)
    with pytest.raises(StalledError, match=r"the source has not answered update_policy_weights_ for 0.5 s"):
        stream.update_policy_weights_(1)
    assert stream.source.threads[0].daemon  # Python can end while this thread waits
    may.set()
    stream.update_policy_weights_(2)
    assert done == [1, 2]


def test_a_call_has_the_arguments_results_errors_and_settings_of_the_caller():
    setting = contextvars.ContextVar("setting", default=0)
    setting.set(3)

    def update(weights: Any, *, model: str) -> Any:
        if model == "none":
            raise KeyError(model)
        return weights, model, setting.get(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    stream = assembled(Source(update), GroupAssembler())
    for call in (stream.update_policy_weights_, informative(stream, groups=1).update_policy_weights_):
        with torch.no_grad():
            assert call(7, model="policy") == (7, "policy", 3, False, False)
        with torch.inference_mode():
            assert call(7, model="policy") == (7, "policy", 3, False, True)
        with pytest.raises(KeyError, match="none"):
            call(7, model="none")


def test_only_calls_that_may_wait_for_others_leave_the_callers_thread():
    """The states of workers come from other processes, so `state_dict` of their collector may wait, too."""
    here, sampler = threading.current_thread(), RepeatSampler(4, group_size=2, prompts_per_batch=2)
    for more, stays in (({}, True), ({"num_workers": 2}, False)):
        source = Source(lambda: None, **more)
        for stream in (assembled(source, GroupAssembler()), RolloutStream(sampler, source=source)):
            source.threads.clear()
            stream.update_policy_weights_()
            assert stream.state_dict()["source"] == {"threads": 2}
            assert [thread is here for thread in source.threads] == [False, stays]


def test_a_late_answer_does_not_count_for_the_next_call():
    scheme = SimpleNamespace(_ack_queues={0: Queue(), 1: Queue()})
    source = Source(
        lambda: scheme._wait_for_ack(), procs=(), num_workers=2, _weight_sync_schemes={"policy": scheme}
    )
    stream = assembled(source, GroupAssembler(), patience=0.05)
    for answers in ((0,), (0, 1)):  # the answer of worker 1 to the first call comes during the second
        for worker in answers:
            scheme._ack_queues[worker].put("updated")
        with pytest.raises(StalledError, match="worker 1 has not answered"):
            stream.update_policy_weights_()
    for worker in (0, 1, 1):
        scheme._ack_queues[worker].put("updated")
    stream.update_policy_weights_()
    assert all(queue.empty() for queue in scheme._ack_queues.values())


def test_a_thread_bounds_the_waits_that_are_not_known():
    here = threading.current_thread()
    known, unknown = SimpleNamespace(_ack_queues={0: None}), SimpleNamespace()
    for schemes, in_a_thread in (({"policy": known}, False), ({"policy": unknown}, True), (None, True)):
        source = Source(lambda: None, procs=(), num_workers=0, _weight_sync_schemes=schemes)
        stream = assembled(source, GroupAssembler())
        stream.update_policy_weights_()
        stream.state_dict()
        assert [thread is not here for thread in source.threads] == [in_a_thread, False]


@pytest.mark.ray
def test_an_error_names_its_actor_or_the_dead_actors_but_none_for_a_failed_task():
    """An error after the collector has ended its actors itself names no actor, either."""
    errors = pytest.importorskip("ray.exceptions", reason="the extra `ray` is not installed")

    def actor(name: str, answer: Stored) -> Any:
        ready, identity = SimpleNamespace(remote=lambda: answer), SimpleNamespace(hex=lambda: name)
        return SimpleNamespace(_actor_id=identity, __ray_ready__=ready)

    def update(error: Exception) -> None:
        if "shut down" in str(error):
            actors.clear()
        raise error

    dead = Stored(error=errors.RayActorError())
    for error, named in (
        (errors.RayActorError("b"), ["worker 1 (RayActorError)"]),
        (errors.RayTaskError("f", "", None), []),
        (OSError("no connection"), ["worker 0 (RayActorError)", "worker 1 (RayActorError)"]),
        (OSError("shut down"), []),
    ):
        actors = [actor("a", dead), actor("b", dead), actor("c", Stored())]
        with ray_here():
            stream = assembled(Source(update, remote_collectors=actors), GroupAssembler())
            with pytest.raises(Exception) as caught:
                stream.update_policy_weights_(error)
        assert (caught.value is error) == (not named)
        assert str(caught.value).endswith(", ".join(named))

"""Errors of collectors, buffers and streams, word by word: what is required, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from assembly import Line, batch_of_lines
from tensordict import TensorDict

from headrace.pipeline import (
    AssembleOnWrite,
    DrainWriter,
    GroupUnit,
    RepeatSampler,
    RolloutStream,
    StampIds,
    assembled,
    buffer_account,
    drained,
    informative,
    paced,
    stamp_ids,
)
from headrace.pipeline.collect.on_ray import Writers
from headrace.pipeline.collect.workers import WorkerWatch
from headrace.transforms import BatchError, CompletenessGate, GroupAssembler, StalledError
from headrace.transforms.table.schema import ORIGIN

pytestmark = pytest.mark.torchrl

CHECK = (
    "Check that all rollouts of a group are put into this assembler, with done=True on their last rows. To "
    "continue without missing rollouts, set timeout or max_pending_groups"
)
NOTHING = (
    "Waiting: no group. Rows: none arrived. No prompt was announced and no row was put: check that draws() "
    "is called, that the workers have started, and that they put their rows into this assembler"
)


def rows(*groups: int, size: int = 2, version: bool = False) -> TensorDict:
    """Two rollouts of each group, one of which may be missing. The version of a group is its id."""
    lines = [Line(g, 2 * g + r, 0, True, version=g * version) for g in groups for r in range(size)]
    return batch_of_lines(lines)


class WithState:
    """A source with a state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = state_dict


def two_prompts(**options: Any) -> RolloutStream:
    sampler = RepeatSampler(4, group_size=2, prompts_per_batch=2, shuffle=False)
    return RolloutStream(sampler, epochs=1, **options)


def begun() -> RolloutStream:
    stream = two_prompts()
    list(stream.draws())
    return stream


def no_capacity() -> None:
    assembler = GroupAssembler(groups=2, group_size=2, steps_ahead=0)
    draws = paced(RepeatSampler(6, group_size=2, prompts_per_batch=2), assembler, patience=0.01)
    next(draws)
    next(draws)


def writers(*ends: Any) -> Writers:
    """Writers that have ended: with a result, with an error, or cancelled (None)."""
    futures = [Future[Any]() for _ in ends]
    for future, end in zip(futures, ends, strict=True):
        if end is None:
            future.cancel()
        else:
            (future.set_exception if isinstance(end, Exception) else future.set_result)(end)
    return Writers(futures)


def all_lost() -> None:
    found = writers("rows", OSError("gone"), None, KeyError("k"))
    found.look()
    found.refuse_lost(GroupAssembler(), "Begin again")


NEWER = {"max_staleness": 0, "on_stale": "drop", "on_newer": "wait"}
ERRORS: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "The source has ended, and no group became whole. Waiting: group 0 has 1 of 2 (1 completed), 0 puts old. "
    f"Rows: 1 arrived, 1 held. {CHECK}": (
        StalledError,
        lambda: list(assembled([rows(0, size=1)], GroupAssembler(groups=2))),
    ),
    f"The source has ended, and no group became whole. {NOTHING}": (
        StalledError,
        lambda: list(assembled([], GroupAssembler())),
    ),
    "the source has ended with 3 whole groups left over, fewer than the 4 of a batch: set "
    "leftovers='yield' or 'drop'": (
        BatchError,
        lambda: list(assembled([rows(0, 1, 2)], GroupAssembler(groups=4), leftovers="raise")),
    ),
    "The source has ended with 2 whole groups of policy versions newer than assembler.version=0: set "
    "assembler.version where the policy is updated. Waiting: no group. Rows: 6 arrived, 4 held.": (
        StalledError,
        lambda: list(assembled([rows(0, 1, 2, version=True)], GroupAssembler(**NEWER))),
    ),
    "the state lacks a source state, and this source needs one": (
        ValueError,
        lambda: assembled(WithState(), GroupAssembler()).load_state_dict({}),
    ),
    "the state has a source state, and this source takes none": (
        ValueError,
        lambda: assembled([], GroupAssembler()).load_state_dict({"source": {}}),
    ),
    "'Assembled' object has no attribute 'asembler' (did you mean 'assembler'?)": (
        AttributeError,
        lambda: assembled([], GroupAssembler()).asembler,
    ),
    "patience must be finite and > 0; got 0": (
        ValueError,
        lambda: assembled([], GroupAssembler(), patience=0),
    ),
    "worker_patience must be finite and > 0; got 0": (
        ValueError,
        lambda: assembled([], GroupAssembler(), worker_patience=0),
    ),
    "No capacity to dispatch 2 groups for 0.01 s. Waiting: group 0 has 0 of 2 (no rows), 0 puts old, "
    "announced at step 0; this is step 0, group 1 has 0 of 2 (no rows), 0 puts old, announced at step 0; "
    f"this is step 0. Rows: none arrived. {CHECK}": (StalledError, no_capacity),
    "informative() and an assembler with max_staleness need the same number of groups per step, because "
    "capacity() uses it; got groups=3 and GroupAssembler(groups=2)": (
        ValueError,
        lambda: informative(assembled([], GroupAssembler(groups=2, max_staleness=1)), groups=3),
    ),
    "each prompt must be repeated group_size=2 times in a row, and first_rollout must be a multiple "
    "of group_size; got 3 prompts and first_rollout=0": (
        ValueError,
        lambda: stamp_ids([7, 7, 3], group_size=2),
    ),
    "each prompt must be repeated group_size=2 times in a row, and first_rollout must be a multiple "
    "of group_size; got 2 prompts and first_rollout=3": (
        ValueError,
        lambda: stamp_ids([7, 7], group_size=2, first_rollout=3),
    ),
    "each prompt must be repeated group_size=2 times in a row, and first_rollout must be a multiple "
    "of group_size; got 6 prompts and first_rollout=2, with another prompt at row 3": (
        ValueError,
        lambda: stamp_ids([7, 7, 3, 4, 5, 6], group_size=2, first_rollout=2),
    ),
    "group_size must be that of the sampler: it draws 2 rollouts of a prompt, and group_size=4 here. Leave "
    "it out, or change it where you make the sampler": (ValueError, lambda: two_prompts(group_size=4)),
    "load the state before draws() is called: rollouts that were drawn before would be lost. If a collector "
    "draws, let the stream make it: RolloutStream(sampler, source=make), where make(stream) returns the "
    "collector": (ValueError, lambda: begun().load_state_dict(two_prompts().state_dict())),
    f"There was no batch for 0.01 s. {NOTHING}": (
        StalledError,
        lambda: next(iter(two_prompts(patience=0.01))),
    ),
    "a RolloutStream has no attribute 'verison' to set (did you mean 'version'?)": (
        AttributeError,
        lambda: setattr(two_prompts(), "verison", 3),
    ),
    "a task to watch is what .remote() of Ray or submit() of an executor returned; got <built-in function "
    "len>. Run a function in a thread with ThreadPoolExecutor().submit(function)": (
        TypeError,
        lambda: two_prompts().watch(len),
    ),
    f"1 of 3 writers lost: writer 1 (OSError: gone). Begin again. {NOTHING}": (
        StalledError,
        lambda: [
            found := writers(0, OSError("gone"), 0),
            found.look(),
            found.refuse_lost(GroupAssembler(), "Begin again"),
        ],
    ),
    f"3 of 4 writers lost: writer 1, writer 2, writer 3 (KeyError: 'k'). Begin again. {NOTHING}": (
        StalledError,
        all_lost,
    ),
    "group_size must be an integer ≥ 1; got 0": (ValueError, lambda: stamp_ids([7, 7], group_size=0)),
    "leftovers must be one of 'yield', 'drop', 'raise'; got 'keep'": (
        ValueError,
        lambda: two_prompts(leftovers="keep"),
    ),
    "patience must be a finite number or None; got '1'": (
        ValueError,
        lambda: list(two_prompts().draws(wait=True, patience="1")),
    ),
    "epochs must be an integer ≥ 1; got 0": (
        ValueError,
        lambda: RolloutStream(RepeatSampler(4, group_size=2), epochs=0),
    ),
    "groups must be an integer ≥ 1; got 0": (ValueError, lambda: informative([], groups=0)),
    "max_batches must be an integer ≥ 1; got 0": (
        ValueError,
        lambda: informative([], groups=1, max_batches=0),
    ),
}


def check(message: str, kind: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value) == message


@pytest.mark.parametrize("message", ERRORS)
def test_an_error_of_a_stream_has_all_its_words(message):
    check(message, *ERRORS[message])


def test_a_silent_worker_is_described_by_its_last_row(monkeypatch):
    """A worker may be silent for 3 s while another sends three rows. Worker 2 has sent no row at all."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    assembler = GroupAssembler(group_size=2)
    advice = (
        "Check whether it has died (its error is on stderr) or its environment hangs. If it is only slow, "
        "raise worker_patience"
    )
    for senders, silent, last in (((0,), 1, "row 4 of rollout 15 of group 7"), ((0, 1), 2, "no row")):
        watch = WorkerWatch(3.0, None, workers=3)
        watch.begin()

        def saw(worker: int, number: int, group: int, watch: WorkerWatch = watch) -> None:
            batch = batch_of_lines([Line(group, 2 * group + 1, 0, False)])
            watch.saw(batch.set(ORIGIN, torch.tensor([[number, worker, 3, 0, 1]])), assembler)

        watch.saw(rows(0), assembler)  # rows without an origin
        saw(1, 4, 7)
        for number in range(3):
            watch.check(assembler)
            clock[0] += 2
            for worker in senders:
                saw(worker, number, 6)
        with pytest.raises(StalledError) as caught:
            watch.check(assembler)
        assert str(caught.value) == (
            f"worker {silent} has been silent for 6.0 s while others sent rows; its last was {last}. "
            f"{advice}. {NOTHING}"
        )


# -- TorchRL's buffers and environments -------------------------------------------------------------------


def buffer(size: int = 4, **options: Any) -> Any:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    return ReplayBuffer(storage=LazyTensorStorage(size), **options)


def written(*batches: TensorDict, **options: Any) -> Any:
    made = buffer(**options)
    for batch in batches:
        made.extend(batch)
    return made


def numbers(count: int, **columns: Any) -> TensorDict:
    return TensorDict({"n": torch.arange(count), **columns}, batch_size=[count])


def shared() -> Any:
    return written(numbers(2), writer=DrainWriter(), shared=True)


def wrong_writes(times: int) -> Any:
    made = shared()
    for _ in range(times):
        with pytest.raises(BatchError):
            made.extend(numbers(2, m=torch.zeros(2)))
    return next(iter(drained(made)))


def ranked() -> None:
    from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

    writer = TensorDictMaxValueWriter(rank_key="n")
    drained(TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=writer))


def locked() -> None:
    made = shared()
    with made._write_lock:
        next(iter(drained(made, patience=0.01)))


def units(
    *groups: int, expected: int = 2, rollouts: tuple[int, ...] = (), unit: Any = None, **options: Any
) -> Any:
    """A buffer with these rows, each a rollout unless `rollouts` has their ids."""
    from torchrl.data import SamplerWithoutReplacement

    class InOrder(SamplerWithoutReplacement):
        def __repr__(self) -> str:
            return "InOrder()"

    batch = TensorDict({"group_id": groups, "rollout_id": rollouts or [*range(len(groups))]}, [len(groups)])
    batch["expected_rollouts"] = torch.full((len(groups),), expected)
    batch["version"] = torch.tensor(groups)
    sampler = options.pop("sampler", InOrder(shuffle=False))
    made = buffer(
        options.pop("size", 9),
        sampler=sampler,
        batch_size=options.pop("batch_size", 4),
        sample_unit=unit or GroupUnit(),
    )
    made.extend(batch)
    return made


def used_up() -> None:
    made = units(7, 7, 8, 8, unit=GroupUnit(max_uses=1))
    made.sample()
    made.sample()


def consuming() -> Any:
    from torchrl.data.replay_buffers import ConsumingSampler

    return units(7, 7, sampler=ConsumingSampler(max_sample_count=2)).sample()


DROPS = CompletenessGate(on_incomplete="drop")
MISPLACED = (
    "AssembleOnWrite works on rows that are written into a buffer of this process: use append_transform(…, "
    "invert=True); it got {}. For a collector use assembled(collector, assembler). For a buffer that worker "
    "processes write use assembled(drained(buffer), assembler)"
)
LOST = (
    "{} to the buffer failed, and those rows are lost. The cause is in the worker's own error. Restart with "
    "new workers and a new buffer"
)
OF_TORCHRL: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "0 rows of the buffer were read, and 6 were written; it holds 4, so rows were overwritten before they "
    "were read. Make the buffer larger, or read more often. If it was emptied or is new, start a new "
    "drained(buffer)": (BatchError, lambda: next(iter(drained(written(numbers(3), numbers(3)))))),
    "a shared buffer has columns that are no tensors: a, b. Their values stay in the worker's process. "
    "Convert them to numbers, or remove them": (
        BatchError,
        lambda: next(
            iter(drained(written(numbers(2, b=["x", "y"], a=["x", "y"]), writer=DrainWriter(), shared=True)))
        ),
    ),
    "rows must have the columns and widths of the storage; these rows lack n": (
        BatchError,
        lambda: shared().extend(TensorDict({"m": torch.zeros(2)}, [2])),
    ),
    "rows must have the columns and widths of the storage; these rows also have a, b": (
        BatchError,
        lambda: shared().extend(numbers(2, b=torch.zeros(2), a=torch.zeros(2))),
    ),
    "rows must have the columns and widths of the storage; these rows have another width in n": (
        BatchError,
        lambda: shared().extend(TensorDict({"n": torch.zeros(2, 1)}, [2])),
    ),
    LOST.format("1 write"): (BatchError, lambda: wrong_writes(1)),
    LOST.format("2 writes"): (BatchError, lambda: wrong_writes(2)),
    "patience must be finite and > 0; got 0": (ValueError, lambda: drained(buffer(), patience=0)),
    "wait must be finite and > 0; got 0": (ValueError, lambda: drained(buffer(), wait=0)),
    "drained() needs a buffer with writer=DrainWriter() and no consume_after_n_samples; got "
    "RoundRobinWriter": (ValueError, lambda: drained(buffer(shared=True))),
    "drained() needs a buffer with writer=RoundRobinWriter() and no consume_after_n_samples; got "
    "RoundRobinWriter and consume_after_n_samples": (
        ValueError,
        lambda: drained(buffer(consume_after_n_samples=1)),
    ),
    "drained() needs a buffer with writer=RoundRobinWriter() and no consume_after_n_samples; got "
    "TensorDictMaxValueWriter": (ValueError, ranked),
    "a writer has kept the buffer locked for 0.01 s. If it was killed during a write, its last rows are "
    "incomplete: restart with new workers and a new buffer": (StalledError, locked),
    "repeats must be ≥ 1 and worker from 0 to workers - 1; got repeats=0, worker=0, workers=1": (
        ValueError,
        lambda: StampIds(0),
    ),
    "repeats must be ≥ 1 and worker from 0 to workers - 1; got repeats=2, worker=2, workers=2": (
        ValueError,
        lambda: StampIds(2, worker=2, workers=2),
    ),
    "repeats must be ≥ 1 and worker from 0 to workers - 1; got repeats=2, worker=-1, workers=2": (
        ValueError,
        lambda: StampIds(2, worker=-1, workers=2),
    ),
    "AssembleOnWrite needs an assembler without partition_key, because the ids of different partitions would "
    "collide in the buffer: make ids unique over all partitions": (
        ValueError,
        lambda: AssembleOnWrite(GroupAssembler(partition_key="partition")),
    ),
    MISPLACED.format("sampled rows, or a direct call"): (
        TypeError,
        lambda: AssembleOnWrite(GroupAssembler())(numbers(2)),
    ),
    "none of the drawn groups [7, 8] can be used: each has reached max_uses=1, or is too old for InOrder()": (
        BatchError,
        used_up,
    ),
    "none of the drawn groups [7, 8] passes the gate": (
        BatchError,
        lambda: units(7, 7, 8, 8, expected=3, unit=GroupUnit(gate=DROPS)).sample(),
    ),
    "every row needs a group_id ≥ 0; found none at rows [1, 3]: rows without an id would be treated as one "
    "group. Ids are stamped where rollouts are dispatched: by headrace.pipeline.StampIds if the environment "
    "draws its own prompts, else by RepeatSampler.draws()": (
        BatchError,
        lambda: units(7, -1, 8, -1).sample(),
    ),
    "the buffer is full and overwrites rows of rollouts with several rows. Without ('next', 'done') and "
    "'is_init' a rollout that lost its first rows cannot be detected: append InitTracker to the environment, "
    "or make the buffer larger": (
        BatchError,
        lambda: units(7, 7, 8, 8, rollouts=(0, 1, 2, 2), size=4).sample(),
    ),
    "ConsumingSampler counts and frees single rows, which leaves incomplete groups: use another sampler with "
    "GroupUnit(max_uses=2)": (TypeError, consuming),
    "max_uses must be an integer ≥ 1; got 0": (ValueError, lambda: GroupUnit(max_uses=0)),
}


@pytest.mark.torchrl
@pytest.mark.parametrize("message", OF_TORCHRL)
def test_an_error_of_a_buffer_has_all_its_words(message):
    check(message, *OF_TORCHRL[message])


@pytest.mark.torchrl
def test_the_name_of_a_buffer_without_an_assembler_is_its_text():
    made = buffer()
    check(
        f"buffer_account needs a buffer with an AssembleOnWrite; got {made!r}",
        ValueError,
        lambda: buffer_account(made),
    )

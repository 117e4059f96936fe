"""One object for a run: every group that is dispatched is trained once, in one thread or several."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import pytest
import torch
from ray_here import Stored, ray_here
from tensordict import TensorDict

from headrace.pipeline import RayAssembler, RepeatSampler, RolloutStream
from headrace.transforms import BatchError, MissingKeyError, StalledError, StreamWarning

PROMPTS = 12


def sampler(**options) -> RepeatSampler:
    return RepeatSampler(PROMPTS, group_size=2, prompts_per_batch=3, **options)


@pytest.fixture(params=["here", pytest.param("on Ray", marks=pytest.mark.ray)])
def make(request: Any) -> Iterator[Callable[..., RolloutStream]]:
    """A stream whose assembler is in this process, or an actor of Ray."""
    if request.param == "here":
        yield RolloutStream
        return
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with ray_here():
        yield partial(RolloutStream, assembler=RayAssembler)


def rows_of(draws: TensorDict, version: int = 0) -> list[TensorDict]:
    """A row for each rollout. Groups with an even id have equal rewards."""
    rows = draws.clone()
    ids = rows["rollout_id"]
    rows["next", "done"] = torch.ones(len(rows), dtype=torch.bool)
    rows["next", "reward"] = (ids * (rows["group_id"] % 2) % 2).double()
    rows["next", "policy_version"] = torch.full((len(rows),), version)
    return list(rows.split(1))


def groups_of(batch: TensorDict) -> list[int]:
    return list(dict.fromkeys(batch["group_id"].tolist()))


def in_one_thread(stream: RolloutStream, dice: Random) -> list[list[int]]:
    """Run a stream to its end, with rollouts that end in any order. Return the groups of each batch."""
    flying, batches = [], []
    while not stream.ended:
        for draws in stream.draws():
            flying += rows_of(draws, stream.version)
        if flying:
            stream.put(flying.pop(dice.randrange(len(flying))))
        if (batch := stream.take()) is not None:
            batches.append(groups_of(batch))
            stream.version += 1
    return batches


OPTIONS = {
    "nothing ahead": {},
    "two steps ahead": {"steps_ahead": 2},
    "a bound of four versions": {"max_staleness": 4},
    "few rollouts at once": {"max_concurrent_rollouts": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("informative", [False, True])
def test_each_group_is_trained_once_or_counted_as_uninformative(make, name, informative):
    stream = make(sampler(), epochs=2, informative=informative, **OPTIONS[name])
    batches = in_one_thread(stream, Random(0))
    trained = range(informative, 2 * PROMPTS, 1 + informative)
    assert Counter(chain.from_iterable(batches)) == dict.fromkeys(trained, 1)
    assert {len(batch) for batch in batches} == {3}
    assert stream.counts.get("uninformative", 0) == 2 * PROMPTS * informative
    if not informative:
        assert stream.survivors.numbers()["survivors/trained"] == 1
    assert stream.survivors.outstanding == 0


def test_stages_decide_which_groups_are_informative(make):
    """This stage keeps every third group. `max_batches` bounds the groups that are looked at for a batch."""
    looked = []

    def third(rows: TensorDict) -> TensorDict:
        looked.extend(groups_of(rows))
        return rows[rows["group_id"] % 3 == 0]

    stream = make(sampler(shuffle=False), epochs=1, informative=[third])
    assert [sorted(batch) for batch in in_one_thread(stream, Random(2))] == [[0, 3, 6], [9]]
    assert sorted(looked) == [*range(PROMPTS)]
    assert stream.counts["uninformative"] == 16
    few = make(sampler(shuffle=False), epochs=1, informative=[third], max_batches=2)
    with pytest.raises(
        StalledError, match=r"^2 batches had 6 groups, 2 of them informative; a batch needs 3"
    ):
        in_one_thread(few, Random(2))


def test_a_source_is_read(make):
    stream = make(sampler(), source=rows_of(next(sampler().draws())), steps_ahead=0)
    assert [sorted(groups_of(batch)) for batch in stream] == [[0, 1, 2]]


def test_nothing_is_dispatched_ahead_of_the_step_that_trains(make):
    stream = make(sampler(), group_size=2)  # the sampler's own
    (draws,) = stream.draws()
    assert groups_of(draws) == [0, 1, 2]
    for row in rows_of(draws):
        stream.put(row)
    assert list(stream.draws()) == []
    assert stream.take() is not None
    assert list(stream.draws()) == []  # the step has not ended
    stream.version = 1
    (draws,) = stream.draws()
    assert groups_of(draws) == [3, 4, 5]


def test_the_error_for_a_missing_version_says_what_writes_it():
    stream = RolloutStream(sampler(), max_staleness=4, steps_ahead=2)
    rows = next(iter(stream.draws()))
    rows["next", "done"] = torch.ones(len(rows), dtype=torch.bool)
    with pytest.raises(
        MissingKeyError, match=r"'policy_version'.*the workers write it .* in stream\.version"
    ):
        stream.put(rows)


@pytest.mark.parametrize("informative", [False, True])
def test_a_state_goes_on_with_the_same_batches(make, informative):
    """The state is saved between two steps, with rollouts in flight, and loaded into new objects."""
    for steps in (0, 2):
        stream = make(sampler(), epochs=2, informative=informative, max_staleness=4)
        dice, flying, found = Random(steps), [], []
        while len(found) < steps + 1:
            for draws in stream.draws():
                flying += rows_of(draws, stream.version)
            stream.put(flying.pop(dice.randrange(len(flying))))
            if (batch := stream.take()) is not None:
                found.append(groups_of(batch))
                stream.version += 1
        state = stream.state_dict()
        again = make(sampler(), epochs=2, informative=informative, max_staleness=4)
        again.load_state_dict(state)
        found += in_one_thread(again, dice)
        trained = range(informative, 2 * PROMPTS, 1 + informative)
        assert Counter(chain.from_iterable(found)) == dict.fromkeys(trained, 1)


def test_ranks_share_the_prompts_of_each_batch():
    found = []
    for rank in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StreamWarning)
            found += in_one_thread(RolloutStream(sampler(rank=rank, ranks=3), epochs=1), Random(rank))
    assert Counter(chain.from_iterable(found)) == dict.fromkeys(range(PROMPTS), 1)
    assert {len(batch) for batch in found} == {1}


@pytest.mark.parametrize("leftovers", ["drop", "raise"])
def test_leftovers_decides_how_a_stream_ends_with_too_few_groups(make, leftovers):
    stream = make(
        RepeatSampler(4, group_size=2, prompts_per_batch=1), groups=3, epochs=1, leftovers=leftovers
    )
    if leftovers == "raise":
        with pytest.raises(BatchError, match="1 whole group left over"):
            in_one_thread(stream, Random(0))
    else:
        assert [len(batch) for batch in in_one_thread(stream, Random(0))] == [3]
        assert stream.counts["unfinished"] == 2


def test_several_threads_may_dispatch_and_put_while_one_trains():
    stream = RolloutStream(sampler(), epochs=4, max_staleness=4, steps_ahead=2, patience=60)

    def work():
        for draws in stream.draws(wait=True):
            for row in rows_of(draws, stream.version):
                stream.put(row)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = []
    for batch in stream:
        found += groups_of(batch)
        stream.version += 1
    for worker in workers:
        worker.join(60)
    assert Counter(found) == dict.fromkeys(range(4 * PROMPTS), 1)


@pytest.mark.ray
@pytest.mark.parametrize("dies", [False, True])
def test_a_lost_task_ends_the_stream_after_the_last_complete_batch(dies):
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    lost = ray.exceptions.RayActorError() if dies else ray.exceptions.RayTaskError("f", "", OSError("out"))
    with ray_here():
        stream = RolloutStream(sampler(), assembler=RayAssembler, epochs=1)
        for draws in stream.draws():
            for row in rows_of(draws):
                stream.put(row)
            stream.watch(Stored(), Stored(error=lost))
        assert sorted(groups_of(stream.take())) == [0, 1, 2]
        with pytest.raises(StalledError, match=r"1 of 2 writers lost: writer 1 .*Start again"):
            next(iter(stream))


def test_an_unknown_name_of_a_stream_is_answered_with_the_nearest():
    stream = RolloutStream(RepeatSampler(2, group_size=2), epochs=1)
    with pytest.raises(
        AttributeError, match=r"'RolloutStream' object has no attribute 'versoin' \(did you mean"
    ):
        stream.versoin  # noqa: B018
    stream.version = 3
    assert stream.version == 3


def test_a_watched_future_that_raises_ends_the_stream_with_its_error():
    stream = RolloutStream(RepeatSampler(2, group_size=2), steps_ahead=1, epochs=1, patience=60)

    def generate(draws: TensorDict) -> None:
        raise OSError("the engine is gone")

    with ThreadPoolExecutor(1) as pool:
        stream.watch(*[pool.submit(generate, draws) for draws in stream.draws()])
        with pytest.raises(StalledError, match=r"writers lost: writer .*OSError: the engine is gone"):
            list(stream)


def test_an_error_names_puts_that_were_refused_in_other_threads():
    stream = RolloutStream(RepeatSampler(2, group_size=2), max_staleness=4, epochs=1, patience=0.05)
    for draws in stream.draws():
        draws["next", "done"] = torch.ones(len(draws), dtype=torch.bool)
        with suppress(MissingKeyError):  # a thread pool keeps the error of its thread
            stream.put(draws)
    with pytest.raises(
        StalledError, match=r"The stream refused 2 puts, the last by MissingKeyError.*version"
    ):
        next(iter(stream))

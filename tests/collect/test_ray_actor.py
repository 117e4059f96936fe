"""The actor of an assembler on Ray hands out each group once. These tests start no process of Ray."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from lives import once_each
from ray_here import LOOP, Stored, ray_here
from tensordict import TensorDict

from headrace.pipeline import RayAssembler
from headrace.transforms import GroupAssembler, StalledError, StreamWarning

pytest.importorskip("ray", reason="the extra `ray` is not installed")

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def here() -> Iterator[Any]:
    with ray_here() as ray:
        yield ray


def rows(*groups: int) -> TensorDict:
    ids = torch.tensor(groups)
    done = torch.ones(len(ids), dtype=torch.bool)
    return TensorDict({"group_id": ids, "rollout_id": ids, ("next", "done"): done}, batch_size=[len(ids)])


def assembler_of(groups: int) -> RayAssembler:
    assembler = RayAssembler(groups=1, group_size=1, max_ready=groups + 1)
    for group in range(groups):
        assembler.put(rows(group))
    return assembler


def other_process(assembler: RayAssembler) -> RayAssembler:
    """The handle as another process gets it."""
    twin = object.__new__(RayAssembler)
    twin.__setstate__(assembler.__getstate__())
    return twin


def ids_of(batch: TensorDict | None) -> list[int] | None:
    return None if batch is None else batch["group_id"].tolist()


@pytest.fixture
def failing(here, monkeypatch):
    """An event; while it is set, rows cannot be fetched."""
    fails, get = threading.Event(), here.get

    def fetch(found):
        if isinstance(found, list) and fails.is_set():
            raise OSError("the network is gone")
        return get(found)

    monkeypatch.setattr(here, "get", fetch)
    return fails


def test_groups_that_a_taker_could_not_fetch_come_again_only_to_it(failing):
    assembler = assembler_of(4)
    other = other_process(assembler)
    failing.set()
    for take in (assembler.take, assembler.take_rest, assembler.take):
        with pytest.raises(OSError, match="network"):
            take()
    failing.clear()
    assert ids_of(other.take()) == [1]
    assert [ids_of(assembler.take()) for _ in range(4)] == [[0], [2], [3], None]
    assert assembler._actor.made.handed == {}
    assert assembler.emitted == 4


def test_groups_of_a_lost_taker_go_once_to_a_taker_that_begins(failing, monkeypatch):
    assembler = assembler_of(3)
    other, third = other_process(assembler), other_process(assembler)
    failing.set()
    with pytest.raises(OSError, match="network"):
        assembler.take()
    failing.clear()
    assert ids_of(next(other.batches())) == [1]  # the first taker may still be fetching group 0
    began, clock = time.monotonic(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 61)
    assert ids_of(next(other.batches())) == [0]
    assert ids_of(next(third.batches())) == [2]
    assert assembler.take() is third.take() is None
    assert clock() - began < 60


def test_threads_of_a_process_do_not_get_the_same_groups(here, monkeypatch):
    assembler, get, found = assembler_of(2), here.get, []

    def fetch(what):
        if isinstance(what, list) and threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: found.append(ids_of(assembler.take())))
            other.start()  # after the answer of the actor, before its rows are fetched
            other.join()
        return get(what)

    monkeypatch.setattr(here, "get", fetch)
    assert ids_of(assembler.take()) == [0]
    assert found == [[1]]


@pytest.mark.parametrize("patience", [None, 60.0])
def test_a_put_waits_until_groups_are_taken_and_no_longer_than_its_patience(patience):
    assembler = RayAssembler(groups=1, group_size=1, max_ready=1)
    assembler.put(rows(0))
    with pytest.raises(StalledError, match=r"The trainer has taken no batch for 0.01 s"):
        assembler.put(rows(1), patience=0.01)
    taken = LOOP.create_task(taken_soon(assembler))
    assembler.put(rows(1), patience=patience)
    assert taken.done()
    assert ids_of(assembler.take()) == [1]


def test_writers_go_on_if_the_trainer_needs_more_groups_than_may_be_ready():
    """One group may be ready, and a batch needs three. Each request of the trainer lets one more in."""
    assembler = RayAssembler(groups=3, group_size=1, max_ready=1)
    for group in range(3):
        assembler.put(rows(group))
        with pytest.raises(StalledError, match="has taken no batch"):
            assembler.put(rows(9), patience=0.01)
        assert ids_of(assembler.take()) == (None if group < 2 else [0, 1, 2])
    assembler.put(rows(3), patience=0.01)
    with pytest.raises(StalledError, match="has taken no batch"):
        assembler.put(rows(9), patience=0.01)
    assert (assembler.ready, assembler.held) == (1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RayAssembler(max_ready=1.5), "max_ready must be an integer or None; got 1.5"),
        (lambda: RayAssembler(max_ready=0), "max_ready must be an integer ≥ 1; got 0"),
        (lambda: RayAssembler(groups=0), "groups must be an integer ≥ 1; got 0"),
        (
            lambda: RayAssembler().batches(on_lost="stop"),
            "on_lost must be one of 'raise', 'go_on'; got 'stop'",
        ),
        (lambda: RayAssembler().batches(patience=0), "patience must be finite and > 0; got 0"),
        (lambda: RayAssembler().put(None, patience=0), "patience must be finite and > 0; got 0"),
    ],
)
def test_an_invalid_option_of_an_assembler_in_an_actor_is_refused(call, message):
    with pytest.raises(ValueError, match="must be") as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "most"), [({"groups": 2}, 4), ({"groups": 2, "max_ready": 1}, 1), ({}, 20)]
)
def test_twice_the_groups_of_a_batch_may_be_ready_by_default(options, most):
    assembler, put = RayAssembler(group_size=1, **options), 0
    for group in range(20):
        try:
            assembler.put(rows(group), patience=0.01)
            put += 1
        except StalledError:
            break
    assert put == most


async def taken_soon(assembler: RayAssembler) -> Any:
    """The rows that another process takes while a put waits."""
    await asyncio.sleep(0.01)
    return await assembler._actor.made.take(None, 0.0, "another", ())


# -- an assembler here and one in an actor ----------------------------------------------------------------

NUMBERS = (
    *("groups", "max_staleness", "ready", "pending", "held", "counts", "restored", "committed"),
    *("lost_groups", "survivors", "emitted", "ages", "version"),
)


def answers(assembler: Any, seed: int) -> list[Any]:
    """What an assembler answers to calls that only depend on the seed."""
    dice, found, group = Random(seed), [], 0

    def draw(number: int, first: int) -> TensorDict:
        ids = torch.arange(2 * first, 2 * (first + number))
        return TensorDict({"group_id": ids // 2, "rollout_id": ids}, batch_size=[2 * number])

    for _ in range(60):
        call = dice.choice(["put", "put", "put", "announce", "take", "rest", "version", "want", "reject"])
        if call == "put":
            some = draw(2, dice.randrange(max(1, group - 2), group + 2))
            some["next", "done"] = torch.tensor([dice.random() < 0.9 for _ in range(len(some))])
            some["status"] = torch.tensor([3 * (dice.random() < 0.1) for _ in range(len(some))])
            some["version"] = torch.full((len(some),), assembler.version)
            some["number"] = torch.arange(len(some)) + 100 * group
            assembler.put(some[: dice.randint(0, len(some))])
            group += dice.randint(0, 2)
        elif call == "announce":
            some = assembler.never_announced(draw(2, group))
            found.append(some["group_id"].tolist())
            if len(some):
                assembler.announce(some)
        elif call in ("take", "rest"):
            batch = assembler.take() if call == "take" else assembler.take_rest()
            names = (
                "number",
                "expected_rollouts",
                ("headrace", "dispatched"),
                ("headrace", "trainer_version"),
            )
            found.append(None if batch is None else {name: batch[name].tolist() for name in names})
        elif call == "version":
            assembler.version += 1
        elif call == "want":
            assembler.want(dice.randint(1, 3))
        else:
            assembler.reject(1)
        found.append((call, [getattr(assembler, name) for name in NUMBERS if name != "survivors"]))
        found.append([assembler.capacity(), assembler.capacity(3), len(assembler.blocked_by)])
        found.append((assembler.survivors.fates["turns"], assembler.survivors.outstanding))
    words = str(assembler.stalled("It stops", (0, 1))), str(assembler.stalled("It stops"))
    found.append([re.sub(r"\d+ puts? old", "", each) for each in words])
    return [*found, assembler.discard_batch(), assembler.counts, assembler.held, assembler.unfinished()]


@pytest.mark.parametrize("seed", range(4))
def test_an_assembler_in_an_actor_answers_as_one_in_this_process(seed):
    options = {"groups": 2, "group_size": 2, "max_staleness": 2, "on_newer": "wait", "version_key": "version"}
    options |= {"on_duplicate": "drop", "on_stale": "drop", "max_concurrent_rollouts": 30}
    assert answers(RayAssembler(**options, max_ready=10**6), seed) == answers(GroupAssembler(**options), seed)


def test_warnings_of_the_actor_come_when_the_trainer_takes_and_name_its_line():
    """A rollout has lost its first row. The writer gets no warning."""
    assembler, lacks = RayAssembler(), rows(0)
    lacks["headrace", "origin"] = torch.tensor([[1, 0, 1, 0, 1]])
    lacks["expected_rollouts"] = torch.tensor([1])
    assembler.put(lacks)
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert assembler.take() is None
        assert [(each.category, each.filename) for each in caught] == [(StreamWarning, __file__)] * times
        assert all("1 rollout got lost" in str(each.message) for each in caught)


# -- writers that end -------------------------------------------------------------------------------------


def lost(error: Exception) -> Stored:
    from ray.exceptions import RayTaskError

    return Stored(error=RayTaskError("collect", "", error, "a worker", 1, "here"))


@pytest.mark.parametrize("on_lost", ["raise", "go_on"])
def test_all_complete_groups_come_before_the_end_or_the_error_of_writers(on_lost):
    """With `go_on` only the loss of all writers is an error."""
    writers = {"none": [Stored(), Stored()], "one": [Stored(), lost(OSError("out"))]}
    writers["all"] = [lost(OSError("out")), lost(OSError("out"))]
    names = {"one": "1 of 2 writers lost: writer 1", "all": "2 of 2 writers lost: writer 0, writer 1"}
    for name, tasks in writers.items():
        found, assembler = [], assembler_of(3)
        batches = assembler.batches(tasks, on_lost=on_lost)
        if name == "none" or (name, on_lost) == ("one", "go_on"):
            assert [ids_of(batch) for batch in batches] == [[0], [1], [2]]
            continue
        with pytest.raises(StalledError) as caught:
            found.extend(ids_of(batch) for batch in batches)
        assert found == [[0], [1], [2]]
        assert str(caught.value) == (
            f"{names[name]} (OSError: out). Set on_lost='go_on' to continue without them. Waiting: no group. "
            "Rows: 3 arrived."
        )


def test_writers_without_a_put_are_silent_after_their_patience():
    assembler = assembler_of(1)
    batches = assembler.batches(patience=0.05)
    assert ids_of(next(batches)) == [0]
    begun = time.monotonic()
    with pytest.raises(StalledError, match=r"^The writers have been silent for 0\.05 s\. Waiting: no group"):
        next(batches)
    assert time.monotonic() - begun >= 0.05


# -- a journal without rows -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", ["plain", "weights of every second step", "all of it"])
def test_after_kills_each_group_is_once_in_the_saved_weights(world, tmp_path):
    for seed, kills in enumerate((1, 3)):
        once_each(world, seed, kills, tmp_path / str(seed), partial(RayAssembler, max_ready=10**6))


def drawn(*groups: int) -> TensorDict:
    """Two rollouts of each group."""
    ids = torch.tensor([2 * group + rollout for group in groups for rollout in (0, 1)])
    return TensorDict({"group_id": ids // 2, "rollout_id": ids}, batch_size=[len(ids)])


def ended(draws: TensorDict, version: int = 0) -> TensorDict:
    made = draws.clone()
    made["next", "done"] = torch.ones(len(draws), dtype=torch.bool)
    made["next", "policy_version"] = torch.full((len(draws),), version)
    return made


@pytest.mark.parametrize(("at_its_end", "announced"), [(True, True), (False, True), (False, False)])
def test_after_a_crash_a_group_is_as_it_was_announced(at_its_end, announced, tmp_path):
    """The journal was written after another rollout had replaced a failed one."""
    asked: list[int] = []
    options = {"groups": 1, "group_size": 2, "on_failure": "refill", "max_pending_groups": 9}
    options |= {"refill": lambda group, rollouts: asked.append(group), "journal": tmp_path / "journal"}
    assembler = RayAssembler(**options)
    assembler.announce(drawn(0, *([1] * announced)))
    assembler.put(ended(drawn(0)))
    assert ids_of(assembler.take()) == [0, 0]
    rows = ended(drawn(1))
    rows["status"] = torch.tensor([3, 0])
    rows["next", "done"][0] = at_its_end
    assembler.put(rows)
    assert asked == [1]
    rows["rollout_id"][0], rows["status"][0], rows["next", "done"][0] = 100, 0, True
    assembler.put(rows[:1])
    assert (assembler.ready, assembler.held) == (1, 2)
    assembler.commit(1)
    again = RayAssembler(**options)
    assert (again.ready, again.pending, again.held, again.committed) == (0, announced, 0, 1)
    assert "Rows: 3 arrived, 1 failed" in str(again.stalled("They will arrive again"))
    owed = [draws["rollout_id"].tolist() for draws in again.unfinished()]
    assert owed == [[2, 3]] * announced
    again.put(ended(drawn(1)))
    assert again.take()["rollout_id"].tolist() == [2, 3]


def test_groups_in_saved_weights_are_not_owed_even_if_they_were_not_committed(tmp_path):
    options = {"groups": 1, "group_size": 2, "max_staleness": 4, "version_key": ("next", "policy_version")}
    assembler = RayAssembler(**options, max_ready=9, journal=tmp_path / "journal")
    assembler.announce(drawn(0, 1, 2))
    for group in (1, 0, 2):
        assembler.put(ended(drawn(group), version=assembler.version))
        if group != 2:
            assert ids_of(assembler.take()) == [group, group]
            assembler.version += 1
    saved = assembler.emitted
    again = RayAssembler(**options, max_ready=9, journal=tmp_path / "journal")
    again.version = 2
    with pytest.raises(ValueError, match=r"has 0 that were committed and 2 after them\. Begin a new journal"):
        again.commit(5, emitted=3)
    again.commit(5, emitted=saved)
    assert (again.emitted, sum(again.ages.values())) == (2, 2)
    (lost,) = again.unfinished()
    assert lost["group_id"].tolist() == [2, 2]
    late = RayAssembler(**options, max_ready=9, journal=tmp_path / "journal")
    assert (late.emitted, late.committed, late.pending) == (2, 5, 1)


def test_a_crash_evicts_no_group(tmp_path):
    """Complete groups are owed too, so after a crash more groups are owed than may wait at once."""
    options = {"groups": 1, "group_size": 2, "max_pending_groups": 1, "journal": tmp_path / "journal"}
    assembler = RayAssembler(**options)
    for group in range(2):
        assembler.announce(drawn(group))
        assembler.put(ended(drawn(group)))
    again = RayAssembler(**options)
    owed = [group for draws in again.unfinished() for group in draws["group_id"].tolist()]
    assert (owed, again.capacity()) == ([0, 0, 1, 1], 0)

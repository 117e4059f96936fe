"""The actor of an assembler on Ray hands out each group once. These tests start no process of Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lives import once_each
from ray_here import LOOP, ray_here
from tensordict import TensorDict

from headrace.pipeline import RayAssembler
from headrace.transforms import StalledError

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


async def taken_soon(assembler: RayAssembler) -> Any:
    """The rows that another process takes while a put waits."""
    await asyncio.sleep(0.01)
    return await assembler._actor.made.take(None, 0.0, "another", ())


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

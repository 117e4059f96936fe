"""The actor of an assembler on Ray, without Ray's processes: what is handed out, again, and only once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ray_here import ray_here
from tensordict import TensorDict

from headrace.pipeline import RayAssembler

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
    """A handle as it comes out of a message."""
    twin = object.__new__(RayAssembler)
    twin.__setstate__(assembler.__getstate__())
    return twin


def ids_of(batch: TensorDict | None) -> list[int] | None:
    return None if batch is None else batch["group_id"].tolist()


@pytest.fixture
def failing(here, monkeypatch):
    """Rows cannot be fetched while it is set."""
    fails, get = threading.Event(), here.get

    def fetch(found):
        if isinstance(found, list) and fails.is_set():
            raise OSError("the network is gone")
        return get(found)

    monkeypatch.setattr(here, "get", fetch)
    return fails


def test_what_a_taker_could_not_fetch_comes_again_and_nobody_else_gets_it(failing):
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


def test_groups_of_a_taker_that_is_gone_go_once_to_one_that_begins(failing, monkeypatch):
    assembler = assembler_of(3)
    other, third = other_process(assembler), other_process(assembler)
    failing.set()
    with pytest.raises(OSError, match="network"):
        assembler.take()
    failing.clear()
    assert ids_of(next(other.batches())) == [1]  # that one may still be fetching
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
            other.start()  # between a question and its answer's rows
            other.join()
        return get(what)

    monkeypatch.setattr(here, "get", fetch)
    assert ids_of(assembler.take()) == [0]
    assert found == [[1]]

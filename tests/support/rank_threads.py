"""Ranks as threads of one process, so that a law about ranks takes milliseconds."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from headrace.transforms.table import alone

LONGEST = 20.0  # seconds that a rank waits for the others


class OfRank:
    """The process group of one rank, which is a thread."""

    def __init__(self, rank: int, size: int, slots: list[Any], meeting: threading.Barrier, store: dist.Store):
        self.rank, self.size = rank, size
        self._slots, self._meeting, self._store = slots, meeting, store

    def get_group_store(self) -> dist.Store:
        """The store that all ranks share."""
        return self._store

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, each through a pickle, as between processes."""
        self._slots[self.rank] = pickle.dumps(value)
        self._meeting.wait(LONGEST)
        found = [pickle.loads(each) for each in self._slots]
        self._meeting.wait(LONGEST)
        return found


_own = threading.local()  # the group of this thread's rank


def _all_gather(into: list[Tensor], values: Tensor, group: OfRank) -> None:
    found = group.exchange(values)
    if len({(each.shape, each.dtype) for each in found}) != 1:
        raise TypeError(f"ranks must gather equal shapes; got {[each.shape for each in found]}")
    for place, each in zip(into, found, strict=True):
        place.copy_(each)


def _all_gather_object(into: list[Any], value: Any, group: OfRank | None = None) -> None:
    into[:] = (group or _own.group).exchange(value)


def _broadcast_object_list(values: list[Any], sender: int, group: OfRank | None = None) -> None:
    values[:] = (group or _own.group).exchange(values)[sender]


OF_THREADS = {
    "get_world_size": lambda group: group.size,
    "get_rank": lambda group: group.rank,
    "get_backend": lambda group: "gloo",
    "get_global_rank": lambda group, rank: rank,
    "all_gather": _all_gather,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
}


def on_ranks(function: Callable[..., Any], world: int, *more: Any) -> list[Any]:
    """The results of ``function(group, *more)`` on each of `world` ranks, by rank; an error is raised.

    The process group ``world`` is the group of the thread.
    """
    slots, meeting, store = [None] * world, threading.Barrier(world), dist.HashStore()

    def run(rank: int) -> Any:
        _own.group = OfRank(rank, world, slots, meeting, store)
        return function(_own.group, *more)

    resolve = alone.resolve_group
    of_thread = patch.object(alone, "resolve_group", lambda g: _own.group if g == "world" else resolve(g))
    with patch.multiple(dist, **OF_THREADS), of_thread, ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def results_in_threads(function: Callable[..., Any], world: int, *more: Any) -> list[Any]:
    """As `any_rank.results_of`, in threads: the results of ``function(rank, world, *more)`` by rank."""
    return on_ranks(lambda group: function(group.rank, world, *more), world)

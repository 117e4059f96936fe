"""Dispatch no more than can be trained in time: better than to drop what is slow, which is what is long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from tensordict import NestedKey, TensorDictBase

from headrace.transforms import StalledError

from .assembling import check_patience

POLL = 0.05  # seconds between two questions for room


class HasRoom(Protocol):
    """What is asked for room and told what was dispatched: an assembler, or one in an actor of Ray."""

    group_key: NestedKey

    def room(self) -> int:
        """Groups that may be dispatched now."""

    def announce(self, draws: TensorDictBase) -> None:
        """Say which were."""

    def stalled(self, why: str) -> StalledError:
        """The error that says who waits."""


def paced(
    draws: Iterable[TensorDictBase], assembler: HasRoom, *, patience: float | None = None
) -> Iterator[TensorDictBase]:
    """Hand on draws while there is room for their groups, and announce them.

    Who dispatches, in a thread, a process or an actor of its own, waits here until groups were handed out or
    the policy has a newer version (:meth:`GroupAssembler.room`, which needs `groups` and `max_staleness`). In
    the thread that trains nobody would ever make room: give it `patience`.

    Args:
        draws: as ``RepeatSampler.draws()`` yields them, or ``StampIds.draws()``.
        assembler: :class:`GroupAssembler` or :class:`RayAssembler`.
        patience: seconds for which to wait for room. None: without end.

    Raises:
        StalledError: when iterated: there was no room in time.
        BatchError: when iterated: as :meth:`GroupAssembler.announce`.
        ValueError: a `patience` that is not > 0; when iterated: as :meth:`GroupAssembler.room`.

    Example:
        >>> from headrace.pipeline import RepeatSampler
        >>> from headrace.transforms import GroupAssembler
        >>> assembler = GroupAssembler(groups=2, max_staleness=1)
        >>> draws = paced(RepeatSampler(9, group_size=8, prompts_per_batch=3).draws(), assembler)
        >>> next(draws)["group_id"].unique().tolist(), assembler.room()
        ([0, 1, 2], 1)
    """
    return _paced(draws, assembler, check_patience(patience))


def _paced(
    draws: Iterable[TensorDictBase], assembler: HasRoom, patience: float | None
) -> Iterator[TensorDictBase]:
    for draw in draws:
        groups, asked = len(draw.get(assembler.group_key).unique()), time.monotonic()
        while assembler.room() < groups:
            if patience is not None and time.monotonic() - asked >= patience:
                raise assembler.stalled(f"There has been no room for {groups} groups for {patience:g} s")
            time.sleep(POLL)
        assembler.announce(draw)
        yield draw

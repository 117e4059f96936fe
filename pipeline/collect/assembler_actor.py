"""What runs in the actor of Ray: an assembler that lets writers and the trainer wait for one another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase

from headrace.transforms import GroupAssembler, StalledError


class AssemblerActor:
    """What runs in the actor: one thing at a time, since only who waits lets others in.

    Args:
        max_ready: whole groups at which writers wait; None: they never do.
        options: of :class:`GroupAssembler`.
    """

    def __init__(self, max_ready: int | None, options: Mapping[str, Any]):
        self.assembler, self.max_ready = GroupAssembler(**options), max_ready
        self.most, self.puts = max_ready, 0
        self.changed = asyncio.Condition()
        self.stall: StalledError | None = None

    async def put(self, batch: TensorDictBase, patience: float | None) -> None:
        """Put rows once there is room."""
        async with self.changed:
            if not await self._until(self._has_room, patience):
                raise self.assembler.stalled(f"Nobody has made room for {patience:g} s")
            self.puts += 1
            self.changed.notify_all()
            try:
                self.stall = None
                self.assembler.put(batch)
            except StalledError as err:  # is of the stream, and not of this batch: the trainer is to know
                self.stall = err
                raise

    def _has_room(self) -> bool:
        return self.most is None or self.assembler.ready < self.most

    async def take(self, n: int | None, patience: float) -> tuple[TensorDictBase | None, int]:
        """A batch, if one is there in time, and how many puts there were."""
        async with self.changed:
            taken: list[TensorDictBase] = []
            await self._until(lambda: self._take_into(taken, n), patience)
            self.changed.notify_all()
            return (taken[0] if taken else None), self.puts

    def _take_into(self, taken: list[TensorDictBase], n: int | None) -> bool:
        if (batch := self.assembler.take(n)) is not None:
            taken.append(batch)
            self.most = self.max_ready
        elif self.stall is not None:
            stall, self.stall = self.stall, None
            raise stall
        elif self.max_ready is not None:  # what is whole is not enough: writers go on
            self.most = self.assembler.ready + self.max_ready
            self.changed.notify_all()
        return bool(taken)

    async def _until(self, condition: Callable[[], bool], patience: float | None) -> bool:
        """Wait, with the lock, until something holds; False: it did not in time."""
        end = None if patience is None else time.monotonic() + patience
        while not condition():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                await asyncio.wait_for(self.changed.wait(), left)
            except asyncio.TimeoutError:
                return condition()
        return True

    async def call(self, method: str, *args: Any) -> Any:
        """A method of the assembler."""
        async with self.changed:
            self.changed.notify_all()
            return getattr(self.assembler, method)(*args)

    async def read(self, name: str) -> Any:
        """A number of the assembler."""
        return getattr(self.assembler, name)

    async def write(self, name: str, value: Any) -> None:
        """Set one."""
        setattr(self.assembler, name, value)

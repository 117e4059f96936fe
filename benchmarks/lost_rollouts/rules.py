"""Rewrite rules of other projects whose code does not load without servers."""

from __future__ import annotations

from collections.abc import Sequence

from lost_rollouts.clock import Dispatched, System
from lost_rollouts.world import Group, World


class PrimeRL(System):
    """Slots are always full. Groups past the bound are cancelled if they run, or dropped from the queue."""

    def pass_step(self) -> None:
        super().pass_step()
        for group in self.flying():
            if 0 <= group.born < self.version - (self.bound or 0):
                del self.held[group.number]
                self.cancelled.append(group)


class Slime(System):
    """As many groups as slots are in flight, unless as many whole groups wait. No group is too old."""

    def __init__(self, world: World):
        super().__init__(world, None)
        self.collected: list[Group] = []
        """Groups that the waiting trainer has for its step."""

    def room(self) -> int:
        slots = self.world.slots
        return 0 if len(self.ready) >= slots else slots - len(self.flying())

    def take(self) -> Sequence[Group] | None:
        missing = self.world.groups - len(self.collected)
        self.collected, self.ready = self.collected + self.ready[:missing], self.ready[missing:]
        return self.first(self.collected)

    def dispatch(self, free: int) -> Dispatched:
        return super().dispatch(self.world.size * self.world.slots)

    def failed(self, group: Group) -> None:
        self.again.append(group.number)


class Tinker(System):
    """A worker for each group of a step. A group that is too old is generated once more."""

    def room(self) -> int:
        return self.world.groups - len(self.flying())

    def dispatch(self, free: int) -> Dispatched:
        return super().dispatch(self.world.size * self.world.slots)

    def dropped(self, group: Group) -> None:
        self.again.append(group.number)

"""Run headrace in the simulated clock: a `RolloutStream`, or an assembler without announcements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lost_rollouts.clock import Dispatched, System
from lost_rollouts.world import Group, World
from tensordict import TensorDict

from headrace.pipeline import RepeatSampler, RolloutStream
from headrace.transforms import Status

ENDLESS = 100_000  # number of prompts


class Headrace(System):
    """A `RolloutStream`, with its options."""

    def __init__(self, world: World, bound: int | None = 2, journal: Path | None = None, **options: Any):
        super().__init__(world, bound)
        sampler = RepeatSampler(world.prompts or ENDLESS, group_size=world.size, shuffle=False)
        options |= {"groups": world.groups, "max_staleness": bound, "max_idle": 10**9, "journal": journal}
        self.stream = RolloutStream(sampler, epochs=1, version_key="version", on_duplicate="drop", **options)
        self.assembler = self.stream.assembler
        self.assembler._now = lambda: float(self.now)  # a tick is a second
        self.drops = options.get("on_stale") == "drop"
        self.gone: Counter[str] = Counter()
        self.rows: list[tuple[Group, int]] = []

    def dispatch(self, free: int) -> Dispatched:
        self.flush()
        found = []
        for draws in self.stream.draws():
            number, size = int(draws["group_id"][0]), self.world.size
            rollouts = [rollout % size for rollout in draws["rollout_id"].tolist()]
            group = self.held[number] = self.world.group(number)
            group.ended = size - len(rollouts)  # the journal has the rows of the other rollouts
            found.append((group, rollouts))
        return found

    def end(self, group: Group, at: int) -> None:
        self.rows.append((group, at))

    def flush(self) -> None:
        """Put the rows of rollouts that have ended."""
        rows, self.rows = self.rows, []
        if rows:
            self.assembler.put(rows_of(rows, self.world.size))
        for group, _ in rows:
            if any(group.fails) and group.ended == self.world.size and group.number in self.held:
                del self.held[group.number]
                self.gone["failed"] += 1

    def take(self) -> Sequence[Group] | None:
        self.flush()
        batch = self.ask()
        numbers = [] if batch is None else dict.fromkeys(batch["group_id"].tolist())
        groups = [self.held.pop(number, None) or self.restored(number) for number in numbers]
        self.forget()
        return groups or None

    def ask(self) -> TensorDict | None:
        """The next batch."""
        return self.stream.take()

    def restored(self, number: int) -> Group:
        """Make a group from the journal."""
        group = self.world.group(number)
        group.ended = self.world.size
        return group

    def forget(self) -> None:
        """Drop from `held` the groups that the assembler has dropped. The assembler reports a number."""
        timeout = self.assembler.timeout_seconds
        for group in [*self.held.values()]:
            old = self.version - group.born > (self.bound or 0) and self.drops
            if group.ended == self.world.size and old:
                self.gone["stale"] += 1
            elif timeout is not None and group.ended < self.world.size and self.now - group.begun >= timeout:
                self.gone["timeout"] += 1
            else:
                continue
            del self.held[group.number]

    def reason(self, group: Group) -> str:
        return "timeout" if group.ended < self.world.size else ""

    def pass_step(self) -> None:
        super().pass_step()
        self.flush()
        self.stream.version = self.version

    def check(self) -> None:
        """Check that the assembler's counts of lost groups equal the counts of the clock."""
        if (lost := self.assembler.lost_groups) != dict(self.gone):
            raise RuntimeError(f"the assembler lost {lost}, and the harness saw {dict(self.gone)}")

    def save(self) -> Any:
        self.flush()
        saved = self.stream.own_state()
        self.stream.commit()
        return saved

    def load(self, saved: Any) -> None:
        self.stream.load_own_state(saved)
        self.version = self.stream.version


class Unannounced(Headrace):
    """A collector that draws a prompt whenever a slot is free. No group is announced."""

    def dispatch(self, free: int) -> Dispatched:
        self.flush()
        return System.dispatch(self, free)

    def ask(self) -> TensorDict | None:
        return self.assembler.take()


def rows_of(ended: Sequence[tuple[Group, int]], size: int) -> TensorDict:
    """A row for each rollout that has ended."""
    columns: dict[Any, Any] = {
        "group_id": [group.number for group, _ in ended],
        "rollout_id": [group.number * size + at for group, at in ended],
        "version": [group.born for group, _ in ended],
        ("next", "done"): torch.ones(len(ended), dtype=torch.bool),
        "status": [int(Status.FAILED) * group.fails[at] for group, at in ended],
    }
    return TensorDict(columns, batch_size=[len(ended)])

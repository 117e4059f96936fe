"""Simulate a clock, an engine with slots, a trainer, and the system that decides between the two."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Any

from lost_rollouts.world import Group, World

Dispatched = Sequence[tuple[Group, Sequence[int]]]
"""Groups, each with the indices of the rollouts that begin."""


class RunEnds(Exception):
    """The system ends the run."""


class System:
    """Decides which groups are dispatched, trained and dropped. Subclasses are other systems.

    This class dispatches whenever a slot is free, trains groups in the order in which they become whole, and
    drops groups that are too old.
    """

    def __init__(self, world: World, bound: int | None = 2):
        self.world, self.bound = world, bound
        """The world, and the number of versions that a group may be behind the policy (None: any number)."""
        self.version = self.now = 0
        """The policy version, and the current tick."""
        self.cursor = 0
        """Number of prompts that were read from the data."""
        self.again: list[int] = []
        """Prompts that are generated once more."""
        self.held: dict[int, Group] = {}
        """Groups that the system knows, by prompt."""
        self.ready: list[Group] = []
        """Whole groups, in the order in which they became whole."""
        self.cancelled: list[Group] = []
        """Groups whose rollouts the engine stops."""

    # -- methods that the clock calls ---------------------------------------------------------------

    def dispatch(self, free: int) -> Dispatched:
        """Return the rollouts that begin now in the `free` slots."""
        groups = self.draw(min(self.room(), ceil(free / self.world.size)))
        return [(group, range(self.world.size)) for group in groups]

    def end(self, group: Group, at: int) -> None:
        """Rollout `at` of a group has ended, or failed."""
        if group.number in self.held and group.ended == self.world.size:
            if any(group.fails):
                del self.held[group.number]
                self.failed(group)
            else:
                self.whole(group)

    def take(self) -> Sequence[Group] | None:
        """Return the groups of the next step, or None to wait."""
        if self.bound is not None:
            for group in [group for group in self.ready if self.version - group.born > self.bound]:
                self.ready.remove(group)
                del self.held[group.number]
                self.dropped(group)
        return self.first(self.ready)

    def pass_step(self) -> None:
        """Called when the policy was updated."""
        self.version += 1

    def has(self, group: Group) -> bool:
        """Whether the system still holds a group."""
        return self.held.get(group.number) is group

    def reason(self, group: Group) -> str:
        """The reason why a group left, if it does not follow from failures and age."""
        return ""

    def check(self) -> None:
        """Compare the system's own counts with those of the clock."""

    # -- parts that subclasses may use --------------------------------------------------------------

    def room(self) -> int:
        """Number of groups that the system would dispatch with enough free slots."""
        return self.world.slots

    def draw(self, number: int) -> list[Group]:
        """Draw the next prompts, at most `number`."""
        groups = []
        for _ in range(number):
            if self.again:
                groups.append(self.world.group(self.again.pop(0), attempt=1))
            elif self.world.prompts is None or self.cursor < self.world.prompts:
                groups.append(self.world.group(self.cursor))
                self.cursor += 1
        self.held |= {group.number: group for group in groups}
        return groups

    def first(self, ready: list[Group]) -> list[Group] | None:
        """The groups of `ready` that a step trains, or None if there are too few."""
        if len(ready) < self.world.groups:
            return None
        chosen, ready[:] = ready[: self.world.groups], ready[self.world.groups :]
        for group in chosen:
            del self.held[group.number]
        return chosen

    def whole(self, group: Group) -> None:
        self.ready.append(group)

    def failed(self, group: Group) -> None:
        """Called if a rollout of a group failed and the others have ended."""

    def dropped(self, group: Group) -> None:
        """Called if a group was too old."""

    def flying(self) -> list[Group]:
        """Groups that are not whole."""
        return [group for group in self.held.values() if group.ended < self.world.size]

    # -- a restart ----------------------------------------------------------------------------------

    def save(self) -> Any:
        """The content of a checkpoint after a step."""
        return {"version": self.version, "cursor": self.cursor}

    def load(self, saved: Any) -> None:
        """Go on from a checkpoint."""
        self.version, self.cursor = saved["version"], saved["cursor"]


@dataclass
class Account:
    """The fates of all groups that were dispatched.

    The clock counts `busy` and `started` independently, and `check` compares them with the groups.
    """

    world: World
    bound: int | None
    groups: list[Group]
    steps: int
    busy: int
    """Sum of the ticks in which slots generated."""
    started: int
    """Rollouts that the engine began."""
    ended: str
    """Why the run ended early."""
    log: list[tuple[int, str]]
    """Ticks at which a group became ``whole``, and a step began (``take``) and ended (``step``)."""

    def check(self) -> None:
        """Check that each group has one fate, and that each rollout and token counts in one fate.

        Raises:
            RuntimeError: a group, rollout or token is missing, or counts twice.
        """
        tokens, rollouts = sum(self.tokens().values()), sum(self.rollouts().values())
        if (tokens, rollouts) != (self.busy, self.started):
            raise RuntimeError(
                f"{self.started} rollouts and {self.busy} tokens were generated, and {rollouts} and {tokens} "
                "have a fate"
            )
        if lost := [group.number for group in self.groups if group.fate == "lost"]:
            raise RuntimeError(f"prompts {lost[:5]} left without a reason")

    def tokens(self) -> Counter[str]:
        """The number of tokens by fate."""
        return _sums((group.fate or "open", group.spent) for group in self.groups)

    def rollouts(self) -> Counter[str]:
        """The number of rollouts by fate."""
        return _sums((group.fate or "open", group.started) for group in self.groups)

    def counts(self) -> dict[str, Any]:
        """Numbers that can be added over runs."""
        until = 0.75 * self.world.ticks  # later groups could not be trained in time
        cohort = [group for group in self.groups if group.begun <= until and group.fate != "failed"]
        decile = {group.number: group.decile for group in cohort}
        trained = {group.number for group in cohort if group.fate == "trained"}
        ages = Counter(group.age for group in self.groups if group.fate == "trained")
        return {
            "sent": len(decile),
            "sent_slow": sum(each == 9 for each in decile.values()),
            "trained": len(trained),
            "trained_slow": sum(decile[number] == 9 for number in trained),
            "bound": self.bound,
            "steps": self.steps,
            "most_steps": self.world.most_steps(),
            "ages": {str(age): number for age, number in sorted(ages.items())},
            "tokens": dict(self.tokens()),
            "rollouts": dict(self.rollouts()),
            "ended": self.ended,
        }


def _sums(pairs: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, number in pairs:
        total[name] += number
    return total


def simulate(
    system: System,
    after_step: Callable[[Iterable[Group]], None] = lambda groups: None,
    until: int | None = None,
    poll: int = 0,
) -> Account:
    """Run a system in its world.

    Args:
        after_step: a function that is called with all groups when a step is over and the policy is updated.
        until: the tick at which the run is killed, or None for the world's last tick.
        poll: ticks after which a waiting trainer asks again, even if nothing has happened. 0 is never.

    Raises:
        RuntimeError: :meth:`Account.check` raised; or a step trains a group that is not whole, or was trained
            already.
    """
    world, order, now, busy = system.world, count(), 0, 0
    until = world.ticks if until is None else until
    events: list[tuple[int, int, Any]] = []  # tick, order, and a rollout, or None for the end of a step
    queue: deque[tuple[Group, int]] = deque()  # dispatched rollouts without a slot
    running: dict[
        tuple[int, int], tuple[Group, int]
    ] = {}  # the tick at which a rollout began, by ids of group and rollout
    groups: dict[int, Group] = {}  # by id(), because a prompt may be drawn again
    open_groups: dict[int, Group] = {}
    log: list[tuple[int, str]] = []
    free, training, ended = world.slots, False, ""

    def know(group: Group) -> None:
        if id(group) not in groups:
            groups[id(group)] = open_groups[id(group)] = group

    def settle() -> None:
        """Set the fates of groups that the system no longer has."""
        for key, group in list(open_groups.items()):
            if not group.fate and group not in system.cancelled and not system.has(group):
                failed = any(group.fails) and group.ended
                old = system.bound is not None and system.version - group.drawn > system.bound
                group.fate = "failed" if failed else "stale" if old else system.reason(group) or "lost"
            if group.fate:
                del open_groups[key]

    def act() -> bool:
        """Cancel, dispatch and train what is possible at this tick. Return whether anything happened."""
        nonlocal free, training, queue
        happened = False
        for group in system.cancelled:
            group.fate = group.fate or ("failed" if any(group.fails) and group.ended else "stale")
            for at in range(world.size):
                if begun := running.pop((id(group), at), None):
                    group.spent, free = group.spent + now - begun[1], free + 1
            queue = deque(pair for pair in queue if pair[0] is not group)
        system.cancelled.clear()
        for group, rollouts in system.dispatch(max(0, free - len(queue))):
            know(group)
            if group.begun < 0:
                group.begun, group.drawn = now, system.version
            queue.extend((group, at) for at in rollouts)
            happened = True
        while free and queue:
            group, at = queue.popleft()
            group.born = system.version if group.born < 0 else group.born
            group.started, free = group.started + 1, free - 1
            running[id(group), at] = group, now
            if group.number != world.hangs or at:
                heapq.heappush(events, (now + group.ticks[at], next(order), (group, at)))
        if not training and (batch := system.take()):
            for group in batch:
                know(group)
                if group.fate or group.ended < world.size:
                    raise RuntimeError(
                        f"prompt {group.number} is trained, but is {group.fate or 'not whole'}"
                    )
                group.fate, group.age = "trained", system.version - group.born
            training = happened = True
            log.append((now, "take"))
            heapq.heappush(events, (now + world.step, next(order), None))
        settle()
        return happened

    for group in system.held.values():  # groups that a checkpoint has restored
        know(group)
    try:
        while now < until:
            while act():
                pass
            if not events and not poll:
                break
            following = events[0][0] if events else until
            if poll and not training:
                following = min(following, now + poll)
            following = min(following, until)
            busy += (world.slots - free) * (following - now)
            now = system.now = following
            while events and events[0][0] == now:
                what = heapq.heappop(events)[2]
                if what is None:
                    training = False
                    log.append((now, "step"))
                    system.pass_step()
                    after_step(groups.values())
                elif running.pop((id(what[0]), what[1]), None):
                    group, at = what
                    group.ended, group.spent, free = group.ended + 1, group.spent + group.ticks[at], free + 1
                    if group.ended == world.size:
                        log.append((now, "whole"))
                    system.end(group, at)
            settle()
    except RunEnds as end:
        ended = str(end)
    for group, begun in running.values():
        group.spent += now - begun
    started, steps = sum(group.started for group in groups.values()), sum(what == "step" for _, what in log)
    account = Account(world, system.bound, [*groups.values()], steps, busy, started, ended, log)
    account.check()
    system.check()
    return account

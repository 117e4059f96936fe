"""Simulate runs around the real assembler, in ticks: prompts, slots that generate, and a trainer.

Latencies are invented. A prompt has the same latencies under every policy, whenever it is dispatched.
"""

from __future__ import annotations

import heapq
import os
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, count, islice
from math import exp
from random import Random
from statistics import NormalDist, fmean
from typing import Any

import torch
from tensordict import TensorDict

from headrace.transforms import GroupAssembler

FAILED = 3  # the status of a failed rollout
TOKENS = 256


@dataclass(frozen=True)
class World:
    """The part of a run that does not depend on the policy."""

    seed: int = 0
    slots: int = 64
    """Number of rollouts that are generated at once."""
    size: int = 4
    """Number of rollouts of a group."""
    groups: int = 8
    """Number of groups that a step trains."""
    step: int = 20
    """Number of ticks of a step."""
    ticks: int = 3000
    spread: float = 0.9
    """Deviation of log(latency) between prompts. With 0, half of the prompts take 1 tick, the others 100."""
    noise: float = 0.3
    """Deviation of log(latency) between the rollouts of a prompt."""
    failing: float = 0.0
    """Share of the rollouts that fail."""
    equal: float = 0.0
    """Share of the groups that are rejected because their rewards are equal."""
    rows: int = 1
    """Number of rows of a rollout."""
    draw: int = 1
    """Number of groups that are announced at once."""
    prompts: int | None = None
    """None: rollouts do not fail."""
    behind: int = 0
    """Number of versions by which half of the rollouts are generated with older weights."""
    versions: tuple[int, ...] = (1,)
    """Numbers by which the version advances after the steps, in a cycle."""
    tokens: bool = False
    """Whether a rollout has a token for each tick, at most `TOKENS`. If not, rows have no loss mask."""
    takers: tuple[int, ...] = ()
    """Number of groups that each taker takes for a step. Without numbers, one taker takes all groups."""

    def group(self, number: int) -> Group:
        """Make a prompt with its latencies."""
        dice = Random(f"{self.seed} {number}")
        hard = min(max(dice.random(), 1e-6), 1 - 1e-6)  # the quantile of the prompt's latency
        if self.spread:
            middle = 20 * exp(self.spread * NormalDist().inv_cdf(hard))
            ticks = [max(1, round(middle * exp(self.noise * dice.gauss(0, 1)))) for _ in range(self.size)]
        else:
            ticks = [100 if hard >= 0.5 else 1] * self.size
        fails = [dice.random() < self.failing for _ in range(self.size)]
        return Group(number, int(10 * hard), ticks, fails, dice.random() >= self.equal)

    def most_steps(self) -> float:
        """An upper bound of the number of steps, for a trainer or for slots that are always busy."""
        some = [self.group(number) for number in range(2000)]
        useful = fmean(group.varied and not any(group.fails) for group in some)
        work = fmean(sum(group.ticks) for group in some) / useful
        return min(self.ticks / self.step, self.ticks * self.slots / (self.groups * work))


@dataclass(eq=False)
class Group:
    """A prompt that was drawn, and its fate."""

    number: int
    decile: int
    ticks: list[int]
    fails: list[bool]
    varied: bool
    begun: int = 0
    """The tick at which the group was dispatched."""
    born: int = 0
    """The step at which the group was dispatched."""
    ended: int = 0
    """Number of rollouts that have ended or failed."""
    spent: int = 0
    """Ticks of the rollouts that have ended."""
    wasted: int = 0
    """Ticks of ended rollouts that were dispatched again."""
    fate: str = ""
    """``trained``, ``masked``, ``rejected``, ``failed`` or ``stale``. Empty if it is outstanding."""
    oldest: int = 10**9
    """The policy version of the group's oldest row."""
    age: int = 0
    """Number of steps since that version was replaced."""


@dataclass
class Run:
    """A run of a world, around an assembler with the given options."""

    world: World
    options: dict[str, Any] = field(default_factory=dict)
    paced: bool = True
    announces: bool = True
    make: Callable[..., Any] = GroupAssembler

    def __post_init__(self) -> None:
        world, options = (
            self.world,
            {"groups": self.world.groups, "group_size": self.world.size} | self.options,
        )
        if "refill" in options.values():
            options["refill"] = self.refill
        self.assembler = self.make(version_key="version", max_idle=10**9, **options)
        self.assembler._now = lambda: self.now / 1000  # a tick is a millisecond
        self.known: dict[int, Group] = {}
        self.step = self.now = self.since = 0
        self.waits: list[tuple[int, int]] = []
        """For each step: the ticks that it waited, and those that the slowest outstanding rollout then
        needed.
        """
        self.batch: list[Group] = []
        self.free, self.busy, self.fresh = world.slots, False, count()
        self.queue: deque[tuple[int, int, int]] = deque()  # group, rollout, number of the refill
        self.events: list[tuple[int, int, Any]] = []
        self.order, self.again = count(), count(10**9)
        self.last = {0: 0}
        """The last step of each version."""

    # -- workers ------------------------------------------------------------------------------------

    def room(self) -> int:
        """Number of groups to dispatch now."""
        world, assembler = self.world, self.assembler
        left = world.draw if world.prompts is None else min(world.draw, world.prompts - len(self.known))
        if not self.paced:
            return left if self.free else 0
        idle, room = assembler.pending == 0, assembler.capacity(world.size)
        return left if room >= left else room if idle else 0

    def dispatch(self) -> None:
        while self.free and not self.queue and (room := self.room()):
            groups = [self.world.group(number) for number in islice(self.fresh, room)]
            self.known |= {group.number: group for group in groups}
            for group in groups:
                group.begun, group.born = self.now, self.step
                self.queue.extend(
                    (group.number, at, group.number * self.world.size + at) for at in range(self.world.size)
                )
            if self.announces:
                ids = [
                    (group.number, group.number * self.world.size + at)
                    for group in groups
                    for at in range(self.world.size)
                ]
                self.assembler.announce(columns(group_id=[g for g, _ in ids], rollout_id=[r for _, r in ids]))
            self.start()
        self.start()

    def start(self) -> None:
        while self.free and self.queue:
            number, at, rollout = self.queue.popleft()
            behind = self.world.behind * (rollout % 2)
            what = number, at, rollout, max(0, self.assembler.version - behind)
            heapq.heappush(self.events, (self.now + self.known[number].ticks[at], next(self.order), what))
            self.free -= 1

    def ended(self, number: int, at: int, rollout: int, version: int) -> None:
        """End a rollout: put its rows."""
        group, rows, self.free = self.known[number], self.world.rows, self.free + 1
        group.spent, group.ended = group.spent + group.ticks[at], group.ended + 1
        fails = group.fails[at] and rollout < 10**9  # a refilled rollout does not fail
        group.oldest = group.oldest if fails else min(group.oldest, version)
        batch = TensorDict(
            {
                "group_id": torch.full((rows,), number),
                "rollout_id": torch.full((rows,), rollout),
                "version": torch.full((rows,), version),
                "status": torch.tensor([0] * (rows - 1) + [FAILED * fails]),
                "next": {"done": torch.arange(1, rows + 1) == rows},
                "log_probs": {"full": torch.zeros(rows, 1)},
            },
            batch_size=[rows],
        )
        if self.world.tokens:
            lengths = torch.tensor([0] * (rows - 1) + [group.ticks[at]])
            batch["masks", "all_assistant_mask"] = torch.arange(TOKENS) < lengths.unsqueeze(1)
        self.assembler.put(batch)
        if fails and self.assembler.on_failure == "drop":
            group.fate = "failed"

    def refill(self, number: int, rollouts: int) -> None:
        group = self.known[number]
        group.ended -= rollouts
        if rollouts == self.world.size:  # the rows of the group were dropped, because they are too old
            group.wasted, group.spent, group.oldest = group.wasted + group.spent, 0, 10**9
        self.queue.extend((number, at, next(self.again)) for at in range(rollouts))

    # -- the trainer --------------------------------------------------------------------------------

    def take(self) -> bool:
        """Take the missing groups of a step. Return True once the step has all its groups."""
        world, assembler = self.world, self.assembler
        ends = list(accumulate(world.takers))
        while (have := len(self.batch)) < world.groups:
            if world.equal:  # as informative() does
                assembler.want(world.groups - have)
            batch = assembler.take(world.takers[bisect_right(ends, have)] if ends else None)
            if batch is None:
                return False
            self.take_in([self.known[number] for number in dict.fromkeys(batch["group_id"].tolist())])
        return True

    def take_in(self, groups: list[Group]) -> None:
        for group in groups:
            group.age = self.step - self.last[group.oldest]
            group.fate = "trained" if group.varied else "rejected"
            if self.assembler.on_stale == "mask" and group.age > self.assembler.max_staleness:
                group.fate = "masked"
        self.batch += [group for group in groups if group.varied]
        if rejected := sum(not group.varied for group in groups):
            self.assembler.reject(rejected)

    def go(self) -> Run:
        """Run until the last tick, or until nothing more happens."""
        needs = 0
        while self.now <= self.world.ticks:
            self.dispatch()
            if not self.busy and self.take():
                self.waits.append((self.now - self.since, needs - self.since))
                self.batch, self.busy, needs = [], True, 0
                heapq.heappush(self.events, (self.now + self.world.step, next(self.order), None))
            self.dispatch()
            if not self.events:
                break
            if not self.busy and not needs:
                needs = max(tick for tick, _, _ in self.events)
            self.now, _, what = heapq.heappop(self.events)
            if what is None:
                self.assembler.version += self.world.versions[self.step % len(self.world.versions)]
                self.busy, self.step, self.since = False, self.step + 1, self.now
                self.last[self.assembler.version] = self.step
            else:
                self.ended(*what)
        while self.world.prompts is not None and (rest := self.assembler.take_rest()) is not None:
            self.take_in([self.known[number] for number in dict.fromkeys(rest["group_id"].tolist())])
        return self

    # -- results ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Set the fates of groups that have left without being taken."""
        bound = self.assembler.max_staleness
        for group in self.known.values():
            if (
                not group.fate
                and group.ended == self.world.size
                and bound is not None
                and self.step - group.born > bound
            ):
                group.fate = "stale"

    def table(self) -> dict[str, float]:
        """Return a line of the table in docs/streams.md."""
        self.close()
        cohort = [
            g
            for g in self.known.values()
            if g.begun <= 0.75 * self.world.ticks and g.varied and g.fate != "failed"
        ]
        sent, trained = (
            Counter(g.decile for g in cohort),
            Counter(g.decile for g in cohort if g.fate == "trained"),
        )
        survival = [trained[decile] / sent[decile] for decile in range(10) if sent[decile]]
        total, ages = sum(trained.values()) or 1, [g.age for g in self.known.values() if g.fate == "trained"]
        spent = sum(g.spent + g.wasted for g in self.known.values()) or 1
        lost = sum(g.wasted + g.spent * (g.fate not in ("", "trained")) for g in self.known.values())
        return {
            "bias": 100 * max(abs(trained[d] / total - sent[d] / len(cohort)) for d in range(10)),
            "slowest": survival[-1] / (fmean(survival) or 1),
            "speed": self.step / self.world.most_steps(),
            "waste": 100 * lost / spent,
            "age": fmean(ages) if ages else 0.0,
            "oldest": max(ages, default=0),
        }


def columns(**numbers: list[int]) -> TensorDict:
    """Make columns with one row for each number."""
    tensors = {name: torch.tensor(each) for name, each in numbers.items()}  # tensordict is slow with lists
    return TensorDict(tensors, batch_size=[len(next(iter(numbers.values())))])


def side_by_side(function: Callable[..., Any], runs: Sequence[Sequence[Any]], *, quick: bool) -> list[Any]:
    """Call a function for each run, in one process per core or, if `quick`, in this process."""
    if quick:
        return [function(*run) for run in runs]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, *zip(*runs, strict=True)))

"""Asynchronous runs of NeMo RL's protocol in simulated time, with prompts, generating slots and a trainer.

The pumps and the buffer are stand-ins that follow nemo_rl/algorithms/single_controller.py and
async_utils/replay_buffer.py at 7ea279abfb. `tests/support/peer_checks.py nemo_rl` uses NeMo RL's own code.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from math import exp
from random import Random
from statistics import NormalDist
from typing import Any


class Instant(selectors.SelectSelector):
    """A selector that never waits. The time that it would wait passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing happens any more"
        self.now += timeout
        return []


def in_simulated_time(run: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine whose sleeps take no time. The same run gives the same result."""
    selector = Instant()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(run)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@dataclass(frozen=True)
class World:
    """The conditions of a run, which do not depend on the sampler."""

    seed: int = 0
    groups: int = 4
    """Prompt groups of a step, G."""
    step: float = 20.0
    """Seconds of a step."""
    spread: float = 0.9
    """Std of the logarithm of the latency. 0: half of the prompts take 1 second, the others 100."""
    slots: int = 16
    """Number of prompts that are generated at once."""
    failing: float = 0.0
    """Share of the prompts that fail."""
    together: int = 1
    """The least number of groups for `select`, ``min_groups_for_streaming_train``."""
    seconds: float = 3000.0

    def prompt(self, number: int) -> tuple[float, float, bool]:
        """The quantile of a prompt's latency, the latency in seconds, and whether the prompt fails."""
        dice = Random(f"{self.seed} {number}")
        hard, fails = dice.random(), dice.random() < self.failing
        if not self.spread:
            return hard, 100.0 if hard >= 0.5 else 1.0, fails
        return hard, 20 * exp(self.spread * NormalDist().inv_cdf(hard)), fails


@dataclass
class Meta:
    """The rows of some groups."""

    tags: list[dict[str, int]]

    def concat(self, *others: Meta) -> Meta:
        return Meta([tag for each in (self, *others) for tag in each.tags])


class Buffer:
    """The methods of TQReplayBuffer that pumps and samplers use."""

    def __init__(self) -> None:
        self.meta_list: list[Meta | None] = []
        self.start_weight_list: list[int] = []
        self.target_step_list: list[int | None] = []
        self.ready_list: list[bool] = []
        self._group_ids: list[int] = []
        self._fresh = count()
        self.cleared = 0
        """Groups whose rows were deleted."""

    def reserve(self, *, weight_version: int, target_step: int | None = None) -> int:
        self.meta_list.append(None)
        self.start_weight_list.append(weight_version)
        self.target_step_list.append(target_step)
        self.ready_list.append(False)
        self._group_ids.append(next(self._fresh))
        return self._group_ids[-1]

    async def commit(self, group_id: int, record: dict[str, int], **versions: int) -> None:
        at = self._group_ids.index(group_id)
        self.meta_list[at], self.ready_list[at] = Meta([record]), True

    async def remove_group(self, group_id: int) -> int:
        return await self.remove([self._group_ids.index(group_id)], remove_in_dp=False)

    async def remove(self, idxs: list[int], remove_in_dp: bool) -> int:
        self.cleared += len(idxs) * remove_in_dp
        for at in sorted(idxs, reverse=True):
            for column in (self.meta_list, self.start_weight_list, self.target_step_list):
                del column[at]
            del self.ready_list[at], self._group_ids[at]
        return len(idxs)

    def count_for_target_step(self, target_step: int) -> int:
        return self.target_step_list.count(target_step)

    def __len__(self) -> int:
        return len(self.ready_list)


async def _nothing(run: Run) -> None:
    pass


@dataclass
class Run:
    """A run of a world with a sampler, and the fate of each prompt."""

    world: World
    make_sampler: Callable[[Any], Any]
    make_buffer: Callable[[], Any] = Buffer
    make_pump: Callable[[Run], Coroutine[Any, Any, None]] | None = None
    after_step: Callable[[Run], Coroutine[Any, Any, None]] = _nothing
    """What the trainer does when the version has advanced."""
    capacity: int | None = None
    """``max_buffered_rollouts``, if it is more than the sampler requires."""
    version: int = 0
    """Policy version of the trainer, which counts its steps."""
    sent: list[int] = field(default_factory=list)
    """Prompts that were dispatched."""
    failed: set[int] = field(default_factory=set)
    trained: Counter[int] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    evicted: int = 0
    most: int = 0
    """The greatest number of groups that were outstanding after a dispatch."""
    waiting: int = 0
    """Groups in the buffer at the end."""
    in_step: int = 0
    """Groups that the current step has taken."""
    sizes: set[int] = field(default_factory=set)
    """Groups that `select` gave at once."""

    def __post_init__(self) -> None:
        self.buffer = self.make_buffer()
        self.sampler = self.make_sampler(self.buffer)
        needed = self.sampler.required_buffer_capacity(self.world.groups)
        self.sampler.set_dispatch_index(self.version)
        self.permits = asyncio.Semaphore(max(self.capacity or 0, needed or 0))

    def go(self) -> Run:
        in_simulated_time(self._go())
        return self

    async def _go(self) -> None:
        pump = asyncio.ensure_future((self.make_pump or _pump)(self))
        try:
            await asyncio.wait_for(self._train(), self.world.seconds)
        except asyncio.TimeoutError:
            self.waiting = len(self.buffer)
        finally:
            if pump.done():
                pump.result()
            pump.cancel()

    # -- generation ---------------------------------------------------------------------------------

    def batches(self) -> Iterator[list[int]]:
        """Endless batches of prompts."""
        fresh = count()
        while True:
            yield list(islice(fresh, self.world.groups))

    def dispatched(self, prompt: int) -> None:
        """Note that a prompt got its slot."""
        self.sent.append(prompt)
        gone = len(self.failed) + sum(self.trained.values()) + self.evicted
        self.most = max(self.most, len(self.sent) - gone + self.in_step)

    # -- the trainer --------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Do what `_train_pump` does: evict and select until the step is full, train, advance the version."""
        while True:
            while self.in_step < self.world.groups:
                evicted = await self.sampler.evict(current_train_weight=self.version)
                self._release(evicted)
                self.evicted += evicted
                left = self.world.groups - self.in_step
                meta, number = await self.sampler.select(
                    current_train_weight=self.version,
                    min_prompt_groups=min(self.world.together, left),
                    max_prompt_groups=left,
                )
                if meta is None:
                    await asyncio.sleep(1.0)
                    continue
                self._release(number)
                self.sizes.add(number)
                self.in_step += number
                self.trained.update(tag["prompt"] for tag in meta.tags)
                self.ages.update(self.version - tag["weight_version"] for tag in meta.tags)
            await asyncio.sleep(self.world.step)
            self.in_step, self.version = 0, self.version + 1
            await self.after_step(self)

    def _release(self, number: int) -> None:
        for _ in range(number):
            self.permits.release()

    # -- what is measured ---------------------------------------------------------------------------

    @property
    def lost(self) -> float:
        """The share of the prompts that were neither trained nor failed and are not outstanding."""
        gone = set(self.sent) - set(self.trained) - self.failed
        return (len(gone) - self.waiting) / len(self.sent)

    def shares(self, slowest: float = 0.1) -> tuple[float, float]:
        """The share of the slowest prompts among the dispatched and among the trained prompts.

        Only the first three quarters of the prompts count, because the last are still outstanding.
        """
        cohort = [p for p in self.sent[: int(0.75 * len(self.sent))] if p not in self.failed]
        slow = {prompt for prompt in cohort if self.world.prompt(prompt)[0] >= 1 - slowest}
        trained = [prompt for prompt in cohort if prompt in self.trained]
        return len(slow) / len(cohort), sum(prompt in slow for prompt in trained) / max(len(trained), 1)


async def _pump(run: Run) -> None:
    """Do what `_rollout_pump` and `generate_and_push` do."""
    slots = asyncio.Semaphore(run.world.slots)

    async def generate(prompt: int) -> None:
        _, latency, fails = run.world.prompt(prompt)
        version = run.version
        group = run.buffer.reserve(weight_version=version, target_step=target)
        run.dispatched(prompt)
        await asyncio.sleep(latency)
        if fails:
            run.failed.add(prompt)
            await run.buffer.remove_group(group)
            run.permits.release()
        else:
            record = {"prompt": prompt, "weight_version": version}
            await run.buffer.commit(
                group, record, start_weight_version=version, end_weight_version=run.version
            )
        slots.release()

    tasks = set()  # asyncio itself keeps no reference
    for batch in run.batches():
        target = await run.sampler.admit(trainer_version_fn=lambda: run.version)
        for prompt in batch:
            await run.permits.acquire()
            await slots.acquire()
            task = asyncio.ensure_future(generate(prompt))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

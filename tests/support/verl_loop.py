"""verl's training loop around a sampler, in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import exp
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict

from headrace.pipeline import GroupReplayBuffer


class Queue:
    """TransferQueue's functions on dicts in this process, with the same keys, tags and fields."""

    KVBatchMeta = SimpleNamespace

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.rewards: dict[str, float] = {}

    def kv_list(self, partition_id: str = "train") -> dict[str, dict[str, Any]]:
        return {partition_id: {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags.pop(key, None)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        scores = torch.tensor([[0.0, self.rewards[key]] for key in keys])
        return TensorDict({"rm_scores": scores}, batch_size=[len(keys)])


@dataclass
class Trainer:
    """The loop of PPOTrainer (1dda039b): it dispatches warm-up batches, then a batch before each step."""

    seed: int
    groups: int
    parts: int = 1
    warmup: float = 1
    bound: int | None = 2
    size: int = 2
    steps: int = 30
    ticks: int = 20
    spread: float = 1.5
    """Std of the logarithm of the latency."""
    failing: float = 0.0
    equal: float = 0.0
    strategy: str = "wait"
    kind: Callable[..., Any] = GroupReplayBuffer
    queue: Queue = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.step, self.now, self.numbers = 1, 0, count()
        self.events: list[tuple[int, int]] = []
        self.born: dict[int, int] = {}
        self.ages: dict[int, list[int]] = {}
        options = {"group_size": self.size} | ({"recipe": ["pipeline=grpo"]} if self.equal else {})
        self.buffer = self.kind(
            trainer_mode="separate_async",
            trainer_config={"num_warmup_batches": self.warmup, "parameter_sync_step": self.parts},
            max_off_policy_threshold=None if self.bound is None else self.bound + 1,
            max_off_policy_strategy=self.strategy,
            sampler_kwargs=options,
            refill_fn=self.submit,
        )

    def submit(self, prompts: int) -> None:
        for number in [next(self.numbers) for _ in range(prompts)]:
            self.born[number] = self.step
            self.queue.tags[f"p{number}"] = self.prompt(number, "running")
            heapq.heappush(self.events, (self.now + self.latency(number), number))

    def latency(self, number: int) -> int:
        return max(1, round(20 * exp(self.spread * Random(f"{self.seed} {number}").gauss(0, 1))))

    def prompt(self, number: int, status: str) -> dict[str, Any]:
        return {"is_prompt": True, "status": status, "global_steps": self.born[number]}

    def sleep(self, _: float) -> None:
        """Let time pass until the next rollouts finish. If none is running, the loop would never continue."""
        assert self.events, "the step waits, and nothing is generated"
        self.run_until(self.events[0][0])

    def run_until(self, tick: int) -> None:
        self.now = tick
        while self.events and self.events[0][0] <= tick:
            _, number = heapq.heappop(self.events)
            dice = Random(f"{self.seed} {number} end")
            failed, equal = dice.random() < self.failing, dice.random() < self.equal
            for session in range(self.size - failed):
                self.queue.tags[f"p{number}_{session}_0"] = {"global_steps": self.born[number]}
                self.queue.rewards[f"p{number}_{session}_0"] = 0.0 if equal else float(session)
            self.queue.tags[f"p{number}"] = self.prompt(number, "failure" if failed else "finished")

    def go(self) -> Trainer:
        self.submit(int(self.warmup * self.groups))
        for step in range(1, self.steps + 1):
            self.step = step
            self.submit(self.groups)
            for _ in range(self.parts):
                meta, _ = self.buffer.sample(self.step, "train", self.groups // self.parts)
                taken = dict.fromkeys(int(key[1:].split("_")[0]) for key in meta.keys)
                assert len(taken) == self.groups // self.parts
                assert len(meta.keys) == len(taken) * self.size
                for number in taken:
                    self.ages.setdefault(number, []).append(self.step - self.born[number])
                self.queue.kv_clear(meta.keys, "train")
            self.run_until(self.now + self.ticks)
        return self

    def shares(self) -> tuple[float, float, float]:
        """The share of the slowest tenth among dispatched and trained groups, and the share of lost groups.

        Only groups that were dispatched early enough to be trained count.
        """
        over = [number for number, born in self.born.items() if born < self.steps - (self.bound or 0)]
        slow = set(sorted(over, key=self.latency)[-len(over) // 10 :])
        trained = [number for number in over if number in self.ages]
        share = sum(number in slow for number in trained) / len(trained)
        return len(slow) / len(over), share, 1 - len(trained) / len(over)

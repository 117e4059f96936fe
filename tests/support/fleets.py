"""Rows of workers with environments, with ids and origins as StampIds writes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tensordict import TensorDict

from headrace.transforms.table.schema import ORIGIN


class Sent(NamedTuple):
    """A row as the environment of a worker sends it."""

    group: int
    rollout: int
    number: int
    done: bool
    worker: int
    environment: int


class Fleet(NamedTuple):
    """Workers with environments. An environment runs one rollout after another, with StampIds' numbers."""

    workers: int
    environments: int
    group_size: int
    groups: int
    """Number of groups of each worker."""

    def rows(self, worker: int, rng: random.Random) -> Iterator[Sent]:
        """All rows of a worker in the order of its steps."""
        groups = [worker + turn * self.workers for turn in range(self.groups)]
        waiting = [(group, group * self.group_size + m) for group in groups for m in range(self.group_size)]
        running: list[tuple[int, int, int, int] | None] = [None] * self.environments
        while waiting or any(running):
            for environment, state in enumerate(running):
                if state is None and waiting:
                    running[environment] = (*waiting.pop(0), 0, rng.randint(1, 4))
            for environment, state in enumerate(running):
                if state is not None:
                    group, rollout, number, length = state
                    done = number == length - 1
                    yield Sent(group, rollout, number, done, worker, environment)
                    running[environment] = None if done else (group, rollout, number + 1, length)

    def batch(self, rows: list[Sent]) -> TensorDict:
        origin = [[r.number, r.worker, self.workers, r.environment, self.environments] for r in rows]
        columns = {
            "group_id": torch.tensor([r.group for r in rows]),
            "rollout_id": torch.tensor([r.rollout for r in rows]),
            "expected_rollouts": torch.full((len(rows),), self.group_size),
            ("next", "done"): torch.tensor([r.done for r in rows]),
            ORIGIN: torch.tensor(origin, dtype=torch.int32),
        }
        return TensorDict(columns, batch_size=[len(rows)])

"""Rollouts of one to three turns whose rewards follow from their ids, so that many workers can be checked."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

IDS = ("group_id", "rollout_id", "expected_rollouts", "turn")
GROUP_SIZE, SLOTS = 4, 3


def last_turn(rollout: Tensor) -> Tensor:
    return rollout * 7 // 2 % 3


def reward_of(rollout: Tensor, turn: Tensor) -> Tensor:
    return ((rollout * 13 + turn * 5) % 7).float()


class TurnsEnv(EnvBase):
    """A worker's share of the rollouts 0, 1, 2, …; `GROUP_SIZE` neighbours are a group.

    Worker `rank` of `ranks` has each `ranks`-th rollout, so groups are spread over the workers. The worker's
    slots take these rollouts in turn, each from its first row to its last. A row's reward is a number that
    follows from its ids, times the action.

    Args:
        rank: number of this worker.
        ranks: number of workers.
        trouble: is called at each step with the number of earlier steps.
        first: the first rollout of all workers.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        trouble: Callable[[int], None] | None = None,
        first: int = 0,
    ):
        super().__init__(batch_size=torch.Size([SLOTS]))
        self.first, self.rank, self.ranks, self.trouble, self.steps = first, rank, ranks, trouble, 0
        self._slot = torch.arange(SLOTS).unsqueeze(-1)
        self._number, self._turn = torch.zeros_like(self._slot), torch.zeros_like(self._slot)
        ints = {key: Unbounded((SLOTS, 1), dtype=torch.int64) for key in IDS}
        masks = Composite(all_assistant_mask=Binary(shape=(SLOTS, 2), dtype=torch.bool), shape=[SLOTS])
        self.observation_spec = Composite(**ints, masks=masks, shape=[SLOTS])
        self.action_spec = Unbounded((SLOTS, 1))
        self.reward_spec = Unbounded((SLOTS, 1))
        self.done_spec = Composite(done=Binary(shape=(SLOTS, 1), dtype=torch.bool), shape=[SLOTS])

    @property
    def rollouts(self) -> Tensor:
        return self.first + (self._number * SLOTS + self._slot) * self.ranks + self.rank

    def _rows(self, **more: Tensor) -> TensorDict:
        rollout = self.rollouts
        rows = {"group_id": rollout // GROUP_SIZE, "rollout_id": rollout, "turn": self._turn.clone()}
        rows["expected_rollouts"] = torch.full_like(rollout, GROUP_SIZE)
        mask = torch.ones(SLOTS, 2, dtype=torch.bool)
        return TensorDict({**rows, ("masks", "all_assistant_mask"): mask, **more}, batch_size=[SLOTS])

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        if tensordict is not None and "_reset" in tensordict.keys():
            again = tensordict["_reset"].view(SLOTS, 1)
        else:
            again = torch.ones(SLOTS, 1, dtype=torch.bool)
        again = again & (self._turn > 0)  # a rollout that has no row yet keeps its number
        self._number, self._turn = self._number + again, self._turn.masked_fill(again, 0)
        return self._rows(done=torch.zeros(SLOTS, 1, dtype=torch.bool))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.trouble is not None:
            self.trouble(self.steps)
        self.steps += 1
        reward = reward_of(self.rollouts, self._turn) * tensordict["action"]
        done = self._turn == last_turn(self.rollouts)
        self._turn = self._turn + 1
        return self._rows(reward=reward, done=done)

    def _set_seed(self, seed: int | None) -> None:
        pass


class OneAction(TensorDictModuleBase):
    """A policy that always takes the same action, which is its weight.

    Args:
        key: a column that has the shape of the actions.
    """

    def __init__(self, key: str = "turn") -> None:
        super().__init__()
        self.in_keys, self.out_keys = [key], ["action"]
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        return batch.set("action", self.weight.detach().expand(batch[self.in_keys[0]].shape).clone())


def makers(ranks: int, trouble: Callable[[int], None] | None = None, first: int = 0) -> list[Callable]:
    """Functions that make the environment of each worker. The last worker has the trouble."""
    troubles = [None] * (ranks - 1) + [trouble]
    return [functools.partial(TurnsEnv, rank, ranks, troubles[rank], first) for rank in range(ranks)]


def die(steps: int, *, at: int) -> None:
    if steps == at:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(steps: int, *, at: int) -> None:
    if steps == at:
        time.sleep(10**6)


def sleep(steps: int) -> None:
    time.sleep(0.05)


def of_one_process(frames: int, first: int = 0) -> Iterator[TensorDictBase]:
    """The same rollouts from one process."""
    collector = Collector(
        TurnsEnv(first=first),
        OneAction(),
        frames_per_batch=20 * SLOTS,
        total_frames=frames,
        auto_register_policy_transforms=False,
    )
    yield from collector
    collector.shutdown()

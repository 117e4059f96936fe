"""Environments that draw their own prompts. Each prompt is drawn several times in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase, InitTracker, TransformedEnv

from headrace.pipeline import StampIds

Trouble = Callable[[int], Callable[[TensorDict], TensorDict] | None]


class QuizEnv(EnvBase):
    """An environment whose resets give prompt 0 to `repeats` rows, then prompt 1, and so on.

    The rollout with dispatch number n has 1 + n mod 3 steps, each with a reward of 1. `trouble` is called
    before each step, with the number of earlier steps. If it returns a callable, this changes the rows of the
    step.
    """

    def __init__(
        self,
        slots: int | None,
        repeats: int,
        first_prompt: int = 0,
        trouble: Trouble | None = None,
    ):
        super().__init__(batch_size=torch.Size([] if slots is None else [slots]))
        self.trouble, self.steps = trouble, 0
        self.repeats, self.first_prompt, self.handed_out = repeats, first_prompt, 0
        shape = (*self.batch_size, 1)
        ints = {name: Unbounded(shape, dtype=torch.int64) for name in ("query", "left", "number")}
        self.observation_spec = Composite(**ints, shape=self.batch_size)
        self.action_spec = Composite(action=Unbounded(shape), shape=self.batch_size)
        self.reward_spec = Unbounded(shape)
        self.done_spec = Composite(done=Binary(shape=shape, dtype=torch.bool), shape=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        shape = (*self.batch_size, 1)
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.reshape(shape)
        number = torch.full(shape, -1)
        number[mask] = torch.arange(self.handed_out, self.handed_out + int(mask.sum()))
        self.handed_out += int(mask.sum())
        out = {
            "number": number,
            "query": number // self.repeats + self.first_prompt,
            "left": 1 + number % 3,
            "done": torch.zeros(shape, dtype=torch.bool),
        }
        return TensorDict(out, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        change = None if self.trouble is None else self.trouble(self.steps)
        self.steps += 1
        left = tensordict["left"] - 1
        out = tensordict.select("query", "number").update({"left": left, "done": left == 0})
        out.set("reward", torch.ones(left.shape))
        return out if change is None else change(out)

    def _set_seed(self, seed: int | None) -> None:
        pass


def make_quiz(
    worker: int = 0,
    workers: int = 1,
    *,
    slots: int | None = 3,
    repeats: int = 2,
    troubles: Mapping[int, Trouble] | None = None,
) -> EnvBase:
    """A quiz with ids. Each worker has its own prompts, and may have trouble."""
    quiz = QuizEnv(slots, repeats, first_prompt=1000 * worker, trouble=(troubles or {}).get(worker))
    env = TransformedEnv(quiz, InitTracker())
    return env.append_transform(StampIds(repeats=repeats, worker=worker, workers=workers))


def quiz_makers(workers: int, **options) -> list[partial]:
    return [partial(make_quiz, worker, workers, **options) for worker in range(workers)]


def collect(env: EnvBase, frames: int, batches: int, **options) -> Collector:
    return Collector(env, frames_per_batch=frames, total_frames=frames * batches, **options)

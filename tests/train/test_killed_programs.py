"""Programs with real collectors, killed with all their workers: no group is lost or trained twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import Groups
from processes import process_context
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase
from turns import OneAction, last_turn

from headrace.pipeline import Checkpoint, RepeatSampler, RolloutStream

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

IDS = ("group_id", "rollout_id", "expected_rollouts")
SIZE, GROUPS, WORKERS, STEPS = 2, 2, 2, 30
Ask = Callable[[], dict[str, int]]


class AskingEnv(EnvBase):
    """An environment whose rollouts have one to three turns. A reset asks for the ids of the next rollout."""

    def __init__(self, ask: Ask):
        super().__init__(batch_size=torch.Size([]))
        self.ask = ask
        self.observation_spec = Composite(
            {name: Unbounded((1,), dtype=torch.int64) for name in (*IDS, "turn")}, shape=[]
        )
        self.action_spec, self.reward_spec = Unbounded((1,)), Unbounded((1,))
        self.done_spec = Composite(done=Binary(shape=(1,), dtype=torch.bool), shape=[])

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        asked = self.ask()
        self._ids, self._turn = {name: torch.tensor([asked[name]]) for name in IDS}, torch.tensor([0])
        return self._row(done=torch.tensor([False]))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = self._turn == last_turn(self._ids["rollout_id"])
        self._turn = self._turn + 1
        return self._row(done=done, reward=tensordict["action"].clone())

    def _row(self, **more: torch.Tensor) -> TensorDict:
        return TensorDict({**self._ids, "turn": self._turn.clone(), **more}, batch_size=[])

    def _set_seed(self, seed: int | None) -> None:
        pass


def rollouts_of(draws: Iterator[TensorDict]) -> Iterator[dict[str, int]]:
    """The ids of each rollout, one rollout after another."""
    for draw in draws:
        for row in range(len(draw)):
            yield {name: int(draw[name][row]) for name in IDS}


def alone(stream: RolloutStream) -> Collector:
    """A collector whose environment draws prompts in the training process."""
    asked = rollouts_of(stream.draws(wait=True, patience=5))
    env = AskingEnv(partial(next, asked))
    return Collector(
        env, OneAction(), frames_per_batch=3, total_frames=-1, auto_register_policy_transforms=False
    )


def in_workers(kind: type, stream: RolloutStream) -> Any:
    """A collector whose workers get their draws from a thread of the training process."""
    queue = multiprocessing.get_context("fork").Queue(WORKERS)

    def dispatch() -> None:
        for rollout in rollouts_of(stream.draws(wait=True)):
            queue.put(rollout)

    makers = [partial(AskingEnv, queue.get) for _ in range(WORKERS)]
    frames = WORKERS if kind is MultiSyncCollector else 1
    threading.Thread(target=dispatch, daemon=True).start()
    return kind(
        makers,
        OneAction(),
        frames_per_batch=frames,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )


SOURCES: dict[str, Callable[[RolloutStream], Any]] = {
    "Collector": alone,
    "MultiSyncCollector": partial(in_workers, MultiSyncCollector),
    "MultiAsyncCollector": partial(in_workers, MultiAsyncCollector),
}


def train(folder: Path, source: str, journal: bool, every: int) -> None:
    """The program. When all steps are trained, it writes the trained groups and the groups that it holds."""
    os.setsid()
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)
    sampler = RepeatSampler(12, group_size=SIZE, prompts_per_batch=GROUPS)
    options = {"journal": folder / "journal"} if journal else {}
    stream = RolloutStream(sampler, source=SOURCES[source], steps_ahead=3, patience=60, **options)
    weights = Groups()
    checkpoint = Checkpoint(folder / "saved", stream=stream, weights=weights)
    begun = checkpoint.load() or 0
    for step, batch in enumerate(stream, start=begun + 1):
        (folder / "begun").touch()
        weights.trained = [*weights.trained, *dict.fromkeys(batch["group_id"].flatten().tolist())]
        stream.version = step
        if step % every == 0:
            checkpoint.save(step)
        if step >= STEPS:
            break
    known = stream.assembler.state_dict()["state"]["groups"]["group"].tolist()
    (folder / "over").write_text(json.dumps([weights.trained, known]))
    os.killpg(os.getpid(), signal.SIGKILL)


def killed(folder: Path, kills: int, seed: int, *program: Any) -> tuple[list[int], list[int]]:
    """Kill the program `kills` times, and let it end. Return the trained groups, and those that it holds."""
    context, dice = process_context(), random.Random(seed)
    for number in range(kills + 1):
        (folder / "begun").unlink(missing_ok=True)
        process = context.Process(target=train, args=(folder, *program))
        process.start()
        while number < kills and not (folder / "begun").exists():
            assert process.is_alive()
            time.sleep(0.005)
        if number < kills:
            time.sleep(dice.random() * 0.3)
            with suppress(ProcessLookupError):  # the program may have ended in the meantime
                os.killpg(process.pid, signal.SIGKILL)
        process.join(120)
        if (folder / "over").exists():
            break
    return tuple(json.loads((folder / "over").read_text()))


LONG = [
    pytest.param(source, journal, every, 6, marks=pytest.mark.long)
    for source, journal, every in product(SOURCES, [True, False], [1, 3])
]


@pytest.mark.parametrize(("source", "journal", "every", "kills"), [("Collector", True, 3, 2), *LONG])
def test_no_group_is_lost_or_trained_twice(source, journal, every, kills, tmp_path):
    trained, held = killed(tmp_path, kills, kills, source, journal, every)
    assert max(Counter(trained).values()) == 1
    assert len(trained) >= GROUPS * STEPS
    assert set(range(max(trained) + 1)) - set(trained) <= set(held)

"""Runs that are killed and start again from the files on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tensordict import TensorDict

from headrace.pipeline import RepeatSampler, paced
from headrace.transforms import GroupAssembler

PROMPTS, EPOCHS, SIZE, GROUPS = 24, 3, 2, 4
FAILED = 3
OPTIONS = {
    "groups": GROUPS,
    "group_size": SIZE,
    "max_staleness": 4,
    "version_key": "version",
    "on_duplicate": "drop",
    "max_idle": 10**9,
}


class ThreeEpochs(RepeatSampler):
    """A sampler whose draws end after three epochs."""

    def draws(self):
        every = super().draws()
        while self.epoch < EPOCHS:
            yield next(every)


class Groups:
    """A stand-in for the weights: the list of the groups that trained them."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def state_dict(self) -> dict[str, list[int]]:
        return {"trained": list(self.trained)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.trained = state["trained"]


class Killed(BaseException):
    """Raised where the process ends and loses its memory."""


@dataclass
class Disk:
    """The files that survive a kill: the journal, and the weights with the states saved beside them."""

    journal: Path
    weights: dict[str, Any] = field(
        default_factory=lambda: {"step": 0, "version": 0, "emitted": 0, "trained": [], "rejected": []}
    )


@dataclass
class Life:
    """A process that dispatches, generates, trains, saves and commits, until all epochs are trained."""

    disk: Disk
    dice: Random
    kill_at: int
    every: int = 1
    """The weights are saved after this many steps."""
    ranks: int = 1
    """Dispatchers that share the prompts."""
    make: Callable[..., Any] = GroupAssembler
    failing: float = 0.0
    equal: float = 0.0
    rows: int = 1

    def event(self) -> None:
        self.kill_at -= 1
        if self.kill_at == 0:
            raise Killed

    def run(self) -> None:
        saved = self.disk.weights
        self.flying: list[tuple[int, int, int]] = []  # group, rollout, version
        self.known = {name: list(saved[name]) for name in ("trained", "rejected")}
        refills = {"on_failure": "refill", "refill": self.refill, "max_refills": 99} if self.failing else {}
        self.assembler = assembler = self.make(**OPTIONS, **refills, journal=self.disk.journal)
        assembler.version = self.version = saved["version"]
        if saved["step"]:
            assembler.commit(saved["step"], emitted=saved["emitted"])
        samplers = [
            ThreeEpochs(
                PROMPTS, group_size=SIZE, prompts_per_batch=2 * self.ranks, rank=rank, ranks=self.ranks
            )
            for rank in range(self.ranks)
        ]
        draws = {rank: paced(sampler, assembler, patience=1) for rank, sampler in enumerate(samplers)}
        step, total = saved["step"], PROMPTS * EPOCHS
        for lost in assembler.unfinished():
            self.flying += [(g, r, assembler.version) for g, r in ids_of(lost)]
        while len(self.known["trained"]) + len(self.known["rejected"]) < total:
            self.event()
            for rank in [rank for rank in range(self.ranks) if rank in draws]:
                if assembler.capacity() >= 2:
                    if (draw := next(draws[rank], None)) is None:
                        del draws[rank]
                        continue
                    self.event()
                    self.flying += [(g, r, assembler.version) for g, r in ids_of(draw)]
            if self.flying and self.dice.random() < 0.9:
                self.put(*self.flying.pop(self.dice.randrange(len(self.flying))))
                continue
            over = not self.flying and not draws
            batch = assembler.take_rest() if over else assembler.take()
            if batch is not None:
                self.event()
                step += 1
                self.train(batch, step, over)

    def put(self, group: int, rollout: int, version: int) -> None:
        bad = Random(rollout).random() < self.failing
        for row in range(self.rows):
            last = row == self.rows - 1
            columns = {"group_id": [group], "rollout_id": [rollout], "version": [version]}
            columns |= {("next", "done"): [last], "status": [FAILED * (bad and last)]}
            self.assembler.put(TensorDict(columns, batch_size=[1]))
            self.event()

    def refill(self, group: int, rollouts: int) -> None:
        first = 10**6 + self.dice.randrange(10**12)
        self.flying += [(group, first + more, self.version) for more in range(rollouts)]

    def train(self, batch: TensorDict, step: int, over: bool) -> None:
        groups = list(dict.fromkeys(batch["group_id"].tolist()))
        rejected = [group for group in groups if Random(group).random() < self.equal]
        self.assembler.reject(len(rejected))
        self.known["trained"] += [group for group in groups if group not in rejected]
        self.known["rejected"] += rejected
        version = self.version + 1
        if over or step % self.every == 0:
            known = {name: list(each) for name, each in self.known.items()}
            self.disk.weights = {**known, "step": step, "version": version, "emitted": self.assembler.emitted}
            self.event()
            self.assembler.commit(step)
        self.assembler.version = self.version = version


def ids_of(draw: TensorDict) -> list[tuple[int, int]]:
    return list(zip(draw["group_id"].tolist(), draw["rollout_id"].tolist(), strict=True))


def killed(folder: Path, kills: list[int], seed: int, **world: Any) -> Disk:
    """Kill a run after each of these numbers of events, and start it again. Return the files."""
    disk = Disk(folder / "journal")
    for number, kill_at in enumerate([*kills, 10**9]):
        try:
            Life(disk, Random(f"{seed} {number}"), kill_at, **world).run()
        except Killed:
            continue
    return disk


WORLDS = {
    "plain": {},
    "weights of every second step": {"every": 2},
    "weights of every fifth step": {"every": 5},
    "failures with refill, two rows a rollout": {"failing": 0.1, "rows": 2},
    "two ranks": {"ranks": 2},
    "rejected groups": {"equal": 0.3},
    "all of it": {"every": 5, "failing": 0.1, "rows": 2, "ranks": 2, "equal": 0.3},
}


def once_each(
    world: str, seed: int, kills: int, folder: Path, make: Callable[..., Any] = GroupAssembler
) -> None:
    """Kill at random. Check that each group was once rejected, or trained into the saved weights."""
    folder.mkdir()
    dice = Random(seed)
    disk = killed(folder, [dice.randint(1, 400) for _ in range(kills)], seed, make=make, **WORLDS[world])
    times = Counter(disk.weights["trained"] + disk.weights["rejected"])
    assert times == dict.fromkeys(range(PROMPTS * EPOCHS), 1), (world, seed, kills)

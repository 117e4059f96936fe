"""Every group is trained once in the weights that are saved, wherever the process is killed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
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
    "max_refills": 99,
    "max_idle": 10**9,
}


class ThreeEpochs(RepeatSampler):
    """Draws that end."""

    def draws(self):
        every = super().draws()
        while self.epoch < EPOCHS:
            yield next(every)


class Killed(BaseException):
    """The process is gone, with all that is in its memory."""


@dataclass
class Disk:
    """What outlives it: the journal, and the weights with what is saved with them."""

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
    failing: float = 0.0
    equal: float = 0.0
    rows: int = 1

    def event(self) -> None:
        self.kill_at -= 1
        if self.kill_at == 0:
            raise Killed

    def run(self) -> GroupAssembler:
        saved = self.disk.weights
        self.flying: list[tuple[int, int, int]] = []  # group, rollout, version
        self.known = {name: list(saved[name]) for name in ("trained", "rejected")}
        self.assembler = assembler = GroupAssembler(
            **OPTIONS, on_failure="refill", refill=self.refill, journal=self.disk.journal
        )
        assembler.version = saved["version"]
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
        return assembler

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
        self.flying += [(group, first + more, self.assembler.version) for more in range(rollouts)]

    def train(self, batch: TensorDict, step: int, over: bool) -> None:
        groups = list(dict.fromkeys(batch["group_id"].tolist()))
        rejected = [group for group in groups if Random(group).random() < self.equal]
        self.assembler.reject(len(rejected))
        self.known["trained"] += [group for group in groups if group not in rejected]
        self.known["rejected"] += rejected
        version = self.assembler.version + 1
        if over or step % self.every == 0:
            known = {name: list(each) for name, each in self.known.items()}
            self.disk.weights = {**known, "step": step, "version": version, "emitted": self.assembler.emitted}
            self.event()
            self.assembler.commit(step)
        self.assembler.version = version


def ids_of(draw: TensorDict) -> list[tuple[int, int]]:
    return list(zip(draw["group_id"].tolist(), draw["rollout_id"].tolist(), strict=True))


def killed(folder: Path, kills: list[int], seed: int, **world: Any) -> Disk:
    """A run that is killed after each of these numbers of events, and begins again."""
    disk = Disk(folder / "journal")
    for number, kill_at in enumerate([*kills, 10**9]):
        try:
            Life(disk, Random(f"{seed} {number}"), kill_at, **world).run()
        except Killed:
            continue
    return disk


WORLDS = {
    "plain": {},
    "weights of every fifth step": {"every": 5},
    "failures with refill, two rows a rollout": {"failing": 0.1, "rows": 2},
    "two ranks": {"ranks": 2},
    "rejected groups": {"equal": 0.3},
    "all of it": {"every": 5, "failing": 0.1, "rows": 2, "ranks": 2, "equal": 0.3},
}


def once_each(world: str, seed: int, kills: int, folder: Path) -> None:
    """Kill a run at random events; in the saved weights each group was trained once, or rejected once."""
    folder.mkdir()
    dice = Random(seed)
    disk = killed(folder, [dice.randint(1, 400) for _ in range(kills)], seed, **WORLDS[world])
    times = Counter(disk.weights["trained"] + disk.weights["rejected"])
    assert times == dict.fromkeys(range(PROMPTS * EPOCHS), 1), (world, seed, kills)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_no_group_is_skipped_or_repeated_after_kills(world, tmp_path):
    for seed, kills in enumerate((1, 1, 3)):
        once_each(world, seed, kills, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_no_group_is_skipped_or_repeated_after_many_kills(world, tmp_path):
    for seed in range(75):
        once_each(world, 100 + seed, 1 if seed < 50 else 3, tmp_path / str(seed))


def test_weights_of_which_the_journal_knows_nothing_are_refused(tmp_path):
    options = {"group_size": 1, "groups": 1, "journal": tmp_path / "journal"}
    assembler = GroupAssembler(**options)
    ids = {"group_id": [0, 1, 2], "rollout_id": [0, 1, 2], ("next", "done"): [True] * 3}
    assembler.put(TensorDict(ids, batch_size=[3]))
    assembler.take()
    assembler.commit(5)
    assembler.take()
    again = GroupAssembler(**options)
    assert again.committed == 5
    for emitted in (0, 3):  # older than the commit; or of another run
        with pytest.raises(
            ValueError, match=r"has 1 that were committed and 1 after them\. Load the weights of step 5"
        ):
            again.commit(6, emitted=emitted)
    again.commit(6, emitted=2)
    assert again.take()["group_id"].tolist() == [2]


@pytest.mark.parametrize("text", [False, True])
def test_a_rollout_that_arrived_in_part_gets_a_new_id_and_its_rows_are_surplus(text):
    ids = ["a", "b"] if text else [8, 9]
    draws = TensorDict({"group_id": ["g"] * 2 if text else [4, 4], "rollout_id": ids, "prompt": [7, 7]}, [2])
    assembler = GroupAssembler(group_size=2)
    assembler.announce(draws)
    row = draws[:1].clone()
    row["next", "done"] = torch.tensor([False])
    assembler.put(row.exclude("prompt"))
    again = GroupAssembler(group_size=2)
    again.load_state_dict(assembler.state_dict())
    (lost,) = again.unfinished()
    assert lost["prompt"].tolist() == [7, 7]
    assert list(lost["group_id"]) == list(draws["group_id"])
    same, fresh = lost["rollout_id"]
    assert same == ids[1]
    assert fresh not in ids
    assert again.counts["surplus"] == 1
    assert again.unfinished() == []
    row["next", "done"] = torch.tensor([True])
    again.put(row.exclude("prompt"))  # the old one goes on after all
    assert again.counts["surplus"] == 2
    ends = lost.exclude("prompt")
    ends["next", "done"] = torch.tensor([True, True])
    again.put(ends)
    assert len(again.take()) == 2


def test_after_a_restart_with_older_weights_nothing_is_too_old(tmp_path):
    """What was announced after their step is drawn again, when there is room."""
    options = {"groups": 1, "group_size": 1, "max_staleness": 1, "steps_ahead": 0, "version_key": "version"}

    def rows(draw, version):
        draw["version"] = torch.full((len(draw),), version)
        draw["next", "done"] = torch.ones(len(draw), dtype=torch.bool)
        return draw

    first = GroupAssembler(**options, journal=tmp_path / "journal")
    draws = paced(RepeatSampler(9, group_size=1), first)
    for _ in range(5):
        first.put(rows(next(draws), first.version))
        assert first.take() is not None
        first.version += 1
    again = GroupAssembler(**options, journal=tmp_path / "journal")  # no weights were saved
    draws, trained = paced(RepeatSampler(9, group_size=1), again), []
    assert (again.version, again.capacity(), again.ready) == (0, 0, 1)
    for _ in range(9):
        if not again.ready:
            again.put(rows(next(draws), again.version))
        trained += again.take()["group_id"].tolist()
        again.version += 1
    assert trained == list(range(9))
    assert max(again.ages) == 0
    assert again.counts["undone"] == 4


def test_groups_that_leave_without_a_row_are_counted():
    assembler = GroupAssembler(groups=1, group_size=1, timeout=2, max_pending_groups=3)
    ids = lambda *numbers: TensorDict({"group_id": [*numbers], "rollout_id": [*numbers]}, [len(numbers)])  # noqa: E731
    assembler.announce(ids(0))
    for number in range(1, 4):
        row = ids(number)
        row["next", "done"] = torch.tensor([True])
        assembler.put(row)
    assembler.announce(ids(5, 6, 7, 8))
    assembler.discard_batch()
    assert assembler.lost_groups == {"timeout": 1, "evicted": 1, "unfinished": 6}


def drawn(*rollouts: int) -> TensorDict:
    """The draws of groups of two rollouts."""
    ids = {"group_id": [each // 2 for each in rollouts], "rollout_id": [*rollouts]}
    return TensorDict(ids, [len(rollouts)])


def ended(*rollouts: int, version: int = 0) -> TensorDict:
    """A row for each rollout."""
    rows = drawn(*rollouts)
    rows["next", "done"] = torch.ones(len(rows), dtype=torch.bool)
    rows["version"] = torch.full((len(rows),), version)
    return rows


@pytest.mark.filterwarnings("ignore:no group may take longer")
@pytest.mark.parametrize("newer", [1, 3])
def test_a_group_waits_for_the_rollouts_that_are_undone(newer, tmp_path):
    """One of its rollouts is of weights that are gone. The group was whole with it, or not."""
    options = {"groups": 2, "group_size": 2, "max_staleness": 2, "version_key": "version"}
    path = tmp_path / "journal"
    first = GroupAssembler(**options, journal=path)
    first.announce(drawn(0, 1, 2, 3))
    first.put(ended(0))
    first.version = 1
    first.put(ended(newer, version=1))
    again = GroupAssembler(**options, journal=path)
    assert again.version == 0
    lost = [draw for draw in again.unfinished() for draw in draw.unbind(0)]
    assert again.counts["undone"] == 1
    for draw in lost:
        assert again.take() is None
        again.put(ended(0).update({name: draw[name][None] for name in ("group_id", "rollout_id")}))
    assert sorted(again.take()["group_id"].tolist()) == [0, 0, 1, 1]
    assert len(lost) == 3


def test_a_process_that_dies_before_it_has_done_anything_changes_nothing(tmp_path):
    """It had opened the journal. The next one still knows what was taken, and may be in the weights."""
    options = {"groups": 1, "group_size": 2, "journal": tmp_path / "journal"}
    first = GroupAssembler(**options)
    first.put(ended(0, 1, 2, 3, 4, 5))
    first.take(), first.take()
    for _ in range(3):
        assert GroupAssembler(**options).ready == 3
    last = GroupAssembler(**options)
    last.commit(1, emitted=2)
    assert last.take()["group_id"].tolist() == [2, 2]


def test_a_step_with_rejected_groups_is_one_step_after_a_restart(tmp_path):
    """Three groups were taken, and one of them was rejected. So a step of two is over, and there is room."""
    options = {"groups": 2, "group_size": 2, "steps_ahead": 0}
    path = tmp_path / "journal"
    first = GroupAssembler(**options, journal=path)
    first.put(ended(0, 1, 2, 3, 4, 5))
    first.take(2)
    first.reject(1)
    first.take(1)
    again = GroupAssembler(**options, journal=path)
    again.commit(1, emitted=3)
    assert again.capacity() == 0
    again.version = 1
    assert again.capacity() == 2

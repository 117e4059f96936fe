"""Wherever a run is killed, it continues from its newest weights and trains every group once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.pipeline import Checkpoint, RepeatSampler, RolloutStream

PROMPTS, EPOCHS = 12, 2


class Killed(BaseException):
    """Raised where the process ends and loses its memory."""


class Weights:
    """A stand-in for weights: the groups that trained them."""

    def __init__(self):
        self.groups: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"groups": list(self.groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups = list(state["groups"])


class Life:
    """A process of a run that is killed after some events."""

    def __init__(self, folder: Path, dice: Random, kill_after: int, every: int = 1, **options: Any):
        self.dice, self.left, self.every = dice, kill_after, every
        if options.pop("journal", False):
            options["journal"] = folder / "journal"
        sampler = RepeatSampler(PROMPTS, group_size=2, prompts_per_batch=3)
        self.stream = RolloutStream(sampler, epochs=EPOCHS, max_staleness=4, **options)
        self.weights = Weights()
        self.checkpoint = Checkpoint(folder / "saved", stream=self.stream, policy=self.weights)

    def event(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    def run(self) -> list[int]:
        step, stream, flying = self.checkpoint.load() or 0, self.stream, []
        while not stream.ended:
            for draws in stream.draws():
                flying += list(draws.split(1))
                self.event()
            if flying:
                row = flying.pop(self.dice.randrange(len(flying)))
                row["next", "done"] = torch.tensor([True])
                row["next", "reward"] = (row["rollout_id"] % 10007 * (row["group_id"] % 2)).double()
                row["next", "policy_version"] = torch.tensor([stream.version])
                stream.put(row)
                self.event()
            if (batch := stream.take()) is not None:
                self.event()
                self.weights.groups += dict.fromkeys(batch["group_id"].tolist())
                step += 1
                stream.version += 1
                if step % self.every == 0 or stream.ended:
                    self.checkpoint.save(step)
                    self.event()
        return self.weights.groups


WORLDS = {
    "a journal": {"journal": True},
    "a journal, saved every fifth step": {"journal": True, "every": 5},
    "no journal": {},
    "no journal, saved every fifth step": {"every": 5},
    "informative groups": {"journal": True, "every": 3, "informative": True},
}


@pytest.mark.parametrize("world", WORLDS)
def test_the_saved_weights_have_trained_every_group_once(world, tmp_path):
    for seed in range(3):
        dice, trained = Random(seed), None
        (tmp_path / str(seed)).mkdir()
        for kill_after in [*(dice.randint(1, 60) for _ in range(1 + seed)), 10**9]:
            try:
                trained = Life(tmp_path / str(seed), dice, kill_after, **WORLDS[world]).run()
            except Killed:
                continue
        expected = (
            range(1, EPOCHS * PROMPTS, 2) if "informative" in WORLDS[world] else range(EPOCHS * PROMPTS)
        )
        assert Counter(trained) == dict.fromkeys(expected, 1), seed


def test_a_process_killed_while_it_saves_leaves_the_previous_file(tmp_path, monkeypatch):
    weights = Weights()
    checkpoint = Checkpoint(tmp_path, policy=weights)
    weights.groups = [1]
    checkpoint.save(1)
    weights.groups = [1, 2]

    def killed(*args):
        raise Killed

    for name in ("fsync", "replace"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"headrace.transforms.carry.whole_files.os.{name}", killed)
            with pytest.raises(Killed):
                checkpoint.save(2)
        again = Weights()
        assert Checkpoint(tmp_path, policy=again).load() == 1
        assert again.groups == [1]


def test_a_step_that_not_all_ranks_have_saved_is_not_loaded(tmp_path):
    ranks = [Checkpoint(tmp_path, rank=rank, ranks=2, policy=Weights()) for rank in range(2)]
    for checkpoint in ranks:
        checkpoint.save(4)
    ranks[0].save(5)
    assert [checkpoint.load() for checkpoint in ranks] == [4, 4]
    with pytest.raises(FileNotFoundError, match="must have step 5 of all 2 ranks; it has 4"):
        ranks[0].load(5)


def test_the_ranks_of_a_process_group_exchange_the_steps_that_they_have_saved(tmp_path, monkeypatch):
    """The folder lacks the files of the other rank, which says that it has saved the steps 4 and 5."""
    events: list[Any] = []
    group = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
        barrier=lambda: events.append("all have saved"),
        all_gather_object=lambda every, own: every.__setitem__(slice(None), [{4, 5}, own]),
    )
    monkeypatch.setattr("headrace.pipeline.train.checkpoint.dist", group)
    stream = Weights()
    stream.commit = events.append
    checkpoint = Checkpoint(tmp_path / "new" / "own", stream=stream)
    for step in (4, 5, 6):
        checkpoint.save(step)
    assert events == ["all have saved", 4, "all have saved", 5, "all have saved", 6]
    assert Checkpoint(tmp_path / "new" / "own", stream=stream).load() == 5
    files = [path.name for path in (tmp_path / "new" / "own").iterdir()]
    assert files == ["step_0000000005.rank1of2.pt"], "the newer step is trained again"
    alone = Checkpoint(tmp_path / "alone", rank=0, ranks=1, stream=stream)
    alone.save(7)
    assert (events[6:], alone.load()) == ([7], 7)


def test_older_steps_are_kept_and_loaded_on_request(tmp_path):
    weights = Weights()
    checkpoint = Checkpoint(tmp_path, keep=2, policy=weights)
    for step in (3, 6, 9):
        weights.groups = [step]
        checkpoint.save(step)
    with pytest.raises(FileNotFoundError, match="it has 6, 9"):
        checkpoint.load(3)
    assert checkpoint.load(6) == 6
    assert weights.groups == [6]
    assert checkpoint.load() == 6  # the later step is of an earlier run, which this one replaces


def test_one_rank_may_keep_one_step_and_several_ranks_two(tmp_path):
    checkpoint = Checkpoint(tmp_path, keep=1, policy=Weights())
    for step in (1, 2):
        checkpoint.save(step)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000002.rank0of1.pt"]
    Checkpoint(tmp_path, keep=2, rank=1, ranks=2, policy=Weights())


def test_a_save_before_the_steps_of_an_earlier_run_are_loaded_is_refused(tmp_path):
    """The newest files are kept, so an earlier run with higher steps would replace what is saved."""
    for step in (4, 5):
        Checkpoint(tmp_path / str(step), policy=Weights()).save(step)
        with pytest.raises(FileExistsError, match=f"the steps of another run: {step}. Call load"):
            Checkpoint(tmp_path / str(step), policy=Weights()).save(1)
        again = Checkpoint(tmp_path / str(step), policy=Weights())
        assert again.load() == step
        again.save(step + 1)
        again.save(step + 2)


def test_the_first_step_that_can_be_saved_is_0(tmp_path):
    checkpoint = Checkpoint(tmp_path, policy=Weights())
    checkpoint.save(0)
    assert checkpoint.load() == 0
    with pytest.raises(ValueError, match="step must be an integer ≥ 0; got -1"):
        checkpoint.save(-1)


def test_weights_older_than_the_journal_are_refused(tmp_path):
    def begin():
        sampler = RepeatSampler(PROMPTS, group_size=1, prompts_per_batch=1)
        stream = RolloutStream(sampler, journal=tmp_path / "journal")
        return stream, Checkpoint(tmp_path / "saved", stream=stream)

    stream, checkpoint = begin()
    for step in (1, 2):
        for row in stream.draws():
            row["next", "done"] = torch.tensor([True])
            stream.put(row)
        assert stream.take() is not None
        stream.version = step
        checkpoint.save(step)
    _, again = begin()
    with pytest.raises(ValueError, match="Load the weights of step 2"):
        again.load(1)
    assert again.load() == 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"policy": 3}, "policy must have state_dict"),
        ({"rank": 2, "ranks": 2}, "rank must be from 0 to ranks - 1; got rank=2, ranks=2"),
        ({"rank": -1, "ranks": 2}, "rank must be from 0 to ranks - 1; got rank=-1, ranks=2"),
        ({"rank": 1, "ranks": 2, "keep": 1}, "several ranks need keep ≥ 2"),
        ({"keep": 0}, "keep must be an integer ≥ 1; got 0"),
        ({}, "a checkpoint needs something to save, by name: .*; got nothing"),
    ],
)
def test_parts_and_ranks_are_checked(parts, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        Checkpoint(tmp_path, **parts)


def test_a_file_with_other_parts_is_refused(tmp_path):
    Checkpoint(tmp_path, policy=Weights()).save(1)
    found = (
        r"the file has policy, and the Checkpoint policy, optimizer; only one of both has optimizer\. Constr"
    )
    with pytest.raises(ValueError, match=found):
        Checkpoint(tmp_path, policy=Weights(), optimizer=Weights()).load()

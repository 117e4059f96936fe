"""verl's training loop around the sampler: slow groups are trained like others, and none is too old."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
from verl_loop import Queue, Trainer

from headrace.pipeline import QueuedGroups, assembled
from headrace.pipeline.queues import in_place
from headrace.transforms import GroupAssembler

SEEDS, PARTS = 24, 2


def random_trainer(seed: int) -> Trainer:
    dice = Random(seed)
    parts, bound = dice.choice([1, 1, 2, 4]), dice.randint(0, 4)
    return Trainer(
        seed,
        groups=parts * dice.randint(1, 3),
        parts=parts,
        bound=bound,
        warmup=max(0, dice.randint(0, bound) - dice.choice([0, 0, 0.5])),
        ticks=dice.choice([1, 20, 60]),
        failing=dice.choice([0.0, 0.2]),
        equal=dice.choice([0.0, 0.0, 0.3]),
    )


@pytest.fixture
def here(monkeypatch):
    """Run a trainer with its own queue and clock."""

    def run(trainer: Trainer) -> Trainer:
        monkeypatch.setattr(in_place, "tq", lambda: trainer.queue)
        monkeypatch.setattr(in_place, "time", SimpleNamespace(sleep=trainer.sleep))
        return trainer.go()

    monkeypatch.setattr(in_place, "tq", Queue)
    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no group may take longer")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_group_is_trained_once_or_failed_and_none_is_too_old(here, part):
    for seed in range(part, SEEDS, PARTS):
        trainer = here(random_trainer(seed))
        _, assembler = trainer.buffer.partitions["train"]
        assert all(len(ages) == 1 for ages in trainer.ages.values()), seed
        assert max(age for ages in trainer.ages.values() for age in ages) <= trainer.bound, seed
        assert not assembler.counts["stale"], seed
        outstanding = {number for number in trainer.born if f"p{number}" in trainer.queue.tags}
        assert len(outstanding) == int(trainer.warmup * trainer.groups), seed
        if not (trainer.failing or trainer.equal):
            assert trainer.ages.keys() | outstanding == set(trainer.born), seed


@pytest.mark.filterwarnings("ignore:no group may take longer")
def test_slow_groups_are_trained_as_often_as_others(here):
    """Slow groups are the slowest quarter. Groups that may be outstanding at the end do not count."""
    trainer = here(Trainer(0, groups=4, warmup=1, bound=3, steps=60))
    over = [number for number, born in trainer.born.items() if born < trainer.steps - trainer.bound]
    slow = sorted(over, key=trainer.latency)[-len(over) // 4 :]
    assert trainer.latency(slow[0]) > 2 * trainer.ticks
    assert set(slow) <= trainer.ages.keys()
    assert {trainer.ages[number][0] for number in slow} > {1}


def test_without_a_threshold_every_group_is_trained_whatever_its_age(here):
    """`max_off_policy_threshold` is null, as in verl."""
    trainer = here(Trainer(0, groups=4, warmup=2, bound=None, steps=30))
    assert max(age for ages in trainer.ages.values() for age in ages) > 2
    assert trainer.ages.keys() | {
        number for number in trainer.born if f"p{number}" in trainer.queue.tags
    } == {*trainer.born}


def test_a_prompt_that_others_delete_is_a_failed_group(here):
    trainer = Trainer(0, groups=2, warmup=1, bound=2, steps=6)
    whole = trainer.sleep

    def sleep(seconds):
        trainer.sleep = whole
        here_now = next(iter(trainer.queue.tags))
        deleted.append(int(here_now[1:]))
        trainer.queue.kv_clear([here_now], "train")
        trainer.events = [event for event in trainer.events if event[1] != deleted[0]]
        in_place.time.sleep = whole

    deleted: list[int] = []
    trainer.sleep = sleep
    here(trainer)
    assert deleted[0] not in trainer.ages
    assert trainer.buffer.partitions["train"][1].lost_groups == {"failed": 1}
    assert len(trainer.ages) == 12


def test_a_loop_over_the_queue_waits_for_the_group_that_was_announced_first(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(in_place, "tq", lambda: queue)
    assembler = GroupAssembler(groups=1, max_staleness=1, steps_ahead=0, segment_key="segment")
    source = QueuedGroups.of("verl", group_size=1, announce_to=assembler)

    def put(name: str, step: int, status: str = "finished") -> None:
        queue.tags[name] = {"is_prompt": True, "status": status, "global_steps": step}
        if status == "finished":
            queue.tags[f"{name}_0_0"], queue.rewards[f"{name}_0_0"] = {"global_steps": step}, 1.0

    assembler.version = 4
    put("slow", 3, "running")
    put("fast", 4)
    rows = iter(assembled(source, assembler))
    monkeypatch.setattr(in_place.time, "sleep", lambda _: put("slow", 3))
    found = [source.keys_of(next(rows)) for _ in range(2)]
    assert found == [["slow_0_0"], ["fast_0_0"]]
    assert assembler.ages == {0: 1, 1: 1}

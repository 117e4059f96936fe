"""The sampler for NeMo RL trains every prompt in time, however long its rollouts take.

`World` is a stand-in for NeMo RL. `tests/support/peer_checks.py nemo_rl` runs NeMo RL's own code.
"""

from __future__ import annotations

import asyncio
from itertools import count, product
from types import SimpleNamespace

import pytest
from prompt_groups import Buffer, Run, World, in_simulated_time

from headrace.adapters.nemo_rl import DeadlineSampler
from headrace.transforms.streams import Steps

SETTINGS = [(1, 0), (1, 1), (2, 2), (3, 0), (3, 1), (4, 2), (8, 2)]
WORLDS = {
    "a heavy tail": World(),
    "two classes": World(spread=0),
    "few slots": World(slots=5),
    "prompts fail": World(failing=0.05),
}


@pytest.fixture(autouse=True)
def look_each_second(monkeypatch):
    monkeypatch.setattr("headrace.adapters.nemo_rl.POLL", 1.0)


def run(world: World, bound: int, ahead: int, kind: type[DeadlineSampler] = DeadlineSampler) -> Run:
    options = {"max_staleness_versions": bound, "steps_ahead": ahead}
    return Run(world, lambda buffer: kind(buffer, **options)).go()


def broken(found: Run, bound: int, ahead: int) -> list[str]:
    """The names of the laws that a run breaks."""
    groups, sent = found.world.groups, found.sent
    left = set(sent) - found.failed - set(found.trained)
    limit = max((ahead + 1) * groups, 2 * groups - 1 if found.failed else 0)
    laws = {
        "nothing is evicted": found.evicted == 0,
        "nothing is trained twice": set(found.trained.values()) == {1},
        "only what was dispatched is trained": not set(found.trained) - set(sent)
        | found.failed & {*found.trained},
        "nothing is lost": len(left) <= limit and not left & set(sent[: len(sent) // 2]),
        "nothing is too old": max(found.ages) <= bound,
        "few are outstanding": found.most <= limit,
        "each step has all its groups": found.sizes == {groups},
        "the run never stops": found.version >= 20,
        "slow prompts train as often": found.shares()[0] == pytest.approx(found.shares()[1], abs=0.01),
    }
    return [law for law, holds in laws.items() if not holds]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("bound", "ahead"), SETTINGS)
def test_every_prompt_is_trained_once_and_in_time(world, bound, ahead):
    assert broken(run(WORLDS[world], bound, ahead), bound, ahead) == []


class Uncounted(DeadlineSampler):
    """Prompts without a slot are not outstanding."""

    def outstanding(self, version):
        return super().outstanding(version) - self.unreserved


class TakenIsGone(DeadlineSampler):
    """Groups are not outstanding any more when their step begins."""

    def outstanding(self, version):
        return super().outstanding(version) - self.steps.taken


class OneTooMany(DeadlineSampler):
    """The limit of outstanding prompts holds before a dispatch, and the dispatch may exceed the limit."""

    def outstanding(self, version):
        return super().outstanding(version) - self.groups


class OneStepOlder(DeadlineSampler):
    """A group may be one version older than the option allows."""

    def __init__(self, buffer, **options):
        super().__init__(buffer, **options)
        self.max_staleness += 1


class ByArrival(DeadlineSampler):
    """A step takes groups in the order in which they became complete."""

    def __init__(self, buffer, **options):
        super().__init__(buffer, **options)
        self.arrived, fresh, commit = {}, count(), buffer.commit

        def committed(group_id, record, **versions):
            self.arrived[group_id] = next(fresh)
            return commit(group_id, record, **versions)

        def in_order(slots):
            return sorted(slots, key=lambda slot: self.arrived.get(buffer._group_ids[slot.order], 10**9))

        buffer.commit, self.steps.in_order = committed, in_order


class NeverWaits(DeadlineSampler):
    """A step takes the oldest complete groups, and never waits for an older group."""

    async def select(self, **options):
        self.max_staleness, bound = self.max_staleness + 20, self.max_staleness
        found = await super().select(**options)
        self.max_staleness = bound
        return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Uncounted, TakenIsGone, OneTooMany, OneStepOlder, ByArrival, NeverWaits])
def test_each_rule_is_needed(kind):
    """A sampler that lacks one rule breaks a law in one of the worlds."""
    settings = product([(1, 0), (3, 0), (4, 2)], WORLDS.values())
    assert any(broken(run(world, *each, kind), *each) for each, world in settings), kind.__doc__


def filled(*slots: tuple[int, bool]) -> Buffer:
    """A buffer with a slot for each pair: the version at which it began, and whether it is ready."""
    buffer = Buffer()
    for version, ready in slots:
        group = buffer.reserve(weight_version=version)
        if ready:
            asyncio.run(buffer.commit(group, {"prompt": group, "weight_version": version}))
    return buffer


def select(buffer: Buffer, version: int, bound: int = 2, groups: int = 2) -> list[int] | None:
    """The prompts that the sampler selects for a step. None if the step waits."""
    sampler = DeadlineSampler(buffer, max_staleness_versions=bound)
    sampler.required_buffer_capacity(groups)
    asked = {"current_train_weight": version, "min_prompt_groups": 1, "max_prompt_groups": groups}
    meta, number = asyncio.run(sampler.select(**asked))
    assert number == (0 if meta is None else len(meta.tags))
    return None if meta is None else [tag["prompt"] for tag in meta.tags]


def test_a_step_takes_the_groups_that_were_dispatched_first():
    buffer = filled((0, False), (0, True), (1, True), (1, True))
    assert select(buffer, version=1) == [1, 2]
    assert (buffer.start_weight_list, buffer.cleared) == ([0, 1], 0)  # the trainer reads the rows later
    assert select(filled((1, True), (0, True), (1, True)), version=1) == [1, 0]


def test_a_step_has_all_its_groups_or_waits():
    assert select(filled((0, True), (0, False)), version=0) is None
    sampler = DeadlineSampler(filled(*[(0, True)] * 3), max_staleness_versions=2)
    sampler.required_buffer_capacity(2)
    asked = {"current_train_weight": 0, "min_prompt_groups": 1, "max_prompt_groups": 2}
    assert [asyncio.run(sampler.select(**asked))[1] for _ in range(2)] == [2, 0]


def test_a_step_waits_for_groups_that_would_be_too_old():
    """The next step is the last that can train groups of version 0, and takes two of them."""
    slots = [(0, False), (0, False), (0, False), (1, True), (1, True)]
    assert select(filled(*slots), version=1, bound=2) is None
    assert select(filled(*slots[1:]), version=1, bound=2) == [2, 3]
    assert select(filled(*slots), version=1, bound=3) == [3, 4]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_dispatch_is_ahead_by_whole_steps(ahead):
    """The test counts the batches that are admitted before and after the trainer trains a step."""
    buffer = Buffer()
    sampler = DeadlineSampler(buffer, max_staleness_versions=3, steps_ahead=ahead)
    assert sampler.required_buffer_capacity(4) == (max(ahead, 1) + 1) * 4
    admitted, trainer = [], SimpleNamespace(version=0)

    async def pump():
        while True:
            admitted.append(await sampler.admit(trainer_version_fn=lambda: trainer.version))
            for _ in range(4):
                group = buffer.reserve(weight_version=trainer.version)
                await buffer.commit(group, {"prompt": group})

    async def go():
        task = asyncio.ensure_future(pump())
        await asyncio.sleep(10)
        assert admitted == [None] * (ahead + 1)
        _, number = await sampler.select(current_train_weight=0, min_prompt_groups=1, max_prompt_groups=4)
        await asyncio.sleep(10)
        assert (number, len(admitted)) == (4, ahead + 1)  # the step has not ended
        trainer.version = 1
        await asyncio.sleep(10)
        assert len(admitted) == ahead + 2
        task.cancel()

    in_simulated_time(go())


def test_a_prompt_counts_from_its_admission_until_its_step_is_over():
    buffer = Buffer()
    sampler = DeadlineSampler(buffer, max_staleness_versions=2)
    sampler.required_buffer_capacity(2)
    counts = []
    asyncio.run(sampler.admit(trainer_version_fn=lambda: 0))
    for number in range(3):  # the second slot is removed, and the third is for the same prompt
        counts.append(sampler.outstanding(0))
        asyncio.run(buffer.commit(buffer.reserve(weight_version=0), {"prompt": number}))
        if number == 1:
            asyncio.run(buffer.remove([1], remove_in_dp=False))
    assert counts == [2, 2, 1]
    asked = {"current_train_weight": 0, "min_prompt_groups": 1, "max_prompt_groups": 2}
    assert asyncio.run(sampler.select(**asked))[1] == 2
    assert (sampler.outstanding(0), sampler.outstanding(1)) == (2, 0)


def test_restored_groups_are_outstanding_and_keep_their_age():
    buffer = filled((5, True), (6, True))
    sampler = DeadlineSampler(buffer, max_staleness_versions=2)
    sampler.required_buffer_capacity(2)
    sampler.set_dispatch_index(7)
    assert sampler.outstanding(7) == 2
    asked = {"current_train_weight": 7, "min_prompt_groups": 1, "max_prompt_groups": 2}
    assert asyncio.run(sampler.select(**asked))[1] == 2
    assert sampler.steps.ages == {2: 1, 1: 1}
    assert isinstance(sampler.steps, Steps)
    assert sampler.outstanding(7) == 2
    assert sampler.outstanding(8) == 0


def test_dispatch_is_two_steps_ahead_by_default():
    """With max_staleness_versions=1, dispatch is one step ahead."""
    found = [DeadlineSampler(Buffer(), max_staleness_versions=bound).ahead for bound in (1, 2, 8)]
    assert found == [1, 2, 2]


def test_nothing_is_evicted_or_aborted():
    sampler = DeadlineSampler(filled((0, True)), max_staleness_versions=1)
    assert asyncio.run(sampler.evict(current_train_weight=9)) == 0
    assert not sampler.should_abort_inflight(start_weight_version=0, current_train_weight=9)
    assert not sampler.is_on_policy


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_staleness_versions": 0}, "needs max_staleness_versions ≥ 1.*got 0 and 0.*in_order"),
        ({"max_staleness_versions": -1}, "got -1 and -1"),
        ({"max_staleness_versions": 2, "steps_ahead": 3}, "got 2 and 3"),
        ({"max_staleness_versions": 2, "steps_ahead": -1}, "got 2 and -1"),
    ],
)
def test_options_that_cannot_work_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        DeadlineSampler(Buffer(), **options)


def test_the_trainer_must_say_how_many_groups_a_step_has():
    sampler = DeadlineSampler(Buffer(), max_staleness_versions=2)
    with pytest.raises(ValueError, match="groups of a step"):
        asyncio.run(sampler.admit(trainer_version_fn=lambda: 0))

"""The law of a run: no group is lost because of its age, and slow groups are trained like others."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from ray_here import ray_here

from headrace.pipeline import RayAssembler
from headrace.transforms import GroupAssembler, StreamWarning
from headrace.transforms.streams import assembler as assembler_module
from headrace.transforms.streams.steps import Steps

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # after tests/support, which has a batches.py
from worlds import Run, World, columns

WORLDS = 80
PARTS = 4


def random_run(seed: int) -> Run:
    """A run with a staleness bound in a finite random world."""
    dice = Random(seed)
    groups, size, bound = dice.randint(1, 5), dice.randint(1, 3), dice.randint(0, 4)
    cuts = [0, *sorted(dice.sample(range(1, groups), min(groups - 1, dice.randint(0, 2)))), groups]
    takers = tuple(end - begin for begin, end in pairwise(cuts))
    equal, failing, behind = (
        dice.choice([0.0, 0.0, 0.4]),
        dice.choice([0.0, 0.0, 0.1]),
        dice.choice([0, 0, 1]),
    )
    world = World(
        seed=seed,
        slots=dice.randint(size, 40),
        size=size,
        groups=groups,
        step=dice.choice([1, 10, 60]),
        ticks=10**9,
        spread=dice.choice([0.0, 0.5, 1.5]),
        noise=dice.choice([0.0, 0.5]),
        failing=failing,
        equal=equal,
        rows=dice.choice([1, 1, 3]),
        draw=dice.randint(1, 7),
        prompts=dice.randint(30, 120),
        behind=behind,
        versions=(1,) if behind else dice.choice([(1,), (1,), (0, 1), (2,), (0, 0, 3)]),
        takers=() if equal else takers,
    )
    options = {"max_staleness": bound, "steps_ahead": dice.randint(0, bound)}
    if failing and dice.random() < 0.5:
        options |= {"on_failure": "refill", "refill": None, "max_refills": 99}
    return Run(world, options)


def broken_laws(run: Run) -> Counter:
    """For each law, the number of groups that break it."""
    run.go()
    known, counts = run.known.values(), run.assembler.counts
    bound = run.assembler.max_staleness + run.world.behind
    ages = Counter(group.age for group in known if group.fate in ("trained", "rejected"))
    return +Counter(
        {
            "dropped": sum(number for reason, number in counts.items() if reason != "failed"),
            "too old": sum(number for age, number in ages.items() if age > bound),
            "never trained": run.world.prompts - sum(bool(group.fate) for group in known),
            "held": run.assembler.pending + run.assembler.ready,
            "counted at another age": (ages - Counter(run.assembler.ages)).total(),
        }
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no group may take longer")
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_and_nothing_stops_in_any_world(part):
    for seed in range(part, WORLDS, PARTS):
        run = random_run(seed)
        assert not broken_laws(run), (seed, run.world, run.options)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no group may take longer")
def test_an_assembler_on_ray_follows_the_same_law():
    pytest.importorskip("ray", reason="the extra `ray` is not installed")

    class OnRay(RayAssembler):
        max_staleness = property(lambda self: self._local.max_staleness)
        on_failure = property(lambda self: self._local.on_failure)
        on_stale = property(lambda self: self._local.on_stale)

    with ray_here():
        for seed in range(3):
            run = random_run(seed)
            run = Run(run.world, run.options, make=partial(OnRay, max_ready=10**6))
            assert not broken_laws(run), (seed, run.world, run.options)


def too_few(steps, whole, waiting, size, options):
    """The function `waits_for` without its rule 3."""
    return [] if not steps.taken and len(list(whole)) < size else None


class Forgets(Steps):
    """Steps that count as ended as soon as they have taken their groups."""

    def take(self, oldest):
        super().take(oldest)
        self.taken = 0
        self.over += 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no group may take longer")
@pytest.mark.parametrize("broken", ["dispatches too much", "no check", "no order", "forgets the step"])
def test_each_part_of_the_rule_is_needed(broken, monkeypatch):
    """Without any single part of the rule, groups are trained too late, or the run stops."""
    if broken == "no check":
        monkeypatch.setattr(assembler_module, "waits_for", too_few)
    if broken == "no order":
        monkeypatch.setattr(Steps, "in_order", lambda self, groups: list(groups))
    for seed in range(60):
        run = random_run(seed)
        if broken == "dispatches too much":
            run.assembler.ahead = run.assembler.max_staleness + 1
        if broken == "forgets the step":
            if run.world.versions != (1,) or run.world.equal or len(run.world.takers) != 1:
                continue
            run.assembler._stream.steps = Forgets()
        if broken_laws(run):
            return
    pytest.fail("no world needs it")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no group may take longer")
def test_a_step_waits_no_longer_than_the_slowest_outstanding_rollout_needs():
    for seed in range(15):
        run = random_run(seed)
        run.world = replace(run.world, slots=10**6, draw=1, failing=0.0, equal=0.0, versions=(1,))
        run.free = run.world.slots
        assert not broken_laws(run)
        assert all(waited <= max(0, needed) for waited, needed in run.waits)


def rows(group: int, version: int = 0) -> object:
    batch = columns(group_id=[group], rollout_id=[group], version=[version])
    batch["next", "done"] = [True]
    return batch


def test_a_step_waits_for_the_slowest_group_only_if_it_must_train_it():
    """max_staleness = 2, one group per step. Group 0 is slow, so the third step must train it."""
    assembler = GroupAssembler(groups=1, group_size=1, max_staleness=2, steps_ahead=1, version_key="version")
    taken = []
    for group in range(6):
        assembler.announce(columns(group_id=[group], rollout_id=[group]))
        if group:
            assembler.put(rows(group, assembler.version))
        if group and (batch := assembler.take()) is not None:
            taken += batch["group_id"].tolist()
            assembler.version += 1
    assert taken == [1, 2]
    assembler.put(rows(0))
    assert [assembler.take()["group_id"].item() for _ in range(3)] == [0, 3, 4]
    assert assembler.ages == {0: 4, 2: 1}


def test_a_group_that_is_announced_late_is_as_old_as_its_dispatch():
    """max_staleness = 2. A run continues at version 5. Group 1 was dispatched at version 3: it is due now."""
    assembler = GroupAssembler(groups=1, group_size=1, max_staleness=2, steps_ahead=1, version_key="version")
    assembler.version = 5
    assembler.announce(columns(group_id=[0, 1], rollout_id=[0, 1], version=[5, 3]))
    assembler.put(rows(0, 5))
    assert assembler.take() is None
    assert [each.split(" has")[0] for each in assembler.blocked_by] == ["group 1"]
    assert "announced at step -2; this is step 0" in assembler.blocked_by[0]
    again = GroupAssembler(groups=1, group_size=1, max_staleness=2, steps_ahead=1, version_key="version")
    again.load_state_dict(assembler.state_dict())
    for each in (assembler, again):
        each.put(rows(1, 3))
        assert each.blocked_by == []
        assert [each.take()["group_id"].item() for _ in range(2)] == [1, 0]


def test_groups_that_were_never_announced_are_dropped_if_they_are_too_old():
    assembler = GroupAssembler(groups=1, group_size=1, max_staleness=1, version_key="version")
    assembler.put(rows(0))
    assembler.version = 2
    assert assembler.take() is None
    assert assembler.counts["stale"] == 1


@pytest.mark.parametrize(
    ("ahead", "bound", "warned"), [(0, 2, 0), (1, 2, 0), (2, 2, 1), (1, 1, 1), (0, 0, 0)]
)
def test_a_staleness_bound_without_slack_is_a_warning_at_the_first_dispatch(ahead, bound, warned):
    assembler = GroupAssembler(groups=1, max_staleness=bound, steps_ahead=ahead)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StreamWarning)
        assembler.announce(columns(group_id=[0], rollout_id=[0], expected_rollouts=[1]))
        assembler.announce(columns(group_id=[1], rollout_id=[1], expected_rollouts=[1]))
    assert [str(each.message) for each in caught] == warned * [
        f"no group may take longer than others: steps_ahead and max_staleness are both {ahead}, so each step "
        "waits for the slowest of the groups that were dispatched for it. This costs a third of the speed or "
        "more. Set max_staleness to steps_ahead + the latency of the slowest group divided by the time of a "
        "step. If such rows are too old, set steps_ahead to less"
    ]


def test_partitions_without_a_batch_do_not_stop_the_dispatch():
    """Three partitions have 6, 5 and 5 complete groups. None has the 8 of a batch, and nothing is pending."""
    options = {"groups": 8, "group_size": 1, "max_staleness": 1, "version_key": "version"}
    assembler = GroupAssembler(partition_key="part", **options)
    for group in range(16):
        batch = rows(group)
        batch["part"] = [group % 3]
        assembler.put(batch)
    assert assembler.take() is None
    assert assembler.capacity() == 1
    with pytest.raises(ValueError, match=r"on_stale='wait' needs groups .* and partition_key=None"):
        GroupAssembler(partition_key="part", on_stale="wait", **options)


def test_versions_map_to_the_last_step_at_which_they_were_the_newest():
    steps = Steps()
    steps.begin(10)  # the run continues at version 10
    for version in (10, 12, 12, 13):
        steps.end()
        steps.begin(version)
    assert [steps.of(version) for version in (8, 10, 11, 12, 13, 14)] == [-2, 1, 1, 3, 4, 4]


def test_many_versions_within_a_step_map_to_this_step():
    steps = Steps()
    steps.ages[0] = 1
    for version in range(1, 200):
        steps.begin(version)
    steps.end()
    steps.begin(200)
    assert [steps.of(version) for version in (0, 1, 100, 199, 200)] == [0, 0, 0, 0, 1]


def test_versions_before_the_last_64_count_as_one_step_each():
    """Each step has two versions. After 70 steps, the versions from 14 on are known, which is of step 7."""
    steps = Steps()
    steps.ages[0] = 1
    for version in range(2, 142, 2):
        steps.end()
        steps.begin(version)
    assert [steps.of(version) for version in (140, 139, 16, 15, 14, 13, 4)] == [70, 69, 8, 7, 7, 6, -3]
    assert len(steps.began) == 64
    again = Steps.from_plain(steps.to_plain())
    assert vars(again) == vars(steps)
    again.begin(142)
    assert steps.began[-1] == (140, 70)

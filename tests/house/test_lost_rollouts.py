"""The simulation of lost rollouts accounts for all rollouts, and detects what is dropped."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "lost_rollouts.json").read_text())
sys.path.append(str(ROOT / "benchmarks"))  # appended, so that modules of tests/ are found first

from lost_rollouts.clock import System, simulate  # noqa: E402
from lost_rollouts.page import page  # noqa: E402
from lost_rollouts.peers import SOURCES  # noqa: E402
from lost_rollouts.restarts import restart  # noqa: E402
from lost_rollouts.rules import PrimeRL, Slime, Tinker  # noqa: E402
from lost_rollouts.runs import pooled, work  # noqa: E402
from lost_rollouts.sources import Blocks, result_of, run_module  # noqa: E402
from lost_rollouts.stalls import CASES  # noqa: E402
from lost_rollouts.systems import OURS, OWN_LINES, SYSTEMS, WORLDS  # noqa: E402
from lost_rollouts.world import LEAST, MEAN, MOST, SEEN, World, published_tokens, two_classes  # noqa: E402

CONSTANT = World(lambda z, dice: 5, size=1, groups=1, slots=1, step=10, ticks=100)


def test_the_clock_gives_the_numbers_by_hand():
    """A rollout takes 5 ticks, and a step on it 10. So rollout 0 ends at 5, and steps at 15, 25, … 95."""
    account = simulate(System(CONSTANT, bound=None))
    assert [tick for tick, what in account.log if what == "step"] == list(range(15, 100, 10))
    assert account.tokens() == {
        "trained": 10 * 5,
        "open": 10 * 5,
    }  # 20 rollouts of 5 tokens end in 100 ticks: 10 are trained
    ages = [group.age for group in account.groups if group.fate == "trained"]
    # Rollout n begins at tick 5 n with version (5 n - 5) // 10 (at least 0), and is trained at version n.
    assert ages == [n - max(0, (5 * n - 5) // 10) for n in range(10)]


@pytest.mark.parametrize("failing", [0.0, 0.02])
@pytest.mark.parametrize("rule", [System, PrimeRL, Tinker, Slime])
def test_all_rollouts_and_tokens_are_trained_or_have_a_reason(rule, failing):
    """The clock compares their numbers with the busy ticks of all slots and the rollouts that were begun."""
    account = simulate(rule(World(two_classes(5, 100), slots=64, ticks=1200, failing=failing)))
    fates = {"trained": True, "open": True, "stale": rule is not Slime, "failed": failing > 0}
    assert set(account.tokens()) == {fate for fate, found in fates.items() if found}
    for group in account.groups:
        if group.fate == "trained":
            old = group.age > 2 and rule is not Slime
            assert (group.ended, group.spent, old) == (4, sum(group.ticks), False)
    account.groups[0].spent += 1
    with pytest.raises(
        RuntimeError, match=r"rollouts and \d+ tokens were generated, and \d+ and \d+ have a fate"
    ):
        account.check()


class Forgets(System):
    """A rule that forgets a group without a reason."""

    def whole(self, group):
        if group.number == 3:
            del self.held[group.number]
        else:
            super().whole(group)


class Twice(System):
    """A rule that trains each group twice."""

    def take(self):
        self.last, last = super().take() or [], getattr(self, "last", None)
        return last or self.last


def test_a_group_that_is_lost_without_a_reason_or_trained_twice_is_found():
    with pytest.raises(RuntimeError, match=r"prompts \[3\] left without a reason"):
        simulate(Forgets(World(ticks=300), bound=None))
    with pytest.raises(RuntimeError, match="is trained, but is trained"):
        simulate(Twice(World(ticks=300), bound=None))


def test_a_rule_that_drops_slow_groups_is_detected():
    world = World(two_classes(5, 100), slots=128, ticks=1200)
    counts = {bound: simulate(System(world, bound)).counts() for bound in (2, None)}
    sent, trained = (counts[2][name] for name in ("sent_slow", "trained_slow"))
    assert sent > 10 * trained
    assert counts[2]["tokens"]["stale"] > counts[2]["tokens"]["trained"]
    shares = [counts[None][f"{what}_slow"] / counts[None][what] for what in ("sent", "trained")]
    assert 0.8 < shares[1] / shares[0] < 1.2


def test_the_numbers_of_a_run_are_those_of_its_groups():
    account = simulate(System(World(ticks=800, failing=0.02)))
    found = Counter()
    for group in account.groups:  # this rule draws each prompt once
        found[f"age {group.age}"] += group.fate == "trained"
        if group.begun <= 600 and group.fate != "failed":
            for what, holds in (("sent", True), ("trained", group.fate == "trained")):
                found[what] += holds
                found[f"{what}_slow"] += holds and group.decile == 9
    counts = account.counts()
    assert all(counts[what] == found[what] for what in ("sent", "sent_slow", "trained", "trained_slow"))
    assert counts["ages"] == {str(age): found[f"age {age}"] for age in range(3)}
    assert min(found["sent_slow"], found["sent"] - found["trained"], sum(account.rollouts().values())) > 10


def test_the_latencies_of_a_prompt_depend_only_on_its_number_and_the_seed():
    world = World(failing=0.5)
    one, other = world.group(7), replace(world, slots=1).group(7)
    assert (one.ticks, one.fails, one.decile) == (other.ticks, other.fails, other.decile)
    assert replace(world, seed=1).group(7).ticks != one.ticks
    deciles = Counter(world.group(number).decile for number in range(2000))
    assert all(abs(deciles[each] - 200) < 50 for each in range(10))


def test_published_lengths_have_the_published_mean_and_ends():
    """The ends are the medians of the shortest and the longest rollout of a step, over 400 steps."""
    dice = Random(0)
    steps = [[published_tokens(dice.gauss(0, 1), dice) for _ in range(SEEN)] for _ in range(400)]
    assert fmean(map(fmean, steps)) == pytest.approx(MEAN, rel=0.03)
    assert sorted(map(min, steps))[200] == pytest.approx(LEAST, rel=0.1)
    assert sorted(map(max, steps))[200] == pytest.approx(MOST, rel=0.1)


def test_code_of_others_runs_with_stubs_and_does_not_wait():
    text = (
        "from far.away import wait\nclass A:\n    async def ask(self):\n        await wait()\nclass B: pass"
    )

    async def wait():
        raise Blocks

    names = run_module(text, stubs={"far": {}, "far.away": {"wait": wait}})
    with pytest.raises(Blocks):
        result_of(names["A"]().ask())
    assert "far" not in sys.modules
    assert "B" not in run_module(text, only="A")  # only class A was run, without any import


def test_the_page_has_the_results():
    stored = (ROOT / "docs" / "lost-rollouts.md").read_text()
    assert page(RESULTS) == stored, "python benchmarks/lost_rollouts --render"


def test_every_system_was_run_in_every_world():
    assert RESULTS["worlds"].keys() == WORLDS.keys()
    assert all([*rows] == [*SYSTEMS] for rows in RESULTS["worlds"].values())
    assert [*RESULTS["restarts"]] == [name for name, entry in SYSTEMS.items() if entry.restarts]
    assert [*RESULTS["stalls"]] == [*CASES]
    assert {entry.project for entry in SYSTEMS.values()} == OWN_LINES.keys()


def test_in_stored_runs_the_option_wait_loses_no_group_and_prefers_none():
    waiting = [name for name in OURS if "`wait`" in name]
    assert len(waiting) == 3
    for world, rows in RESULTS["worlds"].items():
        for name in waiting:
            row = rows[name]
            assert (row["sent"], row["sent_slow"]) == (row["trained"], row["trained_slow"]), (world, name)
            assert "stale" not in row["tokens"]
            assert max(map(int, row["ages"])) <= row["bound"]
    assert set(RESULTS["restarts"][waiting[0]].values()) == {0}


def again(name: str) -> dict:
    return pooled([work(("worlds", "Two classes", name, seed)) for seed in range(3)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
def test_a_new_run_reproduces_our_stored_rows():
    for name in OURS:
        found = RESULTS["worlds"]["Two classes"][name]
        assert again(name) == found, "python benchmarks/lost_rollouts --only headrace"
    assert restart(OURS[0], 3) == {"skipped": 0, "twice": 0, "stale": 0}


@pytest.mark.slow
@pytest.mark.parametrize("project", [name for name in OWN_LINES if name != "headrace"])
def test_a_new_run_reproduces_the_stored_rows_of_other_projects(project):
    missing = [each.folder for each in SOURCES if each.project == project and not each.folder.exists()]
    if missing:
        pytest.skip(f"{missing[0]} is not there; python benchmarks/lost_rollouts --only {project} gets it")
    names = [name for name, entry in SYSTEMS.items() if entry.project == project]
    assert {name: again(name) for name in names} == {
        name: RESULTS["worlds"]["Two classes"][name] for name in names
    }

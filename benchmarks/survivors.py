"""Measure whether the report finds that slow rollouts are lost, in simulated runs around the real assembler.

python benchmarks/survivors.py [--seeds 100] [--groups 400]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from results import main
from runs import WORLDS
from tables import Cell, Row, Table
from worlds import Run, side_by_side

from headrace.pipeline.tools.report import BIASED, advise
from headrace.transforms import StreamWarning

NAME = "slow-groups-lost"  # name of the advisory
TWO = {"max_staleness": 2}
# For each policy: options, whether the dispatch is paced, and whether groups are announced.
POLICIES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "not announced, drop": (TWO | {"on_stale": "drop"}, False, False),
    "announced without a limit, drop": (TWO | {"on_stale": "drop"}, False, True),
    "paced, drop": (TWO | {"on_stale": "drop"}, True, True),
    "paced, mask": (TWO | {"on_stale": "mask"}, True, True),
    "wait, a timeout of 60 ticks, drop": ({"max_staleness": 4, "timeout_seconds": 0.06}, True, True),
    "wait, max_staleness=2": (TWO, True, True),
    "wait, max_staleness=4": ({"max_staleness": 4}, True, True),
}
TITLES = list(WORLDS)[:3]
NOTE = """100 runs of 400 groups. Latencies are invented, as in the benchmark before this one. The
table has the number of runs at whose end the report says that slow groups are lost. The first five policies
lose them, and the last two do not. If groups are not announced, their latency is only known from the first
row on; in the third world the rollouts of a group end at once, so nothing is found."""
BY_LENGTH = ("not announced, drop", "wait, max_staleness=2", "wait, max_staleness=4")
LENGTH_NOTE = """10 runs of 400 groups, as above. A rollout has a token for each tick, at most 256. The
table has the number of runs at whose end `survivors/length/z` is below −4. No announcement is needed for a
length."""


def numbers_of(
    title: str, policy: str, seed: int, groups: int, *, tokens: bool = False
) -> Mapping[str, float]:
    """The numbers at the end of one run."""
    options, paced, announces = POLICIES[policy]
    world = replace(WORLDS[title], seed=seed, prompts=groups, ticks=10**9, tokens=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamWarning)  # this warns of missing slack
        return Run(world, dict(options), paced=paced, announces=announces).go().assembler.survivors.numbers()


def fires(*run: Any) -> bool:
    """Whether the report of one run says that slow groups are lost."""
    return NAME in {advisory.name for advisory in advise(numbers_of(*run))}


def fires_by_length(*run: Any) -> bool:
    """Whether the report finds the loss by the lengths of rollouts."""
    return numbers_of(*run, tokens=True).get("survivors/length/z", 0.0) < BIASED


def tables(options: argparse.Namespace) -> list[Table]:
    """Make the tables of runs with the advisory, and of runs in which lengths alone show the loss."""
    tenth = max(1, options.seeds // 10)
    slow = _counts(fires, POLICIES, options.seeds, options)
    long = _counts(fires_by_length, BY_LENGTH, tenth, options)
    return [
        Table("Runs in which the report says that slow groups are lost", NOTE, ["policy", *TITLES], slow),
        Table("Runs in which it says so by the length alone", LENGTH_NOTE, ["policy", *TITLES], long),
    ]


def _counts(
    says: Callable[..., bool], policies: Iterable[str], seeds: int, options: argparse.Namespace
) -> list[Row]:
    runs = [(t, policy, seed, options.groups) for policy in policies for t in TITLES for seed in range(seeds)]
    said = dict(zip(runs, side_by_side(says, runs, quick=options.quick), strict=True))
    rows = []
    for policy in policies:
        counts = [sum(said[title, policy, seed, options.groups] for seed in range(seeds)) for title in TITLES]
        rows.append(Row(policy, [Cell(count, "d") for count in counts]))
    return rows


if __name__ == "__main__":
    main(tables, __doc__, warm=False, seeds=(100, 1), groups=(400, 40))

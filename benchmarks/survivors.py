"""Whether the report finds that slow rollouts are lost: simulated runs around the real assembler.

python benchmarks/survivors.py [--seeds 100] [--groups 400]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from results import main
from runs import WORLDS
from tables import Cell, Row, Table
from worlds import Run, side_by_side

from headrace.pipeline.tools.report import advise
from headrace.transforms import StreamWarning

NAME = "slow-groups-lost"  # of the advisory
TWO = {"max_staleness": 2}
# Options; whether the dispatch is paced, and whether groups are announced.
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


def numbers_of(title: str, policy: str, seed: int, groups: int) -> Mapping[str, float]:
    """The numbers of one run at its end."""
    options, paced, announces = POLICIES[policy]
    world = replace(WORLDS[title], seed=seed, prompts=groups, ticks=10**9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamWarning)  # that there is no slack
        return Run(world, dict(options), paced=paced, announces=announces).go().assembler.survivors.numbers()


def fires(*run: Any) -> bool:
    """Whether the report of one run says that slow groups are lost."""
    return NAME in {advisory.name for advisory in advise(numbers_of(*run))}


def tables(options: argparse.Namespace) -> list[Table]:
    """How many runs have the advisory."""
    seeds, groups = options.seeds, options.groups
    runs = [(t, policy, seed, groups) for policy in POLICIES for t in TITLES for seed in range(seeds)]
    said = dict(zip(runs, side_by_side(fires, runs, quick=options.quick), strict=True))
    rows = []
    for policy in POLICIES:
        counts = [sum(said[title, policy, seed, groups] for seed in range(seeds)) for title in TITLES]
        rows.append(Row(policy, [Cell(count, "d") for count in counts]))
    return [Table("Runs in which the report says that slow groups are lost", NOTE, ["policy", *TITLES], rows)]


if __name__ == "__main__":
    main(tables, __doc__, warm=False, seeds=(100, 1), groups=(400, 40))

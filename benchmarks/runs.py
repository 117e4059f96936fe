"""Measure which groups a run trains, by their latency, in simulated runs around the real assembler.

python benchmarks/runs.py [--seeds 5] [--ticks 3000]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from results import main
from tables import Cell, Row, Table
from worlds import Run, World, side_by_side

from headrace.transforms import StreamWarning

WORLDS = {
    "A mild tail": World(slots=96, spread=0.5, noise=0.2),
    "A heavy tail": World(),
    "Two classes, of 1 and 100 ticks": World(slots=128, spread=0),
    "A mild tail, 40 % of the groups rejected, 1 % of the rollouts failed": World(
        slots=160, spread=0.5, noise=0.2, equal=0.4, failing=0.01
    ),
    "A mild tail, rollouts of 3 rows, 5 % failed and refilled": World(
        slots=96, spread=0.5, noise=0.2, rows=3, failing=0.05
    ),
}
TWO = {"max_staleness": 2}
POLICIES: dict[str, tuple[dict[str, Any], bool]] = {
    "not announced, drop": (TWO | {"on_stale": "drop"}, False),
    "paced, drop": (TWO | {"on_stale": "drop"}, True),
    "paced, mask": (TWO | {"on_stale": "mask"}, True),
    "paced, refill": (TWO | {"on_stale": "refill", "refill": None, "max_refills": 8}, True),
} | {
    f"wait, steps_ahead={ahead}, max_staleness={bound}": (
        {"max_staleness": bound, "steps_ahead": ahead},
        True,
    )
    for ahead, bound in ((0, 2), (1, 2), (2, 2), (2, 3), (2, 4), (2, 8))
}
COLUMNS = {
    "bias": ("bias", ".1f"),
    "slowest tenth": ("slowest", ".2f"),
    "speed": ("speed", ".2f"),
    "waste, %": ("waste", ".0f"),
    "age": ("age", ".1f"),
    "oldest": ("oldest", ".0f"),
}
NOTE = """{groups} groups of {size} rollouts a step, a step of {step} ticks, {slots} slots for rollouts.
The numbers are means of 5 seeds of 3,000 ticks. Latencies are invented. A prompt has the same latencies
under every policy.

- bias: for tenths of the prompts by their latency, the greatest difference between a tenth's share of the
  trained groups and of the dispatched ones, in points of 100
- slowest tenth: the share of its groups that are trained, over the mean share
- speed: steps, over what trainer and slots allow at most
- waste: generated ticks that are not trained
- age: steps from the policy that acted to the step that trains, mean and most

"Not announced" is a collector that draws prompts by itself. "Paced" announces groups while there is
capacity."""


def table_of(world: World, policy: str) -> Mapping[str, float]:
    """Return the numbers of one run."""
    options, paced = POLICIES[policy]
    if world.rows > 1:
        options = {"on_failure": "refill", "refill": None, "max_refills": 8} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamWarning)  # "no slack", which this table shows
        return Run(world, dict(options), paced=paced, announces=paced).go().table()


def tables(options: argparse.Namespace) -> list[Table]:
    """Make a table for each world."""
    seeds, ticks = options.seeds, options.ticks
    places = [(title, policy, seed) for title in WORLDS for policy in POLICIES for seed in range(seeds)]
    worlds = {(title, seed): replace(WORLDS[title], ticks=ticks, seed=seed) for title, _, seed in places}
    runs = [(worlds[title, seed], policy) for title, policy, seed in places]
    by_place = dict(zip(places, side_by_side(table_of, runs, quick=options.quick), strict=True))
    out = []
    for title, world in WORLDS.items():
        rows = []
        for policy in POLICIES:
            mean = partial(_mean, [by_place[title, policy, seed] for seed in range(seeds)])
            rows.append(Row(policy, [Cell(mean(name), form) for name, form in COLUMNS.values()]))
        note = NOTE.format(**vars(world))
        out.append(Table(title, note, ["policy", *COLUMNS], rows))
    return out


def _mean(runs: list[Mapping[str, float]], name: str) -> float:
    return max(run[name] for run in runs) if name == "oldest" else fmean(run[name] for run in runs)


if __name__ == "__main__":
    main(tables, __doc__, warm=False, seeds=(5, 1), ticks=(3000, 60))

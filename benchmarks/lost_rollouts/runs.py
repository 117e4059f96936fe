"""Run all simulations in parallel, and sum up their numbers."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from lost_rollouts.clock import simulate
from lost_rollouts.restarts import KILLS, restart
from lost_rollouts.stalls import CASES, stall
from lost_rollouts.systems import SYSTEMS, WORLDS

SEEDS = 3
Job = tuple[str, str, str, int]
"""The table, the world (or empty), the system, and the seed."""


def jobs_of(projects: Sequence[str]) -> list[Job]:
    """All runs of these projects, the longest first."""
    chosen = [name for name, entry in SYSTEMS.items() if entry.project in projects]
    stalls = [("stalls", "", name, 0) for name in CASES if name.partition(",")[0] in projects]
    worlds = [("worlds", world, name, seed) for world in WORLDS for name in chosen for seed in range(SEEDS)]
    restarts = [
        ("restarts", "", name, seed) for name in chosen if SYSTEMS[name].restarts for seed in range(KILLS)
    ]
    worlds.sort(key=lambda job: WORLDS[job[1]].step, reverse=True)
    return stalls + worlds + restarts


def work(job: Job) -> dict[str, Any]:
    """Return the numbers of one run."""
    torch.set_num_threads(1)
    table, world, name, seed = job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if table == "stalls":
            return stall(name)
        if table == "restarts":
            return restart(name, seed)
        return simulate(SYSTEMS[name].make(replace(WORLDS[world], seed=seed))).counts()


def pooled(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum the numbers of several runs."""
    total = dict(runs[0])
    for run in runs[1:]:
        for name, value in run.items():
            if isinstance(value, dict):
                total[name] = dict(Counter(total[name]) + Counter(value))
            elif name in ("bound", "ended", "names", "after"):
                total[name] = total[name] or value
            else:
                total[name] += value
    if "ages" in total:
        total["ages"] = dict(sorted(total["ages"].items(), key=lambda pair: int(pair[0])))
    return total


def measured(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the results by table, world and system."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(work, jobs))
    by_place: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for (table, world, name, _), run in zip(jobs, runs, strict=True):
        by_place.setdefault((table, world, name), []).append(run)
    found: dict[str, Any] = {}
    for (table, world, name), some in by_place.items():
        place = found.setdefault(table, {})
        (place.setdefault(world, {}) if world else place)[name] = pooled(some)
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Join kept and new results, in the order of the systems."""

    def rows(order: Iterable[str], *place: str) -> dict[str, Any]:
        both = [old, new]
        for name in place:
            both = [each.get(name, {}) for each in both]
        found = both[0] | both[1]
        return {name: found[name] for name in order if name in found}

    worlds = {world: rows(SYSTEMS, "worlds", world) for world in WORLDS}
    return {"worlds": worlds, "restarts": rows(SYSTEMS, "restarts"), "stalls": rows(CASES, "stalls")}

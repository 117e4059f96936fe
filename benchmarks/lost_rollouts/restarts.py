"""Kill a run and continue it from its last checkpoint. Count prompts that are skipped or trained twice."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from lost_rollouts.clock import simulate
from lost_rollouts.systems import RESTARTS, SYSTEMS
from lost_rollouts.world import Group

KILLS = 10


def restart(name: str, seed: int) -> dict[str, int]:
    """Kill a run at a random tick, and continue from the last checkpoint. Each step ends with a checkpoint.

    Returns:
        The number of prompts that are ``skipped``: they were never trained, and no reason was recorded; that
        the final weights have trained ``twice``; and that were dropped for their age, ``stale``.
    """
    entry, world = SYSTEMS[name], replace(RESTARTS, seed=seed)
    checkpoint: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = {"journal": Path(folder) / "journal"} if entry.project == "headrace" else {}
        ends = simulate(entry.make(world)).log[-1][0]
        killed, again = entry.make(world, **options), None

        def save(groups: Iterable[Group]) -> None:
            checkpoint.update(state=killed.save(), fates=fates_of(groups))

        simulate(killed, save, until=1 + Random(seed).randrange(ends))
        again = entry.make(world, **options)
        if checkpoint:
            again.load(checkpoint["state"])
        after = simulate(again).groups
    before, later = checkpoint.get("fates", {}), fates_of(after)
    times = Counter(
        number for fates in (before, later) for number, fate in fates.items() if fate == "trained"
    )
    known = {*before} | {group.number for group in after}
    fates = [before.get(number) or later.get(number) for number in known]
    return {
        "skipped": (world.prompts or 0) - len(known),
        "twice": sum(number > 1 for number in times.values()),
        "stale": fates.count("stale"),
    }


def fates_of(groups: Iterable[Group]) -> dict[int, str]:
    """The fate of each group that has left, by prompt."""
    return {group.number: group.fate for group in groups if group.fate}

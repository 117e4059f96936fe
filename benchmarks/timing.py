"""Measure functions in alternating rounds, without page faults."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Times = Mapping[Any, Sequence[float]]  # for each function, by name: the seconds of each round


def measure(
    functions: Mapping[Any, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> Times:
    """Measure the seconds of each function in each round: CPU time, or the time of `clock`. Each round runs
    the functions in random order. One more round comes first, to warm up.
    """
    times: dict[Any, list[float]] = {name: [] for name in functions}
    shuffler = random.Random(0)
    for _ in range(rounds + 1):
        for name in shuffler.sample(list(functions), len(functions)):
            start = clock()
            functions[name]()
            times[name].append(clock() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def median_ms(times: Times, what: Any) -> float:
    """The median time of a function over the rounds, in milliseconds."""
    return 1e3 * statistics.median(times[what])


def ratio(times: Times, what: Any, over: Any) -> float:
    """The median over the rounds of the ratio of two functions' times."""
    return statistics.median(a / b for a, b in zip(times[what], times[over], strict=True))


def without_page_faults() -> None:
    """Restart with an allocator that keeps its memory. Without it, a copy takes 15 or 85 ms by chance."""
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    if os.environ.keys() & settings.keys() != settings.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})

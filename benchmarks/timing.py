"""CPU time of functions that take turns, without page faults."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable


def measure(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each function, by round, in random order; the first round is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    shuffler = random.Random(0)
    for _ in range(rounds + 1):
        for name in shuffler.sample(list(functions), len(functions)):
            start = time.process_time()
            functions[name]()
            times[name].append(time.process_time() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def without_page_faults() -> None:
    """Begin anew with an allocator that gives no memory back: else one copy costs 15 or 85 ms by chance."""
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    if os.environ.keys() & settings.keys() != settings.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})

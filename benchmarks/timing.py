"""CPU time of functions that take turns."""

from __future__ import annotations

import random
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

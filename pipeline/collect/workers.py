"""Detect a worker that is silent while others send rows. Rows have their worker in a stamped column."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from headrace.transforms.table.schema import ORIGIN, Origin, has_key

TIMES = 3  # a worker counts as silent only if another has sent rows this many times since
FACTOR = 10  # a pause may be this many times as long as the worker's longest pause before


@dataclass
class Heard:
    """The times at which a worker has sent rows."""

    times: list[float]
    """The times of its last puts; before the first put, the start of the watch."""
    longest: float = 0.0
    """The longest pause between two puts, in seconds."""
    last: str = "no row"
    """A description of its last row."""


class WorkerWatch:
    """Raises when a worker is silent for too long while another one sends rows.

    Args:
        patience: lower bound in seconds for the default of `worker_patience`. If both are None, workers are
            not watched.
        worker_patience: seconds for which a worker may be silent; None: ten times its longest pause so far,
            its start included, and at least `patience`.
        workers: number of workers, if it is known. Then a worker that never sends a row is detected, too.
    """

    def __init__(self, patience: float | None, worker_patience: float | None, workers: int = 0):
        self.patience, self.worker_patience, self.workers = patience, worker_patience, workers
        self._heard: dict[int, Heard] = {}
        self._numbered = 0  # number of workers, from the origin of rows
        self._begun = math.inf

    def begin(self) -> None:
        """Start the clock of all workers."""
        self._begun = min(self._begun, time.monotonic())

    def saw(self, rows: TensorDictBase, assembler: Any) -> None:
        """Note the workers of rows that were put into an assembler."""
        if not has_key(rows, ORIGIN):
            return
        now = time.monotonic()
        columns = (ORIGIN, assembler.group_key, assembler.rollout_key)
        origins, groups, rollouts = (rows.get(key).reshape(rows.numel(), -1).cpu() for key in columns)
        last = {
            origin.worker: (row, origin) for row, origin in enumerate(map(Origin._make, origins.tolist()))
        }
        for worker, (row, origin) in last.items():
            heard = self._heard.setdefault(worker, Heard([self._begun]))
            heard.longest = max(heard.longest, now - heard.times[-1])
            heard.times = [*heard.times, now][-TIMES:]
            self._numbered = origin.workers
            heard.last = f"row {origin.number} of rollout {int(rollouts[row])} of group {int(groups[row])}"
        if self.workers == self._numbered:
            for worker in range(self.workers):
                self._heard.setdefault(worker, Heard([self._begun], longest=now - self._begun))

    def check(self, assembler: Any) -> None:
        """Check for a silent worker.

        Raises:
            StalledError: a worker is silent. The message lists the groups that wait for it.
        """
        if self.patience is None and self.worker_patience is None:
            return
        now = time.monotonic()
        for worker, heard in self._heard.items():
            silent, since = now - heard.times[-1], heard.times[-1]
            others = [each for each in self._heard.values() if len(each.times) == TIMES]
            if silent >= self._limit(heard) and any(each.times[0] > since for each in others):
                raise assembler.stalled(
                    f"worker {worker} has been silent for {silent:.1f} s while others sent rows; its last "
                    f"was {heard.last}. Check whether it has died (its error is on stderr) or its "
                    "environment hangs. If it is only slow, raise worker_patience",
                    worker=(worker, self._numbered),
                )

    def numbered(self, workers: Sequence[int]) -> tuple[int, int] | None:
        """(w, W) if `workers` is the one worker w and the rows are stamped with its number; else None."""
        if len(workers) == 1 and 0 < self._numbered == self.workers:
            return workers[0], self._numbered
        return None

    def _limit(self, heard: Heard) -> float:
        if self.worker_patience is not None:
            return self.worker_patience
        return max(self.patience or 0.0, FACTOR * heard.longest)

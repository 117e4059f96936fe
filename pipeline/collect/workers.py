"""Which worker is silent while others are not, by the origin that is stamped on rows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from headrace.transforms.schema import ORIGIN, Origin, has_key

TIMES = 3  # that another worker sends rows before one is called silent
FACTOR = 10  # by which a pause may be longer than all before


@dataclass
class Heard:
    """What was heard of a worker."""

    times: list[float]
    """When, the last times; at first when it was begun."""
    longest: float = 0.0
    """Seconds between two of them at most."""
    last: str = "no row"
    """Its last row in words."""


class WorkerWatch:
    """Raise where one worker is silent for too long while another one is not.

    Args:
        patience: seconds for which any worker may be silent; None: no worker is, without `worker_patience`.
        worker_patience: seconds after which a worker is silent for too long. None: ten times its longest
            pause so far, its start included, and at least `patience`.
        workers: how many there are, if that is known: one that sends nothing at all is silent, too.
    """

    def __init__(self, patience: float | None, worker_patience: float | None, workers: int = 0):
        self.patience, self.worker_patience, self.workers = patience, worker_patience, workers
        self._heard: dict[int, Heard] = {}
        self._numbered = 0  # workers, as the rows say
        self._begun = math.inf

    def begin(self) -> None:
        """The workers are asked for rows from now on."""
        self._begun = min(self._begun, time.monotonic())

    def saw(self, rows: TensorDictBase, assembler: Any) -> None:
        """Note which workers have sent rows that were put into an assembler."""
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
        """Raise where a worker is silent.

        Raises:
            StalledError: one is, with what waits for it.
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
                    f"was {heard.last}. Has it died, or does its environment hang? Its error, if there is "
                    "one, is on stderr. If it is slow, set a longer worker_patience",
                    worker=(worker, self._numbered),
                )

    def _limit(self, heard: Heard) -> float:
        if self.worker_patience is not None:
            return self.worker_patience
        return max(self.patience or 0.0, FACTOR * heard.longest)

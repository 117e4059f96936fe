"""Hold the results of a task over a dump: the numbers that it prints and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, repr=False)
class TaskResult:
    """The numbers of a task, such as ``replay``.

    Attributes:
        number: the number that a sweep shows, such as the number of findings.
        numbers: all numbers, in the form of the task's JSON file.
        said: a text that says what was read, and what was not checked.
        folder: the folder of the files that the task has written, such as ``report.html``; None: they are not
            kept.

    Example:
        >>> found = TaskResult(8.0, {"verdict": "…"}, "16 rows in 2 steps")
        >>> found["verdict"], found
        ('…', TaskResult(8: 16 rows in 2 steps))
    """

    number: float
    numbers: Mapping[str, Any]
    said: str
    folder: Path | None = None

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]

    def __repr__(self) -> str:
        return f"TaskResult({self.number:g}: {self.said}{f'; files in {self.folder}' * bool(self.folder)})"

    def __float__(self) -> float:
        return self.number

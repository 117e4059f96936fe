"""What a task over a dump has found: the numbers that it prints and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TaskResult:
    """The numbers of a task, such as ``replay``.

    Attributes:
        number: the one that a sweep shows, such as the number of findings.
        numbers: all, as the JSON file of the task has them.
        folder: with the files that the task has written, such as ``report.html``; None: they are not kept.

    Example:
        >>> TaskResult(8.0, {"verdict": "…"})["verdict"]
        '…'
    """

    number: float
    numbers: Mapping[str, Any] = field(repr=False)
    folder: Path | None = None

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]

    def __float__(self) -> float:
        return self.number

"""Read the failed steps of a run and the reasons from a file beside the rows of the other steps."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import NamedTuple

FAILED = "failed_steps.json"
MOST_BYTES = 2**24


class FailedStep(NamedTuple):
    """A step that failed, and the reason."""

    step: int | None
    """The number of the step; None if the file does not have it."""
    why: str

    @property
    def called(self) -> str:
        """Name the step for a sentence."""
        return "a step without a number" if self.step is None else f"step {self.step}"


def read_failed(folder: Path) -> list[FailedStep]:
    """Read the failed steps of a run, from its folder of rows; empty if there is no such file.

    Raises:
        ValueError: the file is not a plain file, is too large, or is not as :class:`ReportFolder` writes it.
    """
    try:
        found = (folder / FAILED).lstat()
    except FileNotFoundError:
        return []
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
        raise ValueError(f"it is no plain file of at most {MOST_BYTES:,} bytes")
    steps = json.loads((folder / FAILED).read_text(encoding="utf-8"))
    if not isinstance(steps, list):
        raise ValueError("it must have a list")
    for each in steps:
        match each:
            case [int() | None, str()]:
                continue
        raise ValueError(f"each entry must be [step, reason]; found {str(each)[:80]}")
    return [FailedStep(*each) for each in steps]

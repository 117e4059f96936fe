"""The steps of a run that failed and have no rows: a file beside the rows says which, and why."""

from __future__ import annotations

import json
import stat
from pathlib import Path

FAILED = "failed_steps.json"
MOST_BYTES = 2**24

Failed = list[tuple[int | None, str]]
"""(step, reason); None: nobody knows its number."""


def read_failed(folder: Path) -> Failed:
    """The failed steps of a run, from its folder of rows; empty where there is no such file.

    Raises:
        ValueError: the file is no plain file, too large, or not as :class:`ReportFolder` writes it.
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
    return [(step, why) for step, why in steps]

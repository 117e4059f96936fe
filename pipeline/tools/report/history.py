"""Keep the numbers of all steps of a run in a file, so that after a restart the page shows the whole run.

Each line is a JSON object: a step with its numbers, or a start of the run, with the step after the start, the
time and the name of the recipe.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import NamedTuple

from headrace.transforms.carry import write_whole

from .over_steps import Numbers
from .valid_json import json_text

HISTORY = "history.ndjson"
MOST_LETTERS = 10_000  # at most this many letters are read to find the name of the recipe


class RunHistory(NamedTuple):
    """The starts and the numbers of a run."""

    starts: list[tuple[int, str]]
    """The first step after each start of the run, and the time. The first entry is the beginning."""
    steps: list[tuple[int, Numbers]]
    """The recorded numbers of each step."""


def begin_history(path: Path, step: int, now: str, *, resumes: bool, recipe: str = "") -> RunHistory:
    """Begin a file, or continue one. The entries of an existing file for `step` and later steps are removed.

    Args:
        path: path of the file. Its folder is made.
        step: the first step of this process.
        now: the time.
        resumes: whether to continue an existing file.
        recipe: the name of the recipe, or the title of the run.

    Returns:
        The earlier starts and steps, and this start.

    Raises:
        ValueError: the file is not in the form that this module writes.
    """
    found = read_history(path) if resumes and path.exists() else RunHistory([], [])
    starts = [each for each in found.starts if each[0] < step] + [(step, now)]
    kept = RunHistory(starts, [each for each in found.steps if each[0] < step])
    lines = [json_text({"step": first, "began": at, "recipe": recipe}) for first, at in kept.starts]
    lines += [_line(*each) for each in kept.steps]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8"))
    return kept


def add_step(path: Path, step: int, numbers: Numbers) -> None:
    """Append a step."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{_line(step, numbers)}\n")


def _line(step: int, numbers: Numbers) -> str:
    return json_text({"step": step, "numbers": numbers})


def read_recipe(folder: Path) -> str:
    """The name of a run's recipe, from its folder of rows; empty if it is not known.

    Example:
        >>> read_recipe(Path("no such folder"))
        ''
    """
    try:
        if not stat.S_ISREG((folder / HISTORY).lstat().st_mode):
            return ""
        with (folder / HISTORY).open(encoding="utf-8") as file:
            match json.loads(file.readline(MOST_LETTERS)):
                case {"recipe": str(recipe)}:
                    return recipe
    except (OSError, ValueError, RecursionError):  # a file may hold anything
        pass
    return ""


def read_history(path: Path) -> RunHistory:
    """Read a file. A last line that is cut off, because its process was killed, is left out.

    Raises:
        ValueError: a line is not in the form that this module writes.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / HISTORY
        >>> _ = begin_history(path, 0, "2026-11-22T04:19:11+00:00", resumes=False)
        >>> add_step(path, 0, {"rows/in": 8.0})
        >>> begin_history(path, 1, "2026-11-22T05:00:00+00:00", resumes=True).steps
        [(0, {'rows/in': 8.0})]
    """
    found = RunHistory([], [])
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            match json.loads(line):
                case {"step": int(step), "began": str(began)}:
                    found.starts.append((step, began))
                    continue
                case {"step": int(step), "numbers": dict(numbers)}:
                    known = {
                        str(k): math.nan if value is None else float(value) for k, value in numbers.items()
                    }
                    found.steps.append((step, known))
                    continue
        except (TypeError, ValueError):
            pass
        raise ValueError(
            f"{path}: line {number} must have a step with its numbers, or a start; found {line[:80]!r}. "
            "Remove the file: then the page begins at the next step"
        )
    return found

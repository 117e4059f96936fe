"""Say what is wrong with the path of a dump. Nothing here imports torch, which takes seconds."""

from __future__ import annotations

import glob
from pathlib import Path

from .wording import suggest

NAMES = 1000  # of a folder, among which a misspelt one is looked for


def missing_path(path: str | Path) -> str:
    """Return why a path has no file; an empty string if it has one.

    Args:
        path: a file, a folder or a glob pattern.

    Example:
        >>> missing_path("no/such/folder")
        'no/such/folder: there is no such file or folder'
    """
    if Path(path).exists():
        return ""
    if glob.has_magic(str(path)):
        found = glob.glob(str(path), recursive=True)
        return "" if found else f"{path}: no file matches this pattern"
    beside = Path(path).parent
    names = [each.name for each in sorted(beside.iterdir())[:NAMES]] if beside.is_dir() else []
    return f"{path}: there is no such file or folder{suggest(Path(path).name, names)}"

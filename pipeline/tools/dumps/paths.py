"""Say what is wrong with the path of a dump. Nothing here imports torch, which takes seconds."""

from __future__ import annotations

import glob
from collections import Counter
from pathlib import Path

from headrace.spelling import suggest

NAMES = 1000  # at most this many names of a folder are compared with a misspelt name


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
    folder, name = Path(path).parent, Path(path).name
    if not glob.has_magic(str(path)):
        return f"{path}: there is no such file or folder{suggest(name, names_in(folder))}"
    if glob.glob(str(path), recursive=True):
        return ""
    kinds = Counter("*" + Path(other).suffix for other in names_in(folder) if (folder / other).is_file())
    has = f"; {folder} has {', '.join(kind for kind, _ in kinds.most_common(3))}" if kinds else ""
    meant = "" if folder.is_dir() else suggest(folder.name, names_in(folder.parent))
    return f"{path}: no file matches this pattern{has or meant}"


def newest_run(folder: str | Path, files: str = "step_*.*") -> Path | None:
    """Return the run below a folder whose rows, in `files`, were written last; None if there is none."""
    below = [each for each in Path(folder).glob("*/**/rollouts") if any(each.glob(files))]
    return max(below, key=lambda each: each.stat().st_mtime).parent if below else None


def names_in(folder: Path) -> list[str]:
    """The first names in a folder, in order; none if it cannot be read."""
    return [each.name for each in sorted(folder.iterdir())[:NAMES]] if folder.is_dir() else []

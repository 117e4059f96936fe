"""Which files a path means, and in what format they are."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from .jsonl import read_lines
from .malformed import Skipped, SourceError, quote_some
from .parquet import read_schema
from .reading import Reading, first_record
from .registry import READERS, Format

SUFFIXES = (".pt", ".parquet", ".jsonl", ".jsonl.gz")


def find_files(path: str | Path, format: Format) -> list[Path]:
    """The files of a path, in the order of the numbers in their names.

    Args:
        path: a file, a folder or a glob pattern.
        format: whose patterns apply in a folder.

    Raises:
        SourceError: there are none.
    """
    root, patterns = Path(path), format.files
    if root.is_file():
        return [root]
    if root.is_dir():
        matched = _files_in_folder(root, format)
    elif glob.has_magic(str(path)):
        matched = [Path(name) for name in glob.glob(str(path), recursive=True)]
        patterns = (str(path),)
    else:
        raise SourceError(f"{path}: there is no such file or folder")
    files = sorted({file for file in matched if file.is_file()}, key=_by_number)
    if not files:
        raise SourceError(
            f"{path}: a file, or a folder with {' or '.join(patterns).replace('|', ' or ')}, is required; "
            "found none"
        )
    return files


def recognise(path: str | Path, *, skip_bad: bool = False) -> str:
    """The name of the format of a file, a folder or a glob, by its suffix and the keys of its first record.

    Args:
        path: a file, a folder or a glob pattern.
        skip_bad: whether malformed records before the first good one are skipped.

    Raises:
        SourceError: no format fits, or more than one.
    """
    if not Path(path).exists() and not glob.has_magic(str(path)):
        raise SourceError(f"{path}: there is no such file or folder")
    fitting, seen = [], ""
    keys_of: dict[Path, set[str]] = {}
    for name, format in READERS.items():
        try:
            first = find_files(path, format)[0]
        except SourceError:
            continue
        suffix = next((s for s in SUFFIXES if first.name.endswith(s)), "")
        if suffix and any(pattern.endswith(suffix.removesuffix(".gz")) for pattern in _patterns(format)):
            if format.keys and first not in keys_of:
                keys_of[first] = _first_keys(first, suffix, skip_bad)
                seen = f"{first} with {quote_some(sorted(keys_of[first]), most=20)}"
            if not format.keys or format.keys <= keys_of[first]:
                fitting.append(name)
    if len(fitting) != 1:
        raise SourceError(
            f"{path}: the format must be clear from the suffix and the first record; found "
            f"{' and '.join(fitting) if fitting else seen or 'no file with a known suffix'}. Set format to "
            f"one of {', '.join(READERS)}"
        )
    return fitting[0]


def _files_in_folder(folder: Path, format: Format) -> list[Path]:
    """What the format's patterns for the first place match that has anything."""
    for place in format.files:
        names = place.split("|")
        names += [f"{name}.gz" for name in names if name.endswith(".jsonl")]
        files = [file for name in names for file in folder.glob(name)]
        if format.ignored:
            files = [file for file in files if not re.fullmatch(format.ignored, file.name)]
        if files:
            return files
    return []


def _patterns(format: Format) -> list[str]:
    return [name for place in format.files for name in place.split("|")]


def _first_keys(path: Path, suffix: str, skip_bad: bool) -> set[str]:
    if suffix == ".parquet":
        return set(read_schema(path).names)
    return set(first_record(read_lines(path, Reading(skipped=Skipped(allowed=skip_bad)))))


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    """A sort key in which ``step_9`` comes before ``step_10``."""
    pieces = re.split(r"(\d+)", path.as_posix())
    return [(0, int(p), "") if p.isdecimal() and len(p) < 1000 else (1, 0, p) for p in pieces]

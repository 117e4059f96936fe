"""Which files a path means, and in what format they are."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from headrace.transforms.errors import listing

from .jsonl import read_lines
from .malformed import Skipped, SourceError
from .reading import Reading, first_record
from .registry import READERS, Format
from .trl import read_schema

SUFFIXES = (".pt", ".parquet", ".jsonl", ".jsonl.gz")


def find_files(path: str | Path, format: Format | None) -> list[Path]:
    """The files of a path, in the order of the numbers in their names.

    Args:
        path: a file, a folder or a glob pattern.
        format: whose patterns apply in a folder; None: all files with a known suffix.

    Raises:
        SourceError: there are none.
    """
    root = Path(path)
    if root.is_file():
        return [root]
    if root.is_dir():
        patterns = format.files if format else tuple(f"*{suffix}" for suffix in SUFFIXES)
        found: list[Path] = []
        for pattern in patterns:
            more = list(root.glob(pattern))
            more += root.glob(f"{pattern}.gz") if pattern.endswith(".jsonl") and format else []
            if format and format.leave:
                more = [file for file in more if not re.fullmatch(format.leave, file.name)]
            found += more
            if found and format:
                break
    else:
        patterns = (str(path),)
        if not glob.has_magic(str(path)):
            raise SourceError(f"{path}: there is no such file or folder")
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = sorted({file for file in found if file.is_file()}, key=_by_number)
    if not files:
        raise SourceError(
            f"{path}: a file, or a folder with {' or '.join(patterns)}, is required; found none"
        )
    return files


def recognise(path: str | Path, *, skip_bad: bool = False) -> str:
    """The name of the format of a file, a folder or a glob, by its suffix and the keys of its first record.

    Raises:
        SourceError: it is of none or of several formats.
    """
    if not Path(path).exists() and not glob.has_magic(str(path)):
        raise SourceError(f"{path}: there is no such file or folder")
    fits, seen = [], ""
    for name, format in READERS.items():
        try:
            first = find_files(path, format)[0]
        except SourceError:
            continue
        suffix = next((s for s in SUFFIXES if first.name.endswith(s)), "")
        if any(pattern.endswith(suffix.removesuffix(".gz")) for pattern in format.files) and suffix:
            keys = _head(first, suffix, skip_bad) if format.keys else set()
            seen = f"{first} with {listing(sorted(map(str, keys)), most=20)}" if keys else seen
            if format.keys <= keys:
                fits.append(name)
    if len(fits) != 1:
        raise SourceError(
            f"{path}: the format must be clear from the suffix and the first record; found "
            f"{' and '.join(fits) if fits else seen or 'no file with a known suffix'}. Set format to one of "
            f"{', '.join(READERS)}"
        )
    return fits[0]


def _head(path: Path, suffix: str, skip_bad: bool) -> set[str]:
    if suffix == ".parquet":
        return set(read_schema(path).names)
    return set(first_record(read_lines(path, Reading(skipped=Skipped(allowed=skip_bad)))))


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", path.as_posix())
    return [(0, int(p), "") if p.isdecimal() and len(p) < 1000 else (1, 0, p) for p in parts]

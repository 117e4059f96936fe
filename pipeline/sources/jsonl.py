"""JSON Lines, plain or gzipped, of any size: read a line at a time."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .malformed import SourceError, quote
from .reading import Reading, parse_records
from .record import Record
from .sample import Sample

MAX_LINE = 2**28  # bytes; one line is in memory at a time


def read_jsonl(
    path: Path, reading: Reading, parse: Callable[[Record, Reading], list[Sample]]
) -> Iterator[Sample]:
    """Read samples from a ``.jsonl`` or ``.jsonl.gz`` file, a line at a time.

    Args:
        path: the file.
        reading: the pass that the file belongs to.
        parse: makes samples of a record.

    Raises:
        SourceError: a record is malformed, and none may be skipped.
    """
    return parse_records(read_lines(path, reading), reading, parse)


def read_lines(path: Path, reading: Reading) -> Iterator[Record]:
    """The records of a file; blank lines are skipped.

    Raises:
        SourceError: a line that is no JSON object, or a file that is cut off or has no records.
    """
    count = 0
    try:
        with path.open("rb") as raw:
            for number, line in enumerate(_lines(raw, path), start=1):
                reading.position = raw.tell()
                if line.isspace():
                    continue
                count += 1
                where = f"{path}:{number}"
                try:
                    record = Record(decode(line, where), where, number)
                except SourceError as err:
                    reading.skipped.note(err)
                else:
                    yield record
    except (OSError, EOFError, zlib.error) as err:
        reading.skipped.note(SourceError(f"{path}: the file must be readable to its end; found {err}"))
        return
    if not count:
        reading.skipped.note(SourceError(f"{path}: a dump has at least one record; found an empty file"))


def decode(line: bytes, where: str) -> dict[str, Any]:
    """One JSON object, strictly: NaN, Infinity and repeated keys are errors.

    Raises:
        SourceError: the line is too long, not UTF-8, or not one JSON object.

    Example:
        >>> decode(b'{"reward": 0.5}', "a.jsonl:1")
        {'reward': 0.5}
    """
    if len(line) > MAX_LINE:
        raise SourceError(f"{where}: a line has at most {MAX_LINE} bytes; found a longer one")
    try:
        value = _DECODER.decode(line.decode())
    except UnicodeDecodeError as err:
        raise SourceError(f"{where}: a line must be UTF-8; found {err.reason} at byte {err.start}") from None
    except json.JSONDecodeError as err:
        cut = "" if line.endswith(b"\n") else ", on a last line without an end: is the file cut off?"
        raise SourceError(
            f"{where}: a line must be one JSON object; found {err.msg} at column {err.colno}{cut}"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as err:  # a hook's, or Python's limits on digits and nesting
        raise SourceError(f"{where}: a line must be one JSON object; found {err}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: a line must be one JSON object; found {quote(value)}")
    return value


def _lines(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    stream: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    while line := stream.readline(MAX_LINE + 1):
        yield line  # `decode` refuses a line that is too long; its rest is skipped here
        if len(line) > MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {quote(twice)} twice in one object")
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"the literal {name}, which is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)

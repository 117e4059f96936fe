"""Parquet files: their columns, their rows a few at a time, and a whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from .malformed import SourceError, first_line
from .reading import Reading
from .record import Record
from .sample import MAX_ROWS

ROWS = 256  # in memory at a time
MAX_VALUES = 2**28  # of a table that is read as a whole
Decoded = TypeVar("Decoded")


def read_schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file.

    Raises:
        SourceError: the file is damaged.
    """
    return _decode(pq.read_schema, path)


def read_table(path: Path) -> pa.Table:
    """All columns and rows of a Parquet file.

    Raises:
        SourceError: the file is damaged, or has more than :data:`MAX_ROWS` rows or :data:`MAX_VALUES` values:
            a run of equal ones takes no room in the file.
    """
    metadata = _decode(pq.read_metadata, path)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
    if metadata.num_rows > MAX_ROWS or values > MAX_VALUES:
        raise SourceError(
            f"{path}: a step has at most {MAX_ROWS} rows, with {MAX_VALUES} values in all columns; found "
            f"{metadata.num_rows} rows, with {values}"
        )
    return _decode(pq.read_table, path)


def _decode(decoder: Callable[[Path], Decoded], path: Path) -> Decoded:
    try:
        return decoder(path)
    except Exception as err:  # a damaged file makes the decoder raise anything
        raise SourceError(f"{path}: a Parquet file is required; found {first_line(err)}") from None


def read_rows(path: Path, reading: Reading) -> Iterator[Record]:
    """The rows of a Parquet file, a few at a time.

    Raises:
        SourceError: the file is damaged, or has no rows.
    """
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            size = path.stat().st_size
            for batch in file.iter_batches(batch_size=ROWS):
                reading.position = size * number // max(1, file.metadata.num_rows)
                for data in batch.to_pylist():
                    number += 1
                    yield Record(data, f"{path}, row {number}", number)
    except Exception as err:  # a damaged file makes the decoder raise anything
        reading.skipped.note(SourceError(f"{path}: a Parquet file must be readable; found {first_line(err)}"))
        return
    if not number:
        reading.skipped.note(SourceError(f"{path}: a dump has at least one row; found an empty table"))

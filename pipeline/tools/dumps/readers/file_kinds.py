"""Read the files of a dump: JSON Lines, Parquet, and files of ``torch.save``.

JSON Lines, plain or gzipped, are read a line at a time. Parquet is read a few rows at a time. A file of
``torch.save`` is loaded without running code, and without more memory than the file has bytes. Only the zip
archives of torch 1.6 and later can be checked like that, so older files are refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tensordict import TensorDictBase

from headrace.pipeline.tools.report import asked_line

from .batch import BY_ORDER, MAX_ROWS, Label, Sample
from .record import Record, SourceError, as_whole, first_line, quote
from .tokenizing import Counted, Tokenizer, add_tokens

LFS = b"version https://git-lfs.github.com/spec/"  # begins a Git LFS pointer, which has at most 1,024 bytes
MAX_LINE = 2**28  # bytes; one line is in memory at a time
ROWS = 256  # rows of a Parquet file in memory at a time
MESSAGES_KEPT = 8
STEPS_KEPT = 4096  # the first errors of at most this many steps are kept until the steps are read
MAX_VALUES = 2**28  # a table that is read as a whole has at most this many values
# The calls that plain data and tensors need in a pickle. torch allows more calls, and some of these let a
# small file claim much memory: bytearray(2**40), torch.LongTensor(2**40), nested hexadecimal encodings.
CALLED = re.compile(rb"c(?=((?:__builtin__|builtins|_?codecs|collections|torch[\w.]*)\n\w+)\n)")
ALLOWED = re.compile(
    rb"collections\nOrderedDict|(?:__builtin__|builtins)\n(?:set|complex)"
    rb"|torch\._utils\n_rebuild_(?:tensor_v2|tensor_v3|parameter)"
    rb"|torch\n(?:Size|device|bool|[a-z]+\d+\w*|(?!Untyped|Typed)\w+Storage)"
)
CONSTANT = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(?:\[[^\]"{]*?)?(?:NaN|-?Infinity)\b')  # with its key
Decoded = TypeVar("Decoded")


class NoGroupError(SourceError):
    """A record has no id of a group, and no option says which records form a group."""


def refuse_pointers(files: Sequence[Path]) -> None:
    """Check that no file is a pointer of Git LFS instead of the content itself.

    Raises:
        SourceError: a file is such a pointer.
    """
    small = (file for file in files if file.stat().st_size <= 1024)
    if pointers := [file for file in small if file.read_bytes().startswith(LFS)]:
        raise SourceError(
            f"{pointers[0]}: a dump is required; found a pointer of Git LFS, whose file was not fetched. "
            f"Pointers: {len(pointers)} of {len(files)} files. Run git lfs pull, or download the files"
        )


@dataclass(slots=True)
class Reading:
    """The options and the state of one pass over the files of a dump. Readers update `position`.

    Args:
        reward_keys: the names of the rewards to read; empty: those that the format reads by default.
        group_by: ``prompt`` makes equal prompts of a step one group, in formats without a group's id;
            ``order`` makes groups of consecutive rollouts (:func:`~readers.batch.group_by_order`).
        group_size: number of rollouts that were dispatched for each group.
        tokenizer: makes tokens of texts, for dumps without lengths in tokens.
        columns: the user's names of columns, for the format ``table``.
        skip_bad: skip malformed records. False: keep their errors for :meth:`take`.
        file: number of the file that is being read, from 0.
        done_bytes: size of the files that have been read.
        position: number of bytes that were read of this file.
        skipped: number of malformed records.
        messages: the errors of the first few malformed records.
        kept: the first error of each step since the last :meth:`take`.
        counted: number of rows that the tokenizer has encoded in each way.
        found: the names in `columns` that a row had a value for.
        first: the first record.
    """

    reward_keys: tuple[str, ...] = ()
    group_by: str | None = None
    group_size: int | None = None
    tokenizer: Tokenizer | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_bad: bool = False
    file: int = 0
    done_bytes: int = 0
    position: int = 0
    skipped: int = 0
    messages: list[str] = field(default_factory=list)
    kept: dict[int | None, SourceError] = field(default_factory=dict)
    counted: Counted = field(default_factory=Counted)
    found: set[str] = field(default_factory=set)
    first: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def reward_key(self) -> str | None:
        """The name of the reward, for formats that read one; None: the format's default."""
        return self.reward_keys[0] if self.reward_keys else None

    def restarted(self) -> Reading:
        """A new pass with the same options."""
        fresh: dict[str, Any] = {
            "messages": [],
            "kept": {},
            "counted": Counted(),
            "found": set(),
            "first": {},
        }
        return replace(self, file=0, done_bytes=0, position=0, skipped=0, **fresh)

    def add_tokens(self, rows: Sequence[Sample]) -> None:
        """Write the tokens of samples without a length, if there is a tokenizer (:func:`add_tokens`)."""
        if self.tokenizer is not None:
            self.counted = self.counted.plus(add_tokens(rows, self.tokenizer))

    def note(self, error: SourceError, step: int | None = None) -> None:
        """Count the error of a record or a file; `step` is the step that the record names, if any."""
        self.skipped += 1
        if not self.skip_bad and len(self.kept) < STEPS_KEPT:
            self.kept.setdefault(step, error)
        if len(self.messages) < MESSAGES_KEPT:
            self.messages.append(str(error))

    def take(self, last: int | None, following: int | None) -> list[tuple[int | None, SourceError]]:
        """Return the first error of each step since the last call, with the step that its record names.

        A record that names no step may belong to the step before it or after it. So its error is returned for
        both.

        Args:
            last: step of the previous good record; None: there is none.
            following: step of the next good record; None: there is none.
        """
        kept, self.kept = self.kept, {}
        unnamed = kept.pop(None, None)
        if unnamed is None:
            return list(kept.items())
        before = [(last, unnamed)] if last is not None or following is None else []
        after = [(following, unnamed)] if following not in (None, last) else []
        return [*before, *kept.items(), *after]  # a step's malformed records are next to its other records

    def group_of_prompt(self, prompt: Any, where: str, text: str | None = None) -> Label:
        """Make the label of a group from its prompt: what the user asked, and a hash of the whole prompt.

        Args:
            prompt: the prompt in the form of the dump: text, token ids or messages. Messages are compared as
                JSON, because two messages may have the same text as one message.
            where: ``file:line``.
            text: the text of messages.

        Raises:
            SourceError: there is no prompt.
            NoGroupError: `group_by` is neither ``prompt`` nor ``order``.
        """
        if self.group_by == "order":
            return BY_ORDER  # until all rows of the step are read
        if self.group_by != "prompt":
            raise NoGroupError(
                f"{where}: a sample needs a group; found none, and the same prompt drawn twice would look "
                "like one group. If each prompt was drawn once a step, set source.group_by=prompt "
                "(group_by='prompt' in Python), best with source.group_size, which is then checked. If "
                "each group's rollouts are next to one another, source.group_by=order takes groups from that"
            )
        if prompt is None and text is None:
            raise SourceError(f"{where}: with source.group_by=prompt, a prompt is required; found none")
        whole = json.dumps(text if prompt is None else prompt, sort_keys=True, default=repr)
        asked = asked_line(text or (prompt if isinstance(prompt, str) else quote(prompt)))
        digest = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
        return (f"{asked} #{digest}",)  # a tuple, so that it equals no id of the dump


@dataclass(frozen=True, slots=True)
class Format:
    """Say how files of one format are found, recognised and read.

    Args:
        read: a function of a file and a :class:`Reading`. It yields :class:`Sample`, or batches as ``(step,
            TensorDict)``.
        files: glob patterns in a folder. The first pattern that matches a file is used. Patterns that are
            joined by ``|`` are used together. A pattern with ``.jsonl`` matches ``.jsonl.gz``, too.
        keys: keys of the first record, or columns of a table, by which the format is recognised; ``a|b``
            means one of the two. Empty: the suffix alone decides. None: the format is never recognised.
        options: which of ``columns``, ``group_by``, ``group_size``, ``reward_key`` and ``tokenizer`` the
            format reads.
        reward_keys: whether `reward_key` may be ``one`` name or ``many``.
        rewards: allowed values of `reward_key`; empty: all.
        ignored: regular expression for the names of files in a folder that are ignored.
        unsaid: what the dump does not contain. ``rollouts``: the rollout of each row, so each row is read as
            one rollout. ``masks``: which tokens are out of the loss. ``tokens``: the number of tokens.
    """

    read: Callable[[Path, Reading], Iterator[Sample | tuple[int, TensorDictBase]] | Iterator[Any]]
    files: tuple[str, ...]
    keys: frozenset[str] | None = frozenset()
    options: tuple[str, ...] = ()
    reward_keys: Literal["one", "many"] = "one"
    rewards: tuple[str, ...] = ()
    ignored: str | None = None
    unsaid: tuple[Literal["rollouts", "masks", "tokens"], ...] = ()

    def lacking(self, found: Collection[str]) -> list[str]:
        """The keys of the format that a record lacks.

        Example:
            >>> Format(read_lines, ("*.jsonl",), frozenset({"example_id|id", "reward"})).lacking({"id"})
            ['reward']
        """
        return sorted(key for key in self.keys or () if not any(name in found for name in key.split("|")))


def parse_records(
    records: Iterator[Record], reading: Reading, parse: Callable[[Record, Reading], list[Sample]]
) -> Iterator[Sample]:
    """Turn records into samples, and count malformed records.

    Samples get the file and line of their record, and `group_size` if the dump does not have it. Two records
    of a step with the same label are an error, because the second one is not another segment.
    """
    step: int | None = None
    places: dict[Label, str] = {}  # file and line of each record of the step, by label
    for record in records:
        try:
            samples = parse(record, reading)
            for sample in samples:
                sample.where = record.where
                if sample.expected_rollouts is None:
                    sample.expected_rollouts = reading.group_size
                sample.check()
                if sample.other_columns is None:
                    sample.other_columns = record.other_columns()
            if samples and samples[0].step != step:
                step, places = samples[0].step, {}
            for label in dict.fromkeys(each.record for each in samples if each.record is not None):
                if label in places:
                    raise SourceError(
                        f"{samples[0].where}: a record must occur once in a step; found {quote(label)}, "
                        f"which is already at {places[label]}"
                    )
                places[label] = samples[0].where
        except SourceError as err:
            named = (as_whole(record.data.get(key)) for key in ("step", "iteration"))
            reading.note(err, next((number for number in named if number is not None), None))
        else:
            yield from samples


# -- JSON Lines ---------------------------------------------------------------------------------------


def read_jsonl(
    path: Path, reading: Reading, parse: Callable[[Record, Reading], list[Sample]]
) -> Iterator[Sample]:
    """Read samples from a ``.jsonl`` or ``.jsonl.gz`` file, a line at a time."""
    return parse_records(read_lines(path, reading), reading, parse)


def read_lines(path: Path, reading: Reading) -> Iterator[Record]:
    """Yield the records of a file. Blank lines are skipped.

    Lines that are not JSON objects, and files that are cut off or have no records, are counted as errors.
    """
    empty = True
    try:
        with path.open("rb") as raw:
            for number, line in enumerate(_lines(raw, path), start=1):
                reading.position = raw.tell()
                if line.isspace():
                    continue
                empty = False
                where = f"{path}:{number}"
                try:
                    record = Record(decode(line, where), where, number)
                except SourceError as err:
                    reading.note(err)
                else:
                    yield record
    except (OSError, EOFError, zlib.error) as err:
        reading.note(SourceError(f"{path}: the file must be readable to its end; found {err}"))
        return
    if empty:
        reading.note(SourceError(f"{path}: the file is empty; a dump has at least one record"))


def decode(line: bytes, where: str) -> dict[str, Any]:
    """Decode one JSON object strictly: NaN, Infinity and repeated keys are errors.

    Raises:
        SourceError: the line is too long, not UTF-8, or not one JSON object.

    Example:
        >>> decode(b'{"reward": 0.5}', "a.jsonl:1")
        {'reward': 0.5}
    """
    if len(line) > MAX_LINE:
        raise SourceError(f"{where}: a line has at most {MAX_LINE} bytes; found a longer one")
    try:
        text = line.decode().rstrip(" \t\r\n")
        value = _DECODER.decode(text)
    except UnicodeDecodeError as err:
        raise SourceError(f"{where}: a line must be UTF-8; found {err.reason} at byte {err.start}") from None
    except json.JSONDecodeError as err:
        cut = "" if line.endswith(b"\n") else ", and the file ends there: is it cut off?"
        ends = err.pos >= len(text) or err.msg.startswith("Unterminated string")
        after, found = text[-20:], text[err.pos : err.pos + 20]
        fault = f"it breaks off after {after!r}{cut}" if ends else f"at column {err.pos + 1} it has {found!r}"
        raise SourceError(f"{where}: a line must be one JSON object, and is no valid JSON: {fault}") from None
    except _NoJson as err:
        key = CONSTANT.search(text)
        named = f"{quote(key[1])} is " if key else "found "
        raise SourceError(f"{where}: {named}the literal {err}, which is no JSON") from None
    except (ValueError, RecursionError) as err:  # from a hook, or from Python's limits on digits and nesting
        raise SourceError(f"{where}: a line must be one JSON object; found {err}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: a line must be one JSON object; found {quote(value)}")
    return value


def _lines(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    stream: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    while line := stream.readline(MAX_LINE + 1):
        yield line  # `decode` refuses a line that is too long; the rest of it is skipped here
        if len(line) > MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {quote(twice)} twice in one object")
    return data


class _NoJson(ValueError):
    """A word for a number that JSON does not have."""


def _no_constant(name: str) -> Any:
    raise _NoJson(name)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


# -- Parquet ------------------------------------------------------------------------------------------


def read_schema(path: Path) -> pa.Schema:
    """Read the schema of a Parquet file.

    Raises:
        SourceError: the file is damaged.
    """
    return _decode(pq.read_schema, path)


def read_table(path: Path) -> pa.Table:
    """Read all columns and rows of a Parquet file.

    Raises:
        SourceError: the file is damaged, or has more than :data:`MAX_ROWS` rows or :data:`MAX_VALUES` values.
            A small file can have many values, because equal values are stored once.
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
        raise SourceError(f"{path}: a Parquet file is required; found {_not_parquet(path, err)}") from None


def _not_parquet(path: Path, err: Exception) -> str:
    """Say what the file is instead of a Parquet file."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(1) == b"{":
            return "JSON Lines. For a file of your own, set source.columns in place of source.format"
    return first_line(err)


def read_rows(path: Path, reading: Reading) -> Iterator[Record]:
    """Yield the rows of a Parquet file, of which :data:`ROWS` are read at a time.

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
                    data = {name: _without_gaps(value) for name, value in data.items()}
                    number += 1
                    yield Record(data, f"{path}, row {number}", number)
    except Exception as err:  # a damaged file makes the decoder raise anything
        raise SourceError(
            f"{path}: a Parquet file must be readable; found {_not_parquet(path, err)}"
        ) from None
    if not number:
        raise SourceError(f"{path}: a dump has at least one row; found an empty table")


def _without_gaps(value: Any) -> Any:
    """Remove null values from nested objects, because Arrow gives each object the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_gaps(inner) for key, inner in value.items() if inner is not None}
    return [_without_gaps(inner) for inner in value] if isinstance(value, list) else value


# -- torch.save ---------------------------------------------------------------------------------------


def load_plain(path: Path) -> Any:
    """Load plain data and tensors from a file of ``torch.save``. No code in it is run.

    Raises:
        SourceError: the file holds something else, or is damaged, compressed, or not an archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # checks the size of the content before it is loaded
            items = archive.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED for item in items):
                raise ValueError("a compressed archive, which torch.save does not write")
            if (size := sum(item.file_size for item in items)) > path.stat().st_size:
                raise ValueError(f"{size} bytes in an archive of {path.stat().st_size}")
            pickles = [archive.read(item) for item in items if item.filename.endswith(".pkl")]
        for name in (name for pickled in pickles for name in CALLED.findall(pickled)):
            if not ALLOWED.fullmatch(name):
                raise ValueError(f"a call of {name.decode().replace(chr(10), '.')}")
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as err:  # a damaged file makes the unpickler raise anything
        raise SourceError(
            f"{path}: a dump must load as plain data and tensors, without running code; "
            f"found {first_line(err)}"
        ) from None

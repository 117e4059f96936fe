"""What an assembler took in and handed out, written down first: another goes on from there after a crash.

The file is a stream of Arrow IPC: a schema, then one record batch of one row for each event. A tree of dicts,
lists, numbers, text and tensors is JSON, in which each object is ``{"dict": [[key, value], …]}``, ``{"tuple":
[…]}`` or ``{"tensor": [dtype, shape, device]}``, and the bytes of the tensors one after the other. Nothing is
unpickled. All events together say what the assembler knows, since nothing else decides: rows that were put,
groups that were announced, handed out, rejected or given up, by which clock and policy version.

Groups that are handed out are taken back where the next assembler opens the file, but for those of before the
last commit.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import ipc
from tensordict import TensorDict
from torch import Tensor

from headrace.transforms.errors import BatchError, StreamWarning
from headrace.transforms.tensordicts import from_plain

from .open_groups import Group
from .pieces import RowPiece, gather, kinds_of

SCHEMA = pyarrow.schema(
    [
        ("event", pyarrow.string()),
        ("said", pyarrow.string()),
        ("tensors", pyarrow.large_binary()),
        ("size", pyarrow.uint64()),  # of the message in bytes, which its own head says, too
        ("crc32", pyarrow.uint32()),
    ],
    metadata={"headrace": "journal 1"},
)
MARK = re.compile(rb"(?=\xff\xff\xff\xff)")  # Arrow begins a message with these
DAMAGED = (pyarrow.lib.ArrowException, OSError, ValueError, EOFError)  # what Arrow raises of wrong bytes
FEW = 16  # events for which no file is written anew


class Journal:
    """The file of one assembler, which is the only one that writes to it.

    Args:
        path: of the file; it is made if it is not there.
        options: those by which the assembler decides.
    """

    def __init__(self, path: str | Path, options: Mapping[str, Any]):
        self.path, self._options = Path(path), dict(options)
        self.replaying: dict[str, Any] | None = None
        """The event that is carried out again."""
        self._seconds, self._since = 0.0, time.monotonic()
        self._close: Callable[[], Any] | None = None  # which closes it
        self._descriptor = -1
        self._end = 0
        self._entries = 0  # rows and events in the file
        self._taken: list[Group] = []  # in a replay, since the last commit
        self._rejected = 0

    def now(self) -> float:
        """Seconds on a clock that stands still while no assembler has the file."""
        if self.replaying is not None:
            return self.replaying["clock"]
        return self._seconds + time.monotonic() - self._since

    # -- events are written -------------------------------------------------------------------------

    def write(self, event: str, version: int, now: float, **said: Any) -> None:
        """Write down what is about to happen. It survives the death of the process from here on.

        Raises:
            BatchError: what is to be written is neither text, number, list, dict nor tensor.
            RuntimeError: another assembler has opened the file; nothing may happen here any more.
            OSError: it could not be written.
            ValueError: in a replay: something else happens.
        """
        if self.replaying is not None:
            for name in ("groups", "stays"):
                if name in said and said[name] != self.replaying[name]:
                    raise ValueError(
                        f"the {name} are others than at the first time, {said[name]} in place of "
                        f"{self.replaying[name]}: does on_surplus select others for the same rewards?"
                    )
            return
        record = _record(event, {"version": version, "clock": now, **said})
        self._check_alone()
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException:  # no space, or Ctrl-C
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += record.size
        self._entries += 1

    def put(self, rows: dict[str, Any] | None, count: int, version: int, now: float, stays: Any) -> None:
        """Write down rows that come, as ``to_plain`` has them; None: there are none."""
        self.write("put", version, now, rows=rows, stays=stays)
        self._entries += count

    def take(self, groups: Sequence[Group], version: int, now: float, **how: int | None) -> None:
        """Write down which groups are handed out; in a replay, keep what they are."""
        keys = [group.key for group in groups]
        self.write("take", version, now, groups=keys, **how)
        if self.replaying is not None:
            rows = [row for group in groups for row in group.rows()]
            arrivals = sorted(row.arrival for row in rows)
            where = {row.arrival: row.piece for row in rows}
            piece = RowPiece(gather([(where[each], each) for each in arrivals], {}), arrivals)
            piece.own()
            self._taken += [group.moved_to(piece) for group in groups]

    def reject(self, groups: int, version: int, now: float) -> None:
        """Write down that groups which were handed out are not trained."""
        self.write("reject", version, now, rejected=groups)
        self._rejected += groups if self.replaying is not None else 0

    def commit(self, assembler: Any) -> None:
        """Take back nothing of what was handed out until now, also if the machine dies."""
        if self._entries > FEW + 2 * assembler.held:
            self.begin_anew(assembler)
        else:
            self.write("commit", assembler.version, self.now())
            os.fsync(self._descriptor)

    def begin_anew(self, assembler: Any) -> None:
        """Put a file of what is held and known in place of this one."""
        # By the clock's own zero: ages that are subtracted again would be others in their last bits.
        state = assembler._state(0.0)
        said = {"version": assembler.version, "clock": self.now(), "options": self._options, "state": state}
        self._begin("state", said)
        self._entries = assembler.held

    def _check_alone(self) -> None:
        there = os.fstat(self._descriptor)
        if there.st_size != self._end or there.st_nlink == 0:
            raise RuntimeError(
                f"another assembler goes on from the journal {self.path}, or the file was changed: nothing "
                "is put here or handed out any more. Give each assembler a file of its own"
            )

    def _begin(self, event: str, said: dict[str, Any]) -> None:
        """Make the file of one event, or put it in place of the one that is there: all of it or nothing."""
        if self._close is not None:
            self._check_alone()
        beside = self.path.with_name(f"{self.path.name}.new")
        with open(beside, "wb") as file:
            file.write(SCHEMA.serialize())
            file.write(_record(event, said))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._open()

    def _open(self) -> None:
        if self._close is not None:
            self._close()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._end = os.fstat(self._descriptor).st_size

    # -- and read -----------------------------------------------------------------------------------

    def replay(self, assembler: Any) -> None:
        """Do all of it again with an assembler that has done nothing, and write on from there.

        Raises:
            ValueError: the file is no journal, is damaged before its end, or is of other options.
        """
        opened = {"version": assembler.version, "clock": 0.0, "options": self._options}
        if not self.path.exists() or not self.path.stat().st_size:
            self._begin("open", opened)
            return
        self._open()
        version = 0
        for offset, event, said in self._events():
            self.replaying, self._seconds, assembler.version = said, said["clock"], said["version"]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", StreamWarning)  # they were said
                    self._do(event, said, assembler)
            except _OtherOptionsError:
                raise
            except Exception as err:
                raise ValueError(
                    f"the journal {self.path} cannot be followed: {event!r} at byte {offset} raised "
                    f"{type(err).__name__}: {err}"
                ) from err
            finally:
                self.replaying = None
            if event in ("commit", "state"):
                version = said["version"]
        self._take_back(assembler)
        self._since, assembler.version = time.monotonic(), version
        self.write("open", version, self._seconds, options=self._options)

    def _do(self, event: str, said: dict[str, Any], assembler: Any) -> None:
        """Carry out an event again."""
        self._entries += 1
        if "options" in said:
            self._check_options(said["options"])
        if event == "put":
            rows = from_plain(said["rows"])
            assembler.put(TensorDict({}, batch_size=[0]) if rows is None else rows)
            self._entries += 0 if rows is None else len(rows)
        elif event == "announce":
            assembler.announce(from_plain(said["draws"]))
        elif event == "expire":
            assembler._expire()
        elif event == "take":
            assembler._hand_out(said["wanted"], said["most"])
        elif event == "discard_batch":
            assembler.discard_batch()
        elif event == "reject":
            assembler.reject(said["rejected"])
        elif event == "state":
            pieces = [RowPiece.from_plain(rows) for rows in said["state"]["chunks"]]
            assembler._go_on(said["state"], 0.0, pieces, kinds_of(pieces[0].batch) if pieces else {})
            self._entries = assembler.held
        elif event == "open":
            self._take_back(assembler)
        elif event != "commit":
            raise ValueError("a newer version of headrace has written it")
        if event in ("commit", "state"):
            self._taken, self._rejected = [], 0

    def _take_back(self, assembler: Any) -> None:
        """Hold again what was handed out since the last commit."""
        assembler._stream.take_back(self._taken, min(self._rejected, len(self._taken)))
        self._taken, self._rejected = [], 0

    def _check_options(self, options: Mapping[str, Any]) -> None:
        if options != self._options:
            differ = [
                f"{name} is {options.get(name)!r} there and {self._options.get(name)!r} here"
                for name in {**options, **self._options}
                if options.get(name) != self._options.get(name)
            ]
            raise _OtherOptionsError(
                f"the journal {self.path} must be of an assembler with the same options: "
                f"{', '.join(differ)}. Open it with those; to change them, load its state_dict() into an "
                "assembler with a new file"
            )

    def _events(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Where each event is, what it is, and what is said of it. A last one that is damaged is cut off."""
        with pyarrow.memory_map(str(self.path)) as file:
            content, at = file.read_buffer(), 0
            try:
                reader = pyarrow.BufferReader(content)
                same = ipc.read_schema(reader).equals(SCHEMA, check_metadata=True)
                at = reader.tell()
            except DAMAGED:
                same = False
            if not same:
                raise ValueError(f"{self.path} is no journal of this version of headrace; give another path")
            while at < content.size:
                try:
                    event, said, end = _read(content, at)
                except DAMAGED as err:
                    damage = err
                    break
                yield at, event, said
                at = end
            else:
                return
            if (later := _next_whole(content, at)) is not None:
                raise ValueError(
                    f"the journal {self.path} is damaged at byte {at} ({damage}), and goes on at byte "
                    f"{later}: what is between is gone. Restore the file, or begin with another one"
                )
            lost = content.size - at
            del content, reader
        warnings.warn(
            f"the journal {self.path} ends with {lost} bytes that are no whole event: they are cut off. A "
            "crash while it was written leaves that, and what it had not written was never taken in",
            StreamWarning,
            stacklevel=6,
        )
        os.ftruncate(self._descriptor, at)
        self._end = at


class _OtherOptionsError(ValueError):
    """A journal is of an assembler that decides otherwise."""


def options_that_decide(assembler: Any, names: Iterable[str]) -> dict[str, Any]:
    """What must be the same for the same events to have the same outcome; of a callable, that it is one."""
    options = {name: getattr(assembler, name) for name in names if name != "journal"}
    return {name: "a callable" if callable(value) else value for name, value in options.items()}


def _record(event: str, said: dict[str, Any]) -> pyarrow.Buffer:
    tensors: Tensors = {}
    tree = _to_json(said, tensors, ())
    # Joined by dtype, since there may be many small ones.
    joined = {dtype: torch.cat(some).resolve_conj().resolve_neg() for dtype, some in tensors.items()}
    sizes = {_name(dtype): len(every) for dtype, every in joined.items()}
    text = f"[{json.dumps(sizes, allow_nan=False)},{tree}]"
    content = b"".join(every.view(torch.uint8).numpy() for every in joined.values())
    size = ipc.get_record_batch_size(_batch(event, text, content, 0, 0))
    return _batch(event, text, content, size, _checksum(event, text, content, size)).serialize()


def _batch(*row: Any) -> pyarrow.RecordBatch:
    arrays = [pyarrow.array([value], field.type) for value, field in zip(row, SCHEMA, strict=True)]
    return pyarrow.record_batch(arrays, schema=SCHEMA)


def _read(content: pyarrow.Buffer, at: int) -> tuple[str, dict[str, Any], int]:
    """The event of a message, what is said of it, and where the message ends."""
    reader = pyarrow.BufferReader(content.slice(at))
    message = ipc.read_message(reader)
    batch = ipc.read_record_batch(message, SCHEMA)
    batch.validate(full=True)
    if batch.num_rows != 1 or any(column.null_count for column in batch.columns):
        raise ValueError("its record batch is not one row")
    event, text, tensors, size, checksum = (column[0] for column in batch.columns)
    event, text, tensors, size = event.as_py(), text.as_py(), tensors.as_buffer(), size.as_py()
    if _checksum(event, text, tensors, size) != checksum.as_py() or size != reader.tell():
        raise ValueError("its checksum is another one")
    sizes, tree = json.loads(text)
    dtypes, bytes_left = {name: getattr(torch, name) for name in sizes}, io.BytesIO(tensors)
    joined = {
        name: torch.frombuffer(bytearray(bytes_left.read(count * dtypes[name].itemsize)), dtype=dtypes[name])
        for name, count in sizes.items()
        if count
    }
    return event, _from_json(tree, {name: [every, 0] for name, every in joined.items()}), at + size


def _next_whole(content: pyarrow.Buffer, at: int) -> int | None:
    """Where the first whole event behind a damaged one is; None if there is none."""
    for found in MARK.finditer(content, at + 8):
        with suppress(*DAMAGED):
            _read(content, found.start())
            return found.start()
    return None


def _checksum(event: str, text: str, tensors: Any, size: int) -> int:
    return zlib.crc32(tensors, zlib.crc32(f"{size} {event} {text}".encode()))


Tensors = dict[torch.dtype, list[Tensor]]
"""Flat ones on the CPU, in the order in which they come in a tree."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_json(value: Any, tensors: Tensors, path: tuple[Any, ...]) -> str:
    """A tree as JSON, its tensors apart. It is text from the start: of many small lists and dicts, Python
    would look through all again and again for those that nobody needs."""
    if value is None or type(value) in (bool, int, float, str):
        return json.dumps(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        tensors.setdefault(value.dtype, []).append(value.detach().reshape(-1).cpu())
        device = "" if value.device.type == "cpu" else f',"{value.device}"'
        return f'{{"tensor":["{_name(value.dtype)}",{list(value.shape)}{device}]}}'
    if type(value) in (list, tuple):
        each = ",".join([_to_json(each, tensors, (*path, place)) for place, each in enumerate(value)])
        return f"[{each}]" if type(value) is list else f'{{"tuple":[{each}]}}'
    if type(value) is dict:
        pairs = [
            f"[{_to_json(name, tensors, path)},{_to_json(each, tensors, (*path, name))}]"
            for name, each in value.items()
        ]
        return f'{{"dict":[{",".join(pairs)}]}}'
    column = [str(name) for above, name in pairwise(path) if above == "columns"]
    raise BatchError(
        f"a journal holds tensors, text, numbers, None, and lists, tuples and dicts of them; found a "
        f"{type(value).__name__} in column {'.'.join(column) or path}: leave the column out, or write it "
        "as one of these"
    )


def _from_json(value: Any, tensors: dict[str, list[Any]]) -> Any:
    """What :func:`_to_json` was given.

    Args:
        value: what it made of it.
        tensors: those of a dtype as one, and how much of it has been read.
    """
    if isinstance(value, list):
        return [_from_json(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_from_json(each, tensors) for each in content)
    if kind == "dict":
        return {_from_json(key, tensors): _from_json(each, tensors) for key, each in content}
    name, shape, *device = content
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=getattr(torch, name), device=device[0] if device else None)
    every, start = tensors[name]
    tensors[name][1] += count
    tensor = every[start : start + count].view(shape)
    return tensor.to(device[0]) if device else tensor

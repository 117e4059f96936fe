"""The journal of an assembler: each event is written before it takes effect, and replayed after a crash.

The file is an Arrow IPC stream: a schema, then a record batch of one row per event. The details of an event
are a tree of dicts, lists, numbers, text and tensors. The tree is stored as JSON, with ``{"dict": [[key,
value], …]}``, ``{"tuple": […]}`` and ``{"tensor": [dtype, shape, device]}``, beside the bytes of each tensor.
Nothing is unpickled. The events determine the state of the assembler: rows that were put, and groups that
were announced, taken, rejected or given up, each with the clock and policy version.

When the next assembler opens the file, it holds again the groups that were taken after the last commit.

If the rows are stored where they are lost with the process, the file has no rows. Then it records what was
announced, taken and committed. In the next assembler, groups that were announced and not committed have no
rows.
"""

from __future__ import annotations

import json
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

from headrace.transforms.carry import from_plain, write_whole
from headrace.transforms.table import BatchError, StreamWarning
from headrace.transforms.table.tensordicts import bytes_of

from .open_groups import Group, Key
from .pieces import RowPiece, gather, kinds_of
from .steps import Steps

SCHEMA = pyarrow.schema(
    [
        ("event", pyarrow.string()),
        ("said", pyarrow.string()),
        ("tensors", pyarrow.list_(pyarrow.large_binary())),
        ("size", pyarrow.uint64()),  # bytes of the message, to detect a wrong header
        ("crc32", pyarrow.uint32()),
    ],
    metadata={"headrace": "journal 3"},
)
MARK = re.compile(rb"(?=\xff\xff\xff\xff)")  # the first bytes of an Arrow message
DAMAGED = (pyarrow.lib.ArrowException, OSError, ValueError, EOFError)  # raised by Arrow for damaged bytes
OF_ROWS = {"put", "expire", "discard_batch", "unfinished"}  # events that are not written without rows
SMALL = 2**14  # a file of fewer bytes is not rewritten


class Journal:
    """The journal file of one assembler. No other process may write to it.

    Args:
        path: path of the file, which is created if it does not exist.
        options: :func:`options_that_decide` of the assembler.
        rows: whether the file has the rows.
    """

    def __init__(self, path: str | Path, options: Mapping[str, Any], *, rows: bool = True):
        self.path, self.rows = Path(path), rows
        self._options = dict(options) | ({} if rows else {"rows": "none"})
        self.replaying: dict[str, Any] | None = None
        """The event that is being replayed."""
        self._seconds, self._since = 0.0, time.monotonic()
        self._close: Callable[[], Any] | None = None  # closes the file
        self._descriptor = -1
        self._end = self._begun = 0  # bytes of the file, now and when it was last rewritten
        self._taken: list[Group] = []  # in a replay: groups taken since the last commit, if there are rows
        self._taken_keys: dict[Key, int | None] = {}  # their keys, with the oldest version of their rows
        self._steps = Steps().to_plain()  # in a replay: as they were at the last commit

    def now(self) -> float:
        """Seconds on a clock that stops while no assembler has the file open."""
        if self.replaying is not None:
            return self.replaying["clock"]
        return self._seconds + time.monotonic() - self._since

    @property
    def without_rows(self) -> bool:
        """Whether the events that are being replayed have lost their rows."""
        return self.replaying is not None and not self.rows

    # -- events are written -------------------------------------------------------------------------

    def write(self, event: str, version: int, now: float, **details: Any) -> None:
        """Write an event. The event survives a crash of the process as soon as this method returns.

        Raises:
            BatchError: a detail is not a text, number, list, tuple, dict, tensor or None.
            RuntimeError: another assembler has opened the file.
            OSError: the event could not be written.
        """
        if self.replaying is not None or (event in OF_ROWS and not self.rows):
            return
        record = _record(event, {"version": version, "clock": now, **details})
        self._check_alone()
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException:  # for example no space, or Ctrl-C: remove the partial event
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += record.size

    def take(self, assembler: Any, groups: Sequence[Group], **how: int | None) -> None:
        """Write that groups are taken. In a replay, keep a copy of them."""
        keys = {group.key: assembler._oldest(group) for group in groups}
        if not self.rows:
            how = {"keys": keys}  # type: ignore[dict-item]
        self.write("take", assembler.version, self.now(), **how)
        if self.replaying is not None:
            self._taken_keys |= keys
            rows = [row for group in groups for row in group.rows()]
            arrivals = sorted(row.arrival for row in rows)
            pieces = {row.arrival: row.piece for row in rows}
            piece = RowPiece(gather([(pieces[arrival], arrival) for arrival in arrivals], {}), arrivals)
            piece.own()
            self._taken += [group.moved_to(piece) for group in groups]

    def commit(self, assembler: Any, step: int | None, more: int) -> None:
        """Write that all taken groups, and `more` groups that were taken back, are trained. Sync the file.

        If the journal has no rows, the state is small, so it replaces the events in the file.
        """
        if not self.rows or self._end > SMALL + 2 * self._begun:
            self.begin_anew(assembler)
        else:
            self.write("commit", assembler.version, self.now(), step=step, more=more)
            os.fsync(self._descriptor)

    def begin_anew(self, assembler: Any) -> None:
        """Replace the file by one that holds only the current state."""
        # Ages relative to 0 are exact. Subtracting the current time twice would change their last bits.
        state = assembler._state(0.0)
        if not self.rows:
            state["state"]["received"] -= assembler.held  # these rows will arrive again
            state["rows"] = None
        details = {"version": assembler.version, "clock": self.now(), "options": self._options}
        self._begin("state", details | {"state": state, "step": assembler.committed})
        self._begun = self._end

    def _check_alone(self) -> None:
        found = os.fstat(self._descriptor)
        if found.st_size != self._end or found.st_nlink == 0:
            raise RuntimeError(
                f"another assembler has opened the journal {self.path}, or the file was changed, so this "
                "assembler cannot continue. Give each assembler its own file"
            )

    def _begin(self, event: str, details: dict[str, Any]) -> None:
        """Create or replace the file with one event, atomically."""
        if self._close is not None:
            self._check_alone()

        def write(path: Path) -> None:
            with path.open("wb") as file:
                file.writelines([SCHEMA.serialize(), _record(event, details)])

        write_whole(self.path, write, durable=True)
        self._open()

    def _open(self) -> None:
        if self._close is not None:
            self._close()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._end = os.fstat(self._descriptor).st_size

    # -- events are read ----------------------------------------------------------------------------

    def replay(self, assembler: Any) -> None:
        """Replay all events with a new assembler, and open the file to append to it.

        Raises:
            ValueError: the file is not a journal, is damaged before its end, or has other options.
            FileNotFoundError: the folder of the file does not exist.
        """
        if not (folder := self.path.parent).is_dir():
            raise FileNotFoundError(
                f"the folder of journal={str(self.path)!r} must exist, and does not. Make it first: "
                f"Path({str(folder)!r}).mkdir(parents=True)"
            )
        opened = {"version": assembler.version, "clock": 0.0, "options": self._options}
        if not self.path.exists() or not self.path.stat().st_size:
            self._begin("open", opened)
            return
        self._open()
        version = 0
        for offset, event, details in self._events():
            if "options" in details:
                self._check_options(details["options"])
            assembler.restored |= event != "open"
            self.replaying, self._seconds = details, details["clock"]
            assembler._version = details["version"]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", StreamWarning)  # shown when the event first happened
                    self._do(event, details, assembler)
            except Exception as err:
                raise ValueError(
                    f"the journal {self.path} cannot be replayed: event {event!r} at byte {offset} raised "
                    f"{type(err).__name__}: {err}"
                ) from err
            finally:
                self.replaying = None
            if event in ("commit", "state"):
                version = details["version"]
        self._take_back(assembler)
        self._since, assembler._version = time.monotonic(), version
        self.write("open", version, self._seconds, options=self._options)

    def _do(self, event: str, details: dict[str, Any], assembler: Any) -> None:
        """Replay an event."""
        if event == "put":
            rows = from_plain(details["rows"])
            assembler.put(TensorDict({}, batch_size=[0]) if rows is None else rows)
        elif event == "announce":
            assembler.announce(from_plain(details["draws"]))
        elif event == "expire":
            assembler._expire(details["puts"])
        elif event == "take" and not self.rows:
            self._taken_keys |= details["keys"]
            if assembler.ahead is not None:
                assembler._stream.steps.take(details["keys"].values())
        elif event == "take":
            assembler._hand_out(details["wanted"], details["most"])
        elif event == "discard_batch":
            assembler.discard_batch()
        elif event == "reject":
            assembler.reject(details["rejected"])
        elif event == "step":
            assembler._pass_step(over=details["over"])
        elif event == "begin":
            assembler._restart()
        elif event == "unfinished":
            assembler.unfinished()
        elif event == "state":
            piece = RowPiece.from_plain(details["state"]["rows"])
            assembler._go_on(details["state"], 0.0, piece, kinds_of(piece.batch))
            assembler.committed = details["step"]
            if not self.rows:
                assembler._stream.forget_rows(self.now())
        elif event == "open":
            self._take_back(assembler)
        elif event == "commit":
            assembler._commit(details["step"], details["more"])
        else:
            raise ValueError("unknown event: a newer version of headrace has written the file")
        if event in ("commit", "state"):
            self._taken, self._taken_keys = [], {}
            self._steps = assembler._stream.steps.to_plain()

    def _take_back(self, assembler: Any) -> None:
        """Hold again the groups that were taken since the last commit, and undo the steps since then."""
        stream = assembler._stream
        if self._taken_keys:  # else the last process took no group
            assembler._taken_back = self._taken_keys
        stream.take_back(self._taken)
        stream.steps, self._taken, self._taken_keys = Steps.from_plain(self._steps), [], {}

    def _check_options(self, options: Mapping[str, Any]) -> None:
        if options != self._options:
            differ = [
                f"{name} is {options.get(name)!r} in the file and {self._options.get(name)!r} here"
                for name in {**options, **self._options}
                if options.get(name) != self._options.get(name)
            ]
            raise ValueError(
                f"the journal {self.path} was written with other options: {', '.join(differ)}. Open it with "
                "the same options. To change them, load its state_dict() into an assembler with a new file"
            )

    def _events(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield the offset, name and details of each event. Cut off a damaged last event."""
        with pyarrow.memory_map(str(self.path)) as file:
            content, at = file.read_buffer(), 0
            try:
                reader = pyarrow.BufferReader(content)
                same = ipc.read_schema(reader).equals(SCHEMA, check_metadata=True)
                at = reader.tell()
            except DAMAGED:
                same = False
            if not same:
                raise ValueError(f"{self.path} is no journal of this version of headrace: set another path")
            while at < content.size:
                try:
                    event, details, end = _read(content, at)
                except DAMAGED as err:
                    damage = err
                    break
                yield at, event, details
                at = end
            else:
                return
            if (later := _next_whole(content, at)) is not None:
                raise ValueError(
                    f"the journal {self.path} is damaged at byte {at} ({damage}), and the next readable "
                    f"event is at byte {later}: events between are lost. Restore the file, or start a new one"
                )
            lost = content.size - at
            del content, reader
        warnings.warn(
            f"the journal {self.path} ends with {lost} bytes of an incomplete event, which are cut off. A "
            "crash during a write leaves such bytes. The event had not taken effect",
            StreamWarning,
            stacklevel=5,  # the caller of GroupAssembler()
        )
        os.ftruncate(self._descriptor, at)
        self._end = at


def options_that_decide(assembler: Any, names: Iterable[str]) -> dict[str, Any]:
    """The options that a replay depends on, by name. A callable is stored as the text "a callable"."""
    options = {name: getattr(assembler, name) for name in names if name != "journal"}
    return {name: "a callable" if callable(value) else value for name, value in options.items()}


def _record(event: str, details: dict[str, Any]) -> pyarrow.Buffer:
    tensors: list[Any] = []
    text = _to_json(details, tensors, ())
    size = ipc.get_record_batch_size(_batch(event, text, tensors, 0, 0))
    return _batch(event, text, tensors, size, _checksum(event, text, tensors, size)).serialize()


def _batch(*row: Any) -> pyarrow.RecordBatch:
    arrays = [pyarrow.array([value], field.type) for value, field in zip(row, SCHEMA, strict=True)]
    return pyarrow.record_batch(arrays, schema=SCHEMA)


def _read(content: pyarrow.Buffer, at: int) -> tuple[str, dict[str, Any], int]:
    """Read the message at a byte: its event, the details, and the byte where it ends."""
    reader = pyarrow.BufferReader(content.slice(at))
    message = ipc.read_message(reader)
    batch = ipc.read_record_batch(message, SCHEMA)
    batch.validate(full=True)
    if batch.num_rows != 1 or any(column.null_count for column in batch.columns):
        raise ValueError("a record batch does not have one row")
    event, text, tensors, size, checksum = (column[0] for column in batch.columns)
    event, text, size = event.as_py(), text.as_py(), size.as_py()
    tensors = [each.as_buffer() for each in tensors.values]
    if _checksum(event, text, tensors, size) != checksum.as_py() or size != reader.tell():
        raise ValueError("its checksum is wrong")
    return event, _from_json(json.loads(text), iter(tensors)), at + size


def _next_whole(content: pyarrow.Buffer, at: int) -> int | None:
    """The offset of the first readable event after a damaged one, or None."""
    for found in MARK.finditer(content, at):
        with suppress(*DAMAGED):
            _read(content, found.start())
            return found.start()
    return None


def _checksum(event: str, text: str, tensors: Sequence[Any], size: int) -> int:
    return zlib.crc32(b"".join(tensors), zlib.crc32(f"{size} {event} {text}".encode()))


def _to_json(value: Any, tensors: list[Any], path: tuple[Any, ...]) -> str:
    """Convert a tree to JSON, and append the bytes of its tensors to `tensors`.

    The text is built directly. Many temporary lists and dicts would slow down Python's garbage collector.
    """
    if value is None or type(value) in (bool, int, float, str):
        return json.dumps(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        tensors.append(bytes_of(value.detach().cpu().resolve_conj().resolve_neg()).numpy().tobytes())
        dtype, device = str(value.dtype).removeprefix("torch."), value.device
        return json.dumps(
            {"tensor": [dtype, list(value.shape), *([] if device.type == "cpu" else [str(device)])]}
        )
    if type(value) in (list, tuple):
        items = ",".join([_to_json(item, tensors, (*path, index)) for index, item in enumerate(value)])
        return f"[{items}]" if type(value) is list else f'{{"tuple":[{items}]}}'
    if type(value) is dict:
        pairs = [
            f"[{_to_json(name, tensors, path)},{_to_json(item, tensors, (*path, name))}]"
            for name, item in value.items()
        ]
        return f'{{"dict":[{",".join(pairs)}]}}'
    column = [str(name) for above, name in pairwise(path) if above == "columns"]
    raise BatchError(
        "a journal can store tensors, text, numbers, None, and lists, tuples and dicts of them; found a "
        f"{type(value).__name__} in column {{found}}: remove the column, or convert it to "
        "one of these",
        found=".".join(column) or str(path),
    )


def _from_json(value: Any, tensors: Iterator[Any]) -> Any:
    """Restore the tree of :func:`_to_json` from its JSON and the bytes of its tensors."""
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_from_json(item, tensors) for item in content)
    if kind == "dict":
        return {_from_json(key, tensors): _from_json(item, tensors) for key, item in content}
    name, shape, *device = content
    dtype, numbers = getattr(torch, name), bytearray(next(tensors))
    tensor = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return tensor.view(shape).to(*device)

"""TransferQueue as the way of rollouts to an assembler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal
from uuid import uuid4

from tensordict import TensorDictBase

from headrace.transforms.options import at_least, one_of

from .extras import import_extra
from .queue_rows import END, POLL, encode_rows, fetch_rows


class RolloutQueue:
    """Rows from several producers, through a partition of TransferQueue, to one reader.

    ::

        RolloutQueue("rollouts").put(rows)                          # each producer, and .end() after its last
        source = RolloutQueue("rollouts", producers=4)              # the reader
        for batch in assembled(source, assembler, patience=600): ...

    A row is a sample of the queue with a key of its own, and is read when it is there whole. The rows of a
    producer come in the order in which it put them, those of several as they come. A handle that is sent to
    another process is another producer there, and so is one that is started again: what it sends twice the
    assembler finds by its ids. TransferQueue's own sampler of groups, which counts rows, has no part in it.
    Ray and TransferQueue are started by whoever owns them (``transfer_queue.init()``).

    Args:
        partition: of the queue; a name that no earlier run has used.
        producers: how many end before the reader does. None: it reads without end.
        clear: when rows that were read leave the queue: ``read``, as soon as more are asked for; ``saved``,
            when :meth:`state_dict` is called the second time after, so that a reader that goes on from its
            last state, or the one before, finds all that came later, the end too: what was read after the
            last two states stays.
        max_rows: that are read at once, ≥ 1.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option with a wrong value.
    """

    def __init__(
        self,
        partition: str,
        *,
        producers: int | None = None,
        clear: Literal["read", "saved"] = "read",
        max_rows: int = 1024,
    ):
        self._queue()
        self.partition, self.producers = partition, at_least("producers", producers, 1)
        self.clear = one_of("clear", clear, ("read", "saved"))
        self.max_rows = at_least("max_rows", max_rows, 1, required=True)
        self._name, self._sent = "", 0
        self._read: dict[str, int] = {}  # by producer, how many of its rows
        self._used: list[str] = []  # keys of rows that were read and are there still
        self._saved = 0  # how many of those are in the last state

    @staticmethod
    def _queue() -> Any:
        return import_extra("transfer_queue", "tq", "RolloutQueue")

    # -- producers ----------------------------------------------------------------------------------

    def put(self, batch: TensorDictBase | None) -> None:
        """Send rows; None has none.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack.

        Raises:
            BatchError: a key has a dot.
        """
        if batch is None or batch.shape.numel() == 0:
            return
        columns, tag = encode_rows(batch)
        keys = [self._key(self._sent + row) for row in range(len(columns))]
        self._sent += len(keys)
        # Tags are there after the data: who sees one may read.
        self._queue().kv_batch_put(keys, self.partition, fields=columns, tags=[tag] * len(keys))

    def end(self) -> None:
        """Say that no more rows come from here."""
        self._queue().kv_batch_put([self._key(END)], self.partition, tags=[{END: self._sent}])

    def _key(self, what: int | str) -> str:
        self._name = self._name or uuid4().hex  # of this process: copies of the handle have their own
        return f"{self._name}/{what}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_name": "", "_sent": 0}

    # -- the reader ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield new rows, in pieces, or after a moment None where there are none.

        Raises:
            BatchError: the queue has lost rows, or columns of them.
        """
        while True:
            if self.clear == "read":
                self._forget(len(self._used))
            ended, new = self._look()
            for tag, keys in new:
                batch = fetch_rows(self._queue(), keys, self.partition, tag)
                for key in keys:
                    name, _, number = key.partition("/")
                    self._read[name] = int(number) + 1
                self._used += keys
                yield batch
            if not new and self.producers is not None and len(ended) >= self.producers:
                break
            if not new:
                time.sleep(POLL)
                yield None
        self._used += [key for key in ended if key not in self._used]
        if self.clear == "read":
            self._forget(len(self._used))

    def _look(self) -> tuple[list[str], list[tuple[Mapping[str, Any], list[str]]]]:
        """The keys that say an end, and those of new rows, in pieces of one tag."""
        new: list[tuple[Mapping[str, Any], str]] = []
        ended: list[str] = []
        for key, tag in self._tags().items():
            name, _, number = key.partition("/")
            if number == END:
                ended += [key] if END in tag else []
            elif tag and int(number) >= self._read.get(name, 0) and len(new) < self.max_rows:
                new.append((tag, key))
        pieces = groupby(new, key=lambda each: each[0])
        return ended, [(tag, [key for _, key in piece]) for tag, piece in pieces]

    def _tags(self) -> Mapping[str, Mapping[str, Any]]:
        """Those of all that the queue has, by key."""
        return self._queue().kv_list(self.partition).get(self.partition, {})

    def _forget(self, count: int) -> None:
        if count:
            self._queue().kv_clear(self._used[:count], self.partition)
        self._used, self._saved = self._used[count:], max(0, self._saved - count)

    def state_dict(self) -> dict[str, Any]:
        """How many rows of each producer were read."""
        if self.clear == "saved":
            self._forget(self._saved)
            self._saved = len(self._used)
        return {"read": dict(self._read)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those rows; they leave the queue as if they had been read here."""
        self._read = dict(state["read"])
        rows = [key.partition("/") for key in self._tags()]
        read = [row for row in rows if row[2] != END and int(row[2]) < self._read.get(row[0], 0)]
        self._used = ["".join(row) for row in read]
        self._saved = len(self._used)

"""A source is read in a thread, since a wait in it cannot be interrupted, and without loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any

from torchrl.collectors import MultiAsyncCollector

END = object()
"""What a source that has ended yields."""


class Reader:
    """A source, read in a thread.

    A batch is read when it is asked for. A MultiAsyncCollector is read all the time instead: its queue has
    room for one batch, and a worker that finds it full for a second throws its own batch away and collects
    another (``_main_async_collector`` of TorchRL 0.14.1). So each batch is taken out of the queue at once and
    waits here, and its worker is told to go on when the batch is asked for: one batch of each worker waits at
    most.

    Args:
        source: what yields batches.
    """

    def __init__(self, source: Iterable[Any]):
        self.source = source
        self.is_over = False
        """Whether it was said that the source has ended or failed."""
        self.held: list[Callable[[], None]] = []
        """What tells the worker to go on whose batch is being read."""
        self._asked = False
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._found: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._reads_ahead = isinstance(source, MultiAsyncCollector)
        self.thread = threading.Thread(target=self._read, daemon=True)
        if isinstance(source, MultiAsyncCollector):
            source.pipes = [HeldPipe(pipe, self) for pipe in source.pipes]

    def get(self, timeout: float | None) -> Any:
        """The next batch, or `END`; what the source raises is raised here.

        Raises:
            queue.Empty: there was none in time; the next call gets the same one.
        """
        if not self.thread.ident:
            self.thread.start()
        if not self._asked:
            self._wanted.put(True)
        self._asked = True
        answer = self._found.get(timeout=timeout)
        self._asked = False
        return answer()

    def close(self) -> None:
        """Read no more, as soon as the source lets go of the thread."""
        self._wanted.put(False)

    def _read(self) -> None:
        try:
            rows = iter(self.source)
            while self._reads_ahead or self._wanted.get():
                batch = next(rows, END)
                held, self.held = self.held, []
                self._found.put(partial(self._hand_over, batch, held))
                if batch is END:
                    return
        except BaseException as err:  # of the source: raised where it is read
            self._found.put(partial(self._refuse, err))

    def _hand_over(self, batch: Any, held: list[Callable[[], None]]) -> Any:
        self.is_over = batch is END
        for go_on in held:
            go_on()
        return batch

    def _refuse(self, error: BaseException) -> Any:
        self.is_over = True
        raise error


class HeldPipe:
    """The pipe to a worker of a MultiAsyncCollector, which is told to go on when its batch is asked for.

    Args:
        pipe: the collector's.
        reader: of the collector. What other threads tell the worker is sent at once.
    """

    def __init__(self, pipe: Any, reader: Reader):
        self.pipe, self._reader = pipe, reader
        self._began = False
        self._lock = threading.Lock()  # the thread that trains sends, too

    def send(self, message: Any) -> None:
        """Send a message, or hold it if it tells the worker to go on after a batch."""
        goes_on = message[1] in ("continue", "continue_random")
        if goes_on and self._began and threading.current_thread() is self._reader.thread:
            self._reader.held.append(lambda: self._send(message))
        else:
            self._began |= goes_on
            self._send(message)

    def _send(self, message: Any) -> None:
        with self._lock:
            self.pipe.send(message)

    def __getattr__(self, name: str) -> Any:
        if name == "pipe":  # while it is copied it has none
            raise AttributeError(name)
        return getattr(self.pipe, name)

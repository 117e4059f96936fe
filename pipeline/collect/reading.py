"""Read a source in a thread, so that the wait for it can end and no batch is lost."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any

END = object()
"""Marks the end of a source."""


def reads_ahead(source: Any) -> bool:
    """Whether a source is TorchRL's MultiAsyncCollector; False if its module was not imported."""
    collectors = sys.modules.get("torchrl.collectors")
    return collectors is not None and isinstance(source, collectors.MultiAsyncCollector)


def in_step(source: Any) -> bool:
    """Whether each batch of a source has rows of all worker processes, as with a MultiSyncCollector."""
    return hasattr(source, "queue_out") and not reads_ahead(source)


class Reader:
    """Reads a source in a thread.

    A batch is read on demand. A MultiAsyncCollector is read continuously instead. Its queue has room for one
    batch, and a worker that finds it full for a second drops its batch and collects another
    (``_main_async_collector`` of TorchRL 0.14.1). So each batch is taken out of the queue at once and waits
    here. Its worker continues only when the batch is requested, so at most one batch per worker waits.

    Args:
        source: an iterable of batches.
    """

    def __init__(self, source: Iterable[Any]):
        self.source = source
        self.is_over = False
        """Whether :meth:`get` has returned `END`, or has raised the error of the source."""
        self.held: list[Callable[[], None]] = []
        """Calls that let the worker of the current batch continue."""
        self._asked = False
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._found: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._reads_ahead = reads_ahead(source)
        self.thread = threading.Thread(target=self._read, daemon=True)
        if self._reads_ahead:
            collector: Any = source
            collector.pipes = [HeldPipe(pipe, self) for pipe in collector.pipes]

    def get(self, timeout: float | None) -> Any:
        """The next batch, or `END`. Raises the errors of the source.

        Raises:
            queue.Empty: no batch arrived in time. The next call waits for the same batch.
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
        """Stop reading, as soon as the source returns to the thread."""
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
        except BaseException as err:  # from the source; get() raises it in the caller's thread
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
    """A pipe to a worker of a MultiAsyncCollector. Delays "continue" until the worker's batch is requested.

    Args:
        pipe: the collector's pipe.
        reader: the reader of the collector. Messages of other threads are sent at once.
    """

    def __init__(self, pipe: Any, reader: Reader):
        self.pipe, self._reader = pipe, reader
        self._began = False
        self._lock = threading.Lock()  # the training thread sends messages, too

    def send(self, message: Any) -> None:
        """Send a message. Delay it if it lets the worker continue after a batch."""
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
        if name == "pipe":  # not set yet while an object is copied
            raise AttributeError(name)
        return getattr(self.pipe, name)


class HeardQueue:
    """The queue from worker processes to their collector. Counts the batches of each worker.

    Args:
        queue: the collector's queue.
        workers: number of workers.
        in_step: whether each batch of the collector has rows of each worker.
    """

    def __init__(self, queue: Any, workers: int, in_step: bool):
        self.queue, self._in_step = queue, in_step
        self._batches = [0] * workers

    @classmethod
    def of(cls, collector: Any) -> HeardQueue:
        """Replace the queue of a collector by one that counts from now on, and return it."""
        if not isinstance(collector.queue_out, cls):
            collector.queue_out = cls(collector.queue_out, collector.num_workers, in_step(collector))
        return collector.queue_out

    def get(self, *args: Any, **options: Any) -> Any:
        """Get a message of a worker."""
        message = self.queue.get(*args, **options)
        said, number = message
        if isinstance(number, int):  # else the worker says that it has paused
            self._batches[said[1] if isinstance(said, tuple) else said] += 1
        return message

    def without_rows(self) -> list[int]:
        """The numbers of the workers without rows for the batch that is waited for."""
        fewest = min(self._batches) if self._in_step else math.inf
        return [worker for worker, batches in enumerate(self._batches) if batches <= fewest]

    def __getattr__(self, name: str) -> Any:
        if name == "queue":  # not set yet while an object is copied
            raise AttributeError(name)
        return getattr(self.queue, name)

"""Processes that write into a shared replay buffer, on request or as fast as they can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from processes import process_context
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from headrace.pipeline import DrainWriter

TIMEOUT = 60.0


def shared_buffer(size: int, rows: TensorDict) -> ReplayBuffer:
    """An empty buffer that processes may write to, with the columns of these rows."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(size), writer=DrainWriter(), shared=True)
    buffer.extend(rows[:1].clone())
    buffer.empty()
    return buffer


def write_when_told(buffer: ReplayBuffer, pipe: Any) -> None:
    """Write rows that come through a pipe, and answer each time. A string means: lock the buffer forever."""
    torch.set_num_threads(1)
    while (rows := pipe.recv()) is not None:
        if isinstance(rows, str):
            buffer._write_lock.acquire()
        else:
            buffer.extend(rows)
        pipe.send(True)


def write_all(buffer: ReplayBuffer, rows: TensorDict, size: int, room: Any) -> None:
    """Write rows in pieces. The reader releases the semaphore `capacity` once for each row that it read."""
    torch.set_num_threads(1)
    for piece in rows.split(size):
        for _ in range(len(piece)):
            room.acquire(timeout=TIMEOUT)
        buffer.extend(piece.clone())


@contextlib.contextmanager
def processes(target: Any, *arguments: tuple) -> Iterator[list]:
    """Start a process for each tuple of arguments, and kill all at the end."""
    started = []
    try:
        for own in arguments:
            process = process_context().Process(target=target, args=own, daemon=True)
            process.start()
            started.append(process)
        yield started
    finally:
        for process in started:
            process.kill()
            process.join(TIMEOUT)
            process.close()


class Told:
    """Writers that write on request and answer."""

    def __init__(self, processes: list, pipes: list):
        self.processes, self.pipes = processes, pipes

    def tell(self, writer: int, what: TensorDict | str) -> None:
        self.pipes[writer].send(what)
        assert self.pipes[writer].poll(TIMEOUT)
        self.pipes[writer].recv()

    def kill(self, writer: int) -> None:
        self.processes[writer].kill()
        self.processes[writer].join(TIMEOUT)


@contextlib.contextmanager
def told_writers(buffer: ReplayBuffer, count: int) -> Iterator[Told]:
    pairs = [process_context().Pipe() for _ in range(count)]
    try:
        with processes(write_when_told, *[(buffer, theirs) for _, theirs in pairs]) as started:
            yield Told(started, [ours for ours, _ in pairs])
    finally:
        for pair in pairs:
            for end in pair:
                end.close()

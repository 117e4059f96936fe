"""Every fault at every index of a stream is counted or raised; nothing is lost, trained twice or hangs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
from faults import CELLS, ELSEWHERE, LONGEST, Carried, Cell, Place, carry, check
from tensordict import TensorDict, TensorDictBase

if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer
    from writers import Told


class Pieces:
    """An iterator of pieces with a state. If its worker died or hangs, no further piece comes."""

    def __init__(self, cell: Cell, over: threading.Event):
        self.cell, self.over, self.position = cell, over, 0

    def __iter__(self) -> Iterator[TensorDict]:
        while self.position < len(self.cell.pieces):
            self.position += 1
            yield self.cell.pieces[self.position - 1]
        if self.cell.then != "ends":
            self.over.wait()

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


def iterator(cell: Cell) -> Carried:
    over = threading.Event()
    try:
        return carry(cell, lambda: Pieces(cell, over))
    finally:
        over.set()


class Written:
    """Pieces that two processes write in turn to a shared buffer. A piece is read before the next write."""

    def __init__(self, cell: Cell, pieces: list[TensorDict], writers: Told, buffer: ReplayBuffer):
        from headrace.pipeline import drained

        self.cell, self.pieces, self.writers = cell, pieces, writers
        self.drain = drained(buffer, wait=0.01)

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        looks = iter(self.drain)
        while self.pieces:
            sent = len(self.cell.pieces) - len(self.pieces)
            if sent == self.cell.killed_at:
                self.writers.kill(0)
            dead = self.cell.killed_at is not None and sent >= self.cell.killed_at
            self.writers.tell(1 if dead else sent % 2, self.pieces.pop(0))
            yield next(looks)
        if self.cell.then == "ends":
            self.drain.close()
        elif self.cell.then == "dies":
            self.writers.kill(0)
        yield from looks

    def state_dict(self) -> dict:
        return self.drain.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.drain.load_state_dict(state)


def drain(cell: Cell) -> Carried:
    from writers import shared_buffer, told_writers

    pieces = [piece.exclude("text") for piece in cell.pieces]
    buffer = shared_buffer(2 * len(pieces[0]), pieces[0])  # the buffer wraps around
    with told_writers(buffer, 2) as writers:
        return carry(cell, lambda: Written(cell, pieces, writers, buffer))


def within(seconds: float, place: Place, cell: Cell) -> Carried:
    """The result of a cell with one source. A cell that takes too long is an error."""
    found: SimpleQueue[Callable[[], Carried]] = SimpleQueue()

    def run() -> None:
        try:
            carried = place(cell)
            found.put(lambda: carried)
        except BaseException as err:
            found.put(functools.partial(refuse, err))

    threading.Thread(target=run, daemon=True).start()
    return found.get(timeout=seconds)()


def refuse(error: BaseException) -> Carried:
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_each_fault_is_counted_or_raised(name):
    check(CELLS[name], within(LONGEST, iterator, CELLS[name]))


@pytest.mark.torchrl
@pytest.mark.slow
@pytest.mark.parametrize("name", ELSEWHERE)
def test_each_fault_is_counted_or_raised_with_two_writers(name):
    check(CELLS[name], within(LONGEST, drain, CELLS[name]))

"""Batches of whole groups from a source that yields rows as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, get_args

from tensordict import TensorDict, TensorDictBase

from headrace.transforms import BatchError, GroupAssembler, StalledError
from headrace.transforms.options import one_of

Leftovers = Literal["yield", "drop", "raise"]
Source = Iterable["TensorDictBase | None"]


def assembled(
    source: Source,
    assembler: GroupAssembler,
    *,
    patience: float | None = None,
    leftovers: Leftovers = "yield",
) -> Assembled:
    """Iterate over batches of whole groups, made of what a source yields.

    What is not iteration goes to the source: ``assembled(collector, …).update_policy_weights_()`` is the
    collector's. ``state_dict`` has the state of both.

    Args:
        source: a collector, or what else yields batches of rows, or None while there are none.
        assembler: which makes groups of them.
        patience: seconds for which the source may be silent. It is then read in a thread, one batch at a time
            and only when it is asked for. None: without end.
        leftovers: where the source ends, and whole groups are there that are fewer than a batch: ``yield``
            them, ``drop`` them or ``raise``. Rows of groups that are not whole are counted as ``unfinished``,
            and those that are dropped with them.

    Raises:
        StalledError: when iterated: the source ended and nothing has come out; it was silent for too long, or
            raised a TimeoutError; as :meth:`GroupAssembler.put`.
        BatchError: when iterated: as :meth:`GroupAssembler.put`; groups are left over, under ``raise``.
        ValueError: an option with a wrong value.

    Example:
        >>> rows = TensorDict(
        ...     {"group_id": [0, 1, 0], "rollout_id": [0, 2, 1], ("next", "done"): [True] * 3}, batch_size=[3]
        ... )
        >>> assembler = GroupAssembler(group_size=2)
        >>> [batch["rollout_id"].tolist() for batch in assembled(rows.split(1), assembler)]
        [[0, 1]]
        >>> assembler.counts["unfinished"]
        1
    """
    one_of("leftovers", leftovers, get_args(Leftovers))
    return Assembled(source, assembler, check_patience(patience), leftovers)


def check_patience(patience: float | None) -> float | None:
    """Seconds for which to wait, or None.

    Raises:
        ValueError: they are not finite and > 0.
    """
    if patience is not None and not 0 < patience < float("inf"):
        raise ValueError(f"patience must be finite and > 0; got {patience}")
    return patience


def rest_of(assembler: Any, leftovers: Leftovers) -> Iterator[TensorDictBase]:
    """What is left in an assembler to which nothing more comes (:func:`assembled`)."""
    ready = assembler.ready
    if ready and leftovers == "raise":
        raise BatchError(
            f"the source has ended, and {ready} whole groups are left over, fewer than the "
            f"{assembler.groups} of a batch: set leftovers='yield' or 'drop'"
        )
    while leftovers == "yield" and (batch := assembler.take_rest()) is not None:
        yield batch
    if assembler.emitted == 0:
        raise assembler.stalled("The source has ended, and nothing has come out")
    assembler.give_up()


class Assembled:
    """What :func:`assembled` returns."""

    def __init__(
        self, source: Source, assembler: GroupAssembler, patience: float | None, leftovers: Leftovers
    ):
        self.source, self.assembler = source, assembler
        self.patience, self.leftovers = patience, leftovers

    def __iter__(self) -> Iterator[TensorDictBase]:
        rows = iter(self.source) if self.patience is None else self._patiently(self.patience)
        while True:
            # What is whole goes out before more is read: so a restored state begins where it was.
            while (batch := self.assembler.take()) is not None:
                yield batch
            try:
                piece = next(rows)
            except StopIteration:
                break
            except TimeoutError as err:
                raise self.assembler.stalled(f"The source has given up: {err}") from err
            # None is a put too: a source that yields it for ever is noticed.
            self.assembler.put(TensorDict({}, batch_size=[0]) if piece is None else piece)
        yield from rest_of(self.assembler, self.leftovers)

    def _patiently(self, patience: float) -> Iterator[TensorDictBase | None]:
        """Read the source in a thread, since who waits in it can not be interrupted.

        Raises:
            StalledError: it was silent for `patience` seconds.
        """
        wanted: SimpleQueue[bool] = SimpleQueue()
        found: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        Thread(target=_read_when_wanted, args=(self.source, wanted, found), daemon=True).start()
        try:
            while True:
                wanted.put(True)
                try:
                    answer = found.get(timeout=patience)
                except Empty:
                    raise self._silent(patience) from None
                batch = answer()
                if batch is _END:
                    return
                yield batch
        finally:
            wanted.put(False)

    def _silent(self, patience: float) -> StalledError:
        return self.assembler.stalled(f"The source has been silent for {patience:g} s")

    def state_dict(self) -> dict[str, Any]:
        """The state of the assembler, and of the source where it has one."""
        has_state = hasattr(self.source, "state_dict")
        source = {"source": self.source.state_dict()} if has_state else {}  # type: ignore[attr-defined]
        return source | {"assembler": self.assembler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of an assembler that reads rows in another way; one source has a state and the
                other has none.
        """
        has_state = hasattr(self.source, "load_state_dict")
        if has_state != ("source" in state):
            raise ValueError(
                f"the state {'has' if 'source' in state else 'lacks'} that of a source, and this source "
                f"{'takes' if has_state else 'takes no'} state"
            )
        self.assembler.load_state_dict(state["assembler"])
        if has_state:
            self.source.load_state_dict(state["source"])  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # while it is copied it has none
            raise AttributeError(name)
        return getattr(self.source, name)


_END = object()


def _read_when_wanted(source: Source, wanted: SimpleQueue, found: SimpleQueue) -> None:
    """Hand over one batch for each that is wanted, as a function that returns it or raises."""

    def refuse(error: BaseException) -> Any:
        raise error

    try:
        rows = iter(source)
        while wanted.get():
            batch = next(rows, _END)
            found.put(lambda batch=batch: batch)
    except BaseException as err:  # of the source: raised where it is read
        found.put(lambda err=err: refuse(err))

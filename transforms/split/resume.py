"""What a split remembers: between batches, and in the middle of one that is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.rows import few
from headrace.transforms.table import Table
from headrace.transforms.tensordicts import column_of, flat_rows, from_plain, leaves_of, to_plain

CLOSE = 1e-4  # rewards that were shaped on another device differ in their last digits


class InterruptedBatch(NamedTuple):
    """A batch that was left between its minibatches: by what it is known again, and how far it came."""

    rows: int
    taken: int
    options: dict[str, Any] | None
    """What its cut depended on, by name; None in a state of an earlier version."""
    columns: dict[str, Tensor] | None
    """(N, ...) on the CPU, its ids and rewards, by name; None as well."""
    after: SplitState
    """The state after it, for a caller that discards the rest of it."""

    def to_plain(self) -> dict[str, Any]:
        """As dicts, tensors and lists."""
        return self._asdict() | {"after": self.after.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any], before: SplitState) -> InterruptedBatch:
        """What :meth:`to_plain` made dicts of.

        A state of an earlier version does not know the batch well enough to go on with it. What was carried
        until then is part of the batch, so that after it nothing is.
        """
        if "after" not in plain:
            return cls(plain["rows"], plain["taken"], None, None, SplitState(before.calls + 1))
        return cls(**plain | {"after": SplitState.from_plain(plain["after"])})


class TrainedBatch(NamedTuple):
    """A batch of which no more is to be trained, and by what it is known when it comes again."""

    rows: int
    columns: Mapping[str, Tensor]
    """(N, ...), its ids and rewards, by name."""

    def is_again(self, other: TrainedBatch) -> bool:
        """Whether the other has the same rows, in whatever order. A batch without ids is never known."""
        if self.rows != other.rows or self.columns.keys() != other.columns.keys():
            return False
        names = [name for name in sorted(self.columns) if not self.columns[name].is_floating_point()]
        sorted_columns = []
        for batch in (self, other):
            columns = {name: column.cpu() for name, column in batch.columns.items()}
            order = torch.arange(self.rows)
            for name in names:  # rows whose ids are all alike stay in their order
                order = order[columns[name][order].argsort(stable=True)]
            sorted_columns.append([columns[name][order] for name in sorted(columns)])
        return bool(names) and not any(map(_difference, *sorted_columns))


class SplitState(NamedTuple):
    """What goes into a draw and comes out of it."""

    calls: int = 0
    """Orders drawn so far: each has a seed of its own."""
    carried: TensorDictBase | None = None
    """Rows that wait for the next batch."""
    interrupted: InterruptedBatch | None = None
    """The batch to go on with, given again."""
    trained: TrainedBatch | None = None
    """The last batch before it."""

    def to_plain(self) -> dict[str, Any]:
        """As dicts, tensors and lists, which ``torch.load`` reads without trusting the file."""
        plain: dict[str, Any] = {"calls": self.calls, "carried": to_plain(self.carried)}
        if self.trained is not None:
            columns = {name: column.cpu() for name, column in self.trained.columns.items()}
            plain |= {"trained": {"rows": self.trained.rows, "columns": columns}}
        return plain if self.interrupted is None else plain | {"batch": self.interrupted.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> SplitState:
        """What :meth:`to_plain` made dicts of."""
        state, batch = cls(plain["calls"], from_plain(plain["carried"])), plain.get("batch")
        if "trained" in plain:  # not in a state of an earlier version
            state = state._replace(trained=TrainedBatch(**plain["trained"]))
        if batch is None:
            return state
        return state._replace(interrupted=InterruptedBatch.from_plain(batch, state))


class KnownBy(NamedTuple):
    """What a batch and its cut are known by, when it comes again."""

    rows: int
    options: Mapping[str, Any]
    """What the cut depends on besides the rows, plain values by name."""
    columns: Mapping[str, Tensor]
    """(N,) int64, or (N, ...) float64, by name."""


def identifying_columns(table: Table, numbers: Tensor, reward_key: NestedKey) -> dict[str, Tensor]:
    """Copies of all columns of one integer a row, such as ids, and of the reward.

    Integers are the same wherever they are computed again; an advantage is not, and says less.

    Args:
        table: of a batch.
        numbers: (n,) int64, the rows of this rank that it is about.
        reward_key: of the reward.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import Rows
        >>> batch = TensorDict({"id": torch.tensor([7, 8]), "advantage": torch.ones(2)}, batch_size=[2])
        >>> identifying_columns(Rows.read(batch).table, torch.arange(2), "reward")
        {'id': tensor([7, 8])}
    """
    batch, at, found = table.batch, None, dict[str, Tensor]()
    is_ragged = isinstance(batch, LazyStackedTensorDict) and len(batch) > 0
    row, each = (batch.tensordicts[0], 1) if is_ragged else (batch, len(batch))
    apart = () if table.ranks is None else table.ranks.id_keys  # in the table these are told apart by rank
    for key, value in {**dict.fromkeys(table.written), **dict(leaves_of(row))}.items():
        column, is_reward = None if key in apart else table.columns.get(key), key == reward_key
        if isinstance(key, tuple) and key[0] == "headrace":
            continue
        if column is not None:
            if is_reward or (column.ndim == 1 and column.dtype is not torch.float64):
                column = column if len(numbers) == table.size else column.index_select(0, numbers)
                found[str(key)] = column if is_reward else column.long()
        elif value is not None and (is_reward or (value.numel() == each and not value.is_floating_point())):
            value = column_of(batch, key)
            if isinstance(value, Tensor):  # rows of one shape
                at = table.places(numbers).to(value.device) if at is None else at
                value = value.detach().reshape(-1) if value.numel() == len(batch) else value.detach()
                # Copies: collectors use their memory again.
                found[str(key)] = value.index_select(0, at).to(torch.float64 if is_reward else torch.int64)
    return found


class Progress:
    """How far the minibatches of one batch have been taken.

    A minibatch is taken when it is handed out. Whether it was trained, and why an iterator was closed, by
    ``break`` or by an exception, cannot be seen from here; so a batch is done with when all were taken.

    Args:
        before: the state before the batch's orders were drawn.
        known_by: what the batch is known by.

    Raises:
        BatchError: a batch was interrupted, and this one has other rows, or is cut by other options; the
            message says which.
    """

    def __init__(self, before: SplitState, known_by: KnownBy):
        self.before, self.known_by = before, known_by
        self.taken = 0 if before.interrupted is None else before.interrupted.taken
        self.minibatches = 0  # set with the plans
        self.begun = False  # minibatches are taken one by one
        self.open = 0  # iterators that are not at their end
        self.done = False  # no more of them will be taken
        batch = before.interrupted
        if batch is not None and (differences := list(_differences(batch, known_by))):
            raise BatchError(
                f"a batch of {batch.rows} rows was interrupted after {batch.taken} minibatches; to go on "
                f"with the others give it again as it was: {'; '.join(differences)}. To give up what is left "
                "of it, and go on with another batch, call this stage's discard_batch(): in a pipeline, "
                "pipeline.stages['split'].discard_batch()"
            )

    @property
    def in_the_middle(self) -> bool:
        """Whether some were taken and an iterator waits to hand out the others."""
        return not self.done and self.open > 0 and 0 < self.taken < self.minibatches

    @property
    def trained(self) -> TrainedBatch | None:
        """The last batch of which something was trained: this one, else that before it."""
        if self.taken or self.done or self.minibatches == 0:
            return TrainedBatch(self.known_by.rows, self.known_by.columns)
        return self.before.trained

    def state(self, after: SplitState) -> SplitState:
        """What to save now. Reads columns in the middle of the batch.

        Args:
            after: the state after the batch.
        """
        if self.done or self.taken >= self.minibatches:
            return after._replace(trained=self.trained)
        before = self.before._replace(interrupted=None)
        if self.taken == 0:
            return before
        rows, options, columns = self.known_by
        known = {name: column.cpu() for name, column in columns.items()}
        batch = InterruptedBatch(rows, self.taken, dict(options), known, after)
        return before._replace(interrupted=batch, trained=None)


def _differences(batch: InterruptedBatch, known_by: KnownBy) -> Iterator[str]:
    if batch.options is None or batch.columns is None:
        yield "its state is of an earlier version, which does not say by what it is known again"
        return
    if batch.rows != known_by.rows:
        yield f"this one has {known_by.rows} rows"
        return
    options = {name: (value, known_by.options.get(name)) for name, value in batch.options.items()}
    changed = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in options.items() if old != new]
    if changed:
        yield "it is cut by other options: " + ", ".join(changed)
    for name in sorted(batch.columns.keys() | known_by.columns.keys()):
        old, new = batch.columns.get(name), known_by.columns.get(name)
        if old is None or new is None:
            yield f"{name!r} is a column of only one of them"
        elif difference := _difference(old, new.to(old.device)):
            yield f"{name!r} {difference}"


def _difference(old: Tensor, new: Tensor) -> str:
    """How two columns differ, in words; empty where they do not."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"was {tuple(old.shape)} {old.dtype} and is {tuple(new.shape)} {new.dtype}"
    same = (
        torch.isclose(new, old, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        if old.is_floating_point()
        else new == old
    )
    rows = (~flat_rows(same).all(1)).nonzero().flatten()
    return f"was {few(old[rows], 3)} and is {few(new[rows], 3)} at rows {few(rows, 3)}" if len(rows) else ""


class SplitMemory:
    """The state of a split: what ``state_dict`` saves and what :meth:`discard_batch` lets go of.

    Attributes:
        state: after the batch accepted last.
        lock: held by who uses it.
        restored: the state was loaded, and no batch has come since.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.restart()

    def restart(self) -> None:
        """Forget all batches."""
        self.state, self.restored = SplitState(), False
        self._progress: Progress | None = None  # of the batch accepted last
        self._earlier: list[Progress] = []  # of batches before it that were in the middle then

    def remember(self, state: SplitState, progress: Progress) -> None:
        """A batch was accepted."""
        known = [*self._earlier, *([] if self._progress is None else [self._progress])]
        self._earlier = [each for each in known if each.in_the_middle]
        if self._progress is not None:
            progress.before = progress.before._replace(trained=self._progress.trained)
        self.state, self._progress, self.restored = state, progress, False

    @property
    def trained_before(self) -> TrainedBatch | None:
        """The batch that is not trained again, should it come next: the last of a state that was loaded.

        In the process that trained it, whoever gives a batch again means a second pass.
        """
        return self.state.trained if self.restored and self.state.interrupted is None else None

    def discard_batch(self) -> None:
        """Let go of the minibatches that are left of an interrupted batch; without one, nothing happens.

        They are never trained. Those that were taken are not trained again: the next batch is drawn as if the
        interrupted one had come to its end, with the rows that it had left over under ``carry``. A loop that
        was left by ``break`` calls this before the state is saved, unless it means to go on.
        """
        with self.lock:
            for progress in (*self._earlier, *([] if self._progress is None else [self._progress])):
                progress.done = True
            self._earlier = []
            if (batch := self.state.interrupted) is not None:
                trained = None if batch.columns is None else TrainedBatch(batch.rows, batch.columns)
                self.state = batch.after._replace(trained=trained)

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict`` saves; in the middle of a batch, the state before it and how far it came.

        Behind its last minibatch, by what it is known: it is not trained again.

        Raises:
            BatchError: two batches are in the middle, as when two pipelines share the split.
        """
        if any(progress.in_the_middle for progress in self._earlier):
            raise BatchError(
                "a state remembers one batch between its minibatches, and iterators of several are open: "
                "take those of one batch to their end before the next one comes, give each pipeline a split "
                "of its own, or call discard_batch() on the split"
            )
        return (self._progress.state(self.state) if self._progress else self.state).to_plain()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.state, self._progress, self._earlier = SplitState.from_plain(state), None, []
        self.restored = True


class Lock:
    """A lock for threads that use one state; a copy of it is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()

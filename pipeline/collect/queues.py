"""TransferQueue as the way of rollouts to an assembler, and of optimiser steps to ranks."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal
from uuid import uuid4

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    lazy_stack,
)
from torch import Tensor

from headrace.pipeline.installed import import_extra
from headrace.transforms import BatchError, StalledError
from headrace.transforms.errors import listing
from headrace.transforms.options import at_least, one_of, takes_options
from headrace.transforms.schema import RANK, read_written
from headrace.transforms.tensordicts import take_rows

from .assembling import POLL, check_patience, wait_until

SEPARATOR = "."
END = "end"  # the key that says that nothing more comes


def _queue() -> Any:
    return import_extra("transfer_queue", "tq", "a queue of TransferQueue")


@takes_options
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
        _queue()
        self.partition, self.producers = partition, at_least("producers", producers, 1)
        self.clear = one_of("clear", clear, ("read", "saved"))
        self.max_rows = at_least("max_rows", max_rows, 1)
        self._name, self._sent = "", 0
        self._read: dict[str, int] = {}  # by producer, how many of its rows
        self._used: list[str] = []  # keys of rows that were read and are there still
        self._saved = 0  # how many of those are in the last state

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
        _queue().kv_batch_put(keys, self.partition, fields=columns, tags=[tag] * len(keys))

    def end(self) -> None:
        """Say that no more rows come from here."""
        _queue().kv_batch_put([self._key(END)], self.partition, tags=[{END: self._sent}])

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
                batch = fetch_rows(_queue(), keys, self.partition, tag)
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
        return _queue().kv_list(self.partition).get(self.partition, {})

    def _forget(self, count: int) -> None:
        if count:
            _queue().kv_clear(self._used[:count], self.partition)
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


@takes_options
class StepQueue:
    """Optimiser steps, through partitions of TransferQueue, to the ranks that train.

    ::

        queue = StepQueue("steps", ranks=2)                         # with pipeline.stages.split.ranks=2
        for batch in assembled(source, assembler):                  # one process runs the pipeline
            queue.put(pipeline.minibatches(batch))
        queue.end()
        optimise(StepQueue("steps", ranks=2).minibatches(rank), loss, optimizer, process_group="world")

    A rank gets its rows of every step, in their order, and takes part without rows in a step that has none
    for it. Its partition is the name, a slash and its number.

    Args:
        partition: of the queue; a name that no earlier run has used.
        ranks: that train, ≥ 1.
        max_steps: that wait for a rank before :meth:`put` waits. None: any number.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option with a wrong value.
    """

    def __init__(self, partition: str, *, ranks: int, max_steps: int | None = None):
        _queue()
        self.partition, self.ranks = partition, at_least("ranks", ranks, 1)
        self.max_steps = at_least("max_steps", max_steps, 1)
        self.steps = 0
        """Steps that were put."""

    def put(self, minibatches: Iterable[TensorDictBase], *, patience: float | None = None) -> int:
        """Send optimiser steps, and return how many.

        Args:
            minibatches: of a run, cut for all ranks: ``ShuffleSplit(ranks=…)`` without a rank of its own.
            patience: seconds for which to wait until a rank takes a step. None: without end.

        Raises:
            MissingKeyError: rows do not say which rank they are for.
            BatchError: they are for a rank that there is not.
            StalledError: a rank has taken none in time.
        """
        before, patience = self.steps, check_patience(patience)
        for minibatch in minibatches:
            # All is looked at before anything is sent: else some ranks would have a step that others lack.
            parts = rows_by_rank(minibatch, self.ranks)
            for rank in range(self.ranks):
                if not wait_until(self._has_room, patience, rank):
                    late = f"rank {rank} has not taken optimiser step {min(self._tags(rank), key=int)}"
                    raise StalledError(f"{late} for {patience:g} s")
            for rank, rows in enumerate(parts):
                tag: dict[str, Any] = {}
                name = f"{self.partition}/{rank}"
                if len(rows):
                    columns, tag = encode_rows(rows)
                    keys = [f"{self.steps}/{row}" for row in range(len(rows))]
                    _queue().kv_batch_put(keys, name, fields=columns, tags=[tag] * len(rows))
                _queue().kv_batch_put([f"{self.steps}"], name, tags=[tag | {"rows": len(rows)}])
            self.steps += 1
        return self.steps - before

    def _has_room(self, rank: int) -> bool:
        return self.max_steps is None or len(self._tags(rank)) < self.max_steps

    def _tags(self, rank: int) -> dict[str, Any]:
        """Of the steps that a rank has not taken, by number."""
        name = f"{self.partition}/{rank}"
        tags = _queue().kv_list(name).get(name, {})
        return {key: tag for key, tag in tags.items() if "/" not in key and tag}

    def end(self) -> None:
        """Say that no more steps come."""
        for rank in range(self.ranks):
            _queue().kv_batch_put([END], f"{self.partition}/{rank}", tags=[{END: self.steps}])

    def minibatches(
        self, rank: int, *, first: int = 0, patience: float | None = None
    ) -> Iterator[TensorDictBase]:
        """Yield a rank's part of each step.

        Args:
            rank: which.
            first: the step to begin with: a rank that goes on after a restart has trained those before.
            patience: seconds for which to wait for a step. None: without end.

        Raises:
            StalledError: none came in time.
            BatchError: the queue has lost rows of a step.
        """
        return self._take_steps(rank, first, check_patience(patience))

    def _take_steps(self, rank: int, step: int, patience: float | None) -> Iterator[TensorDictBase]:
        name, asked = f"{self.partition}/{rank}", time.monotonic()
        while True:
            tags = self._tags(rank)
            if (tag := tags.get(f"{step}")) is not None:
                keys = [f"{step}/{row}" for row in range(tag["rows"])]
                rows = fetch_rows(_queue(), keys, name, tag) if keys else TensorDict({}, batch_size=[0])
                _queue().kv_clear([*keys, f"{step}"], name)
                yield rows
                step, asked = step + 1, time.monotonic()
            elif END in tags and tags[END][END] == step:
                _queue().kv_clear([END], name)
                return
            elif patience is not None and time.monotonic() - asked >= patience:
                raise StalledError(f"rank {rank} has waited {patience:g} s for optimiser step {step}")
            else:
                time.sleep(POLL)


def rows_by_rank(minibatch: TensorDictBase, ranks: int) -> list[TensorDictBase]:
    """The part of each rank in an optimiser step.

    Raises:
        MissingKeyError: rows do not say which rank they are for, and there are several.
        BatchError: they are for a rank that there is not.

    Example:
        >>> minibatch = TensorDict({RANK: torch.tensor([0, 0, 1]), "x": torch.arange(3)}, batch_size=[3])
        >>> [part["x"].tolist() for part in rows_by_rank(minibatch, 3)]
        [[0, 1], [2], []]
    """
    rank = torch.zeros(len(minibatch), dtype=torch.int64)
    if ranks > 1 and len(minibatch):
        rank = read_written(minibatch, RANK, reader="StepQueue", writer="ShuffleSplit")
    if bool((rank >= ranks).any()):
        raise BatchError(
            f"rows must be for ranks 0 to {ranks - 1}; found some for rank {int(rank.max())}: ranks must be "
            "those of the split"
        )
    return [take_rows(minibatch, (rank == each).nonzero().flatten()) for each in range(ranks)]


# -- rows as TransferQueue stores them: flat columns, one key a row; and rows again -------------------------


def encode_rows(batch: TensorDictBase) -> tuple[TensorDict, dict[str, Any]]:
    """Columns of a batch as TransferQueue takes them, and a tag that its rows carry.

    Keys become one word, and ragged columns nested tensors. The tag says which columns there are, since a
    queue that is asked for rows with different ones returns those that all have, and whether the rows are of
    a lazy stack.

    Args:
        batch: TensorDict ``[N]`` or ``[envs, time]``, N ≥ 1, dense or a lazy stack.

    Raises:
        BatchError: a key has a dot.

    Example:
        >>> rows = TensorDict({("next", "reward"): torch.ones(2), "name": ["a", "b"]}, batch_size=[2])
        >>> columns, tag = encode_rows(rows)
        >>> sorted(columns.keys()), tag["lazy"]
        (['name', 'next.reward'], 0)
    """
    batch = batch.reshape(-1).detach().cpu()
    lazy = isinstance(batch, LazyStackedTensorDict)
    leaves = batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    if dotted := [key for key in leaves if SEPARATOR in "".join(key)]:
        raise BatchError(
            f"TransferQueue takes keys without dots; found {listing(map(str, dotted))}: rename them"
        )
    if lazy:
        rows = [row.flatten_keys(SEPARATOR, is_leaf=is_leaf_nontensor) for row in batch.unbind(0)]
        names = [key if isinstance(key, str) else SEPARATOR.join(key) for key in leaves]
        each = {name: _ragged([row.get(name) for row in rows]) for name in names}
        columns = TensorDict(each, batch_size=batch.batch_size)
    else:
        columns = batch.flatten_keys(SEPARATOR, is_leaf=is_leaf_nontensor).clone()
    return columns, {"columns": _columns_of(columns), "lazy": int(lazy)}


def _ragged(rows: Sequence[Any]) -> Any:
    if not isinstance(rows[0], Tensor):
        return NonTensorStack(*(row.tolist() if hasattr(row, "tolist") else row for row in rows))
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def decode_rows(columns: TensorDictBase, tag: Mapping[str, Any]) -> TensorDictBase:
    """The rows of :func:`encode_rows`, whose tag they all have.

    Raises:
        BatchError: columns are missing.

    Example:
        >>> rows = TensorDict({("next", "reward"): torch.ones(2)}, batch_size=[2])
        >>> decode_rows(*encode_rows(rows))["next", "reward"].tolist()
        [1.0, 1.0]
    """
    if _columns_of(columns) != tag["columns"]:
        raise BatchError(
            f"TransferQueue returns all columns of rows that were put; found only {sorted(columns.keys())}"
        )
    count = columns.batch_size[0]
    each = {key: columns.get(key) for key in columns.keys()}
    if tag["lazy"]:
        for key, column in each.items():
            each[key] = column.unbind() if isinstance(column, Tensor) else column.tolist()
        rows = ({key: column[row] for key, column in each.items()} for row in range(count))
        return lazy_stack([TensorDict(row, batch_size=[]).unflatten_keys(SEPARATOR) for row in rows])
    for key, column in each.items():
        if isinstance(column, Tensor) and column.is_nested:  # dense ones come back so, all their rows alike
            each[key] = torch.stack(column.unbind())
    return TensorDict(each, batch_size=[count]).unflatten_keys(SEPARATOR)


def _columns_of(columns: TensorDictBase) -> int:
    """Which columns there are, as a number."""
    return zlib.crc32("\n".join(sorted(columns.keys())).encode())


def fetch_rows(queue: Any, keys: Sequence[str], partition: str, tag: Mapping[str, Any]) -> TensorDictBase:
    """Rows by their keys, all of which have a tag.

    Raises:
        BatchError: there are fewer, or columns are missing.
    """
    columns = queue.kv_batch_get(list(keys), partition)
    if columns.batch_size[0] != len(keys):
        raise BatchError(
            f"TransferQueue returns all rows that were put in partition {partition!r}; found "
            f"{columns.batch_size[0]} of {len(keys)}: {listing(keys)}"
        )
    return decode_rows(columns, tag)

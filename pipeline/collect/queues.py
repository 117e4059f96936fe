"""TransferQueue as the way of rollouts to an assembler, and of optimiser steps to ranks."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, cast
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
from headrace.transforms.entry import enter_rows
from headrace.transforms.errors import listing
from headrace.transforms.options import at_least, one_of, takes_options
from headrace.transforms.schema import (
    IN_LOSS,
    MASKS,
    PADDING,
    RANK,
    has_key,
    key_names,
    read_written,
    require,
)
from headrace.transforms.tensordicts import (
    ELSEWHERE,
    fill_out_of_loss,
    join_rows,
    mask_tokens_of,
    number_of,
    take_rows,
    to_plain,
    write_column,
)

from .assembling import POLL, check_patience, wait_until
from .thin_rows import ColumnsRead, pack_thin, unpack_thin

SEPARATOR = "."
END = "end"  # the key that says that nothing more comes
TABLE = "table"  # the field of a sample that is a table of rows
AGAIN = ("headrace", "again")  # of a row whose rank gets it in a later step, too


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

    With `decided_by` the tokens stay in the storage units. The reader gets the columns by which assembler and
    pipeline decide, counts of tokens among them, less than 200 bytes a row, and where each row is stored::

        source = RolloutQueue("rollouts", producers=4, decided_by=[assembler, pipeline])
        for batch in assembled(source, assembler):
            steps.put(pipeline.minibatches(batch))                  # a StepQueue(..., rollouts="rollouts")
            source.keep_only(assembler, pipeline, steps)

    A pipeline with a stage that reads tokens refuses such a batch; give it ``source.fetch(batch)``.

    Args:
        partition: of the queue; a name that no earlier run has used. What was put is listed in a second one,
            of this name and ``/pieces``.
        producers: how many end before the reader does. None: it reads without end.
        clear: when rows that were read leave the queue: ``read``, as soon as more are asked for; ``saved``,
            when :meth:`state_dict` is called the second time after, so that a reader that goes on from its
            last state, or the one before, finds all that came later, the end too: what was read after the
            last two states stays. With `decided_by` rows leave by :meth:`keep_only` alone.
        max_rows: that are read at once, ≥ 1; what was put together is.
        decided_by: GroupAssemblers and pipelines, whose columns the reader gets. The handles of producers
            need the same ones. None: the reader gets whole rows.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option with a wrong value.
        TypeError: `decided_by` has something else.
    """

    def __init__(
        self,
        partition: str,
        *,
        producers: int | None = None,
        clear: Literal["read", "saved"] = "read",
        max_rows: int = 1024,
        decided_by: Sequence[Any] | None = None,
    ):
        _queue()
        self.partition, self.producers = partition, at_least("producers", producers, 1)
        self.clear = one_of("clear", clear, ("read", "saved"))
        self.max_rows = at_least("max_rows", max_rows, 1)
        self.reads = None if decided_by is None else ColumnsRead.of(decided_by)
        """What the reader gets of rows; None: whole rows."""
        self._name, self._sent = "", 0
        self._read: dict[str, int] = {}  # by producer, how many of its rows
        self._used: list[tuple[str, int]] = []  # pieces that were read and are there still, and their rows
        self._saved = 0  # how many of those are in the last state
        self._there: set[str] = set()  # keys of rows that were read without their tokens, and are there still
        self._free: set[str] = set()  # and of those that nobody had when it was last asked

    # -- producers ----------------------------------------------------------------------------------

    def put(self, batch: TensorDictBase | None) -> None:
        """Send rows; None has none.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack.

        Raises:
            BatchError: a key has a dot; an id is not set, with `decided_by`.
        """
        if batch is None or batch.shape.numel() == 0:
            return
        if self.reads is not None:
            batch = enter_rows(batch, self.reads.ids, reader=type(self).__name__)
        columns, tag = encode_rows(batch)
        tag["rows"], table = len(columns), None
        if self.reads is not None:
            table = _as_table(self.reads.thin(batch.reshape(-1)))
            tag["table"] = 1
        first, self._sent = self._sent, self._sent + len(columns)
        keys = [self._key(row) for row in range(first, self._sent)]
        _queue().kv_batch_put(keys, self.partition, fields=columns)
        # It is there after the data: who sees it may read.
        _queue().kv_batch_put([self._key(first)], self._pieces, fields=table, tags=[tag])

    def end(self) -> None:
        """Say that no more rows come from here."""
        _queue().kv_batch_put([self._key(END)], self._pieces, tags=[{END: self._sent}])

    @property
    def _pieces(self) -> str:
        """The partition in which what was put is listed."""
        return f"{self.partition}/pieces"

    def _key(self, what: int | str) -> str:
        self._name = self._name or f"{uuid4().int >> 65:x}"  # of this process: copies have their own
        return f"{self._name}/{what}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_name": "", "_sent": 0}

    # -- the reader ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield new rows, in pieces, or after a moment None where there are none.

        Raises:
            BatchError: the queue has lost rows, or columns of them; their producer had no `decided_by`.
        """
        while True:
            if self.clear == "read":
                self._forget(len(self._used))
            ended, new = self._look()
            for _, pieces in groupby(new, key=lambda piece: (piece[1]["columns"], piece[1]["lazy"])):
                some = list(pieces)
                keys = [key for first, tag in some for key in _keys_of(first, tag["rows"])]
                batch = self._rows_of(some, keys)
                for first, tag in some:
                    name, _, number = first.partition("/")
                    self._read[name] = int(number) + tag["rows"]
                    self._used.append((first, tag["rows"]))
                yield batch
            if not new and self.producers is not None and len(ended) >= self.producers:
                break
            if not new:
                time.sleep(POLL)
                yield None
        self._used += [(key, 0) for key in ended if (key, 0) not in self._used]
        if self.clear == "read":
            self._forget(len(self._used))

    def _rows_of(self, pieces: Sequence[tuple[str, Mapping[str, Any]]], keys: list[str]) -> TensorDictBase:
        """The rows of pieces of one kind, or their table."""
        tag = pieces[0][1]
        if self.reads is None:
            return fetch_rows(_queue(), keys, self.partition, tag)
        if odd := [key for key, tag in pieces if "table" not in tag]:
            raise BatchError(
                f"rows of partition {self.partition!r} come with the columns by which is decided; found none "
                f"at {listing(odd)}: give the producers' RolloutQueue the same decided_by"
            )
        parts = []
        tables = _tables([key for key, _ in pieces], self._pieces)
        for (first, tag), thin in zip(pieces, tables, strict=True):
            name, _, number = first.partition("/")
            stored = torch.tensor([int(name, 16), 0, 2 * tag["columns"] + tag["lazy"]]).repeat(len(thin), 1)
            stored[:, 1] = torch.arange(int(number), int(number) + len(thin))
            write_column(thin, ELSEWHERE, stored)
            parts.append(thin)
        self._there.update(keys)
        return parts[0] if len(parts) == 1 else join_rows(parts, "rows of a producer")

    def _look(self) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]]]:
        """The keys that say an end, and pieces that are new."""
        new: list[tuple[str, Mapping[str, Any]]] = []
        ended: list[str] = []
        rows = 0
        for key, tag in self._tags().items():
            name, _, number = key.partition("/")
            if number == END:
                ended += [key] if END in tag else []
            elif tag and int(number) >= self._read.get(name, 0) and rows < self.max_rows:
                new.append((key, tag))
                rows += tag["rows"]
        return ended, new

    def _tags(self) -> Mapping[str, Mapping[str, Any]]:
        """Those of all pieces that the queue has, by key."""
        return _queue().kv_list(self._pieces).get(self._pieces, {})

    def _forget(self, count: int) -> None:
        """Let the first pieces go that were read, and where nobody fetches them later, their rows."""
        used = self._used[:count]
        keys = [key for first, rows in used for key in _keys_of(first, rows)]
        if keys and self.reads is None:
            _queue().kv_clear(keys, self.partition)
        if used:
            _queue().kv_clear([first for first, _ in used], self._pieces)
        self._used, self._saved = self._used[count:], max(0, self._saved - count)

    def fetch(self, rows: TensorDictBase) -> TensorDictBase:
        """Rows with their tokens, out of the storage units.

        Args:
            rows: TensorDict ``[N]`` that came of `decided_by`.

        Raises:
            MissingKeyError: it does not say where they are stored.
            BatchError: the queue has lost rows, or columns of them; dense rows differ in width.
        """
        require(rows, ELSEWHERE, reader=type(self).__name__, option="written with decided_by")
        whole = with_tokens(rows, fetch_stored(self.partition, rows[ELSEWHERE]))
        mask_rows(whole, rows, self.reads.masked if self.reads is not None else [])
        return whole

    def keep_only(self, *holders: Any) -> int:
        """Let all rows leave the queue that were read with `decided_by`, but those that somebody still has.

        With ``clear="saved"`` rows leave that nobody had at the last call either: call it after each state
        that you save, and a run can go on from the last state, or the one before.

        Args:
            holders: all that may have rows which are still to be fetched: assemblers, pipelines, streams such
                as :func:`informative`, and StepQueues.

        Returns:
            How many rows have left.
        """
        held: set[str] = set()
        for holder in holders:
            if isinstance(holder, StepQueue):
                held.update(_keys(holder.under_way()))
                continue
            state = getattr(holder, "own_state", None) or holder.state_dict
            held.update(key for part in _stored_in(state()) for key in _keys(part))
        free = self._there - held
        gone = sorted(free & self._free if self.clear == "saved" else free)
        if gone:
            _queue().kv_clear(gone, self.partition)
        self._there.difference_update(gone)
        self._free = free.difference(gone)
        return len(gone)

    def state_dict(self) -> dict[str, Any]:
        """How many rows of each producer were read."""
        if self.clear == "saved":
            self._forget(self._saved)
            self._saved = len(self._used)
        return {"read": dict(self._read)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after those rows; they leave the queue as if they had been read here."""
        self._read = dict(state["read"])
        pieces = [(first.partition("/"), first, tag) for first, tag in self._tags().items()]
        read = [
            (first, tag["rows"])
            for (name, _, number), first, tag in pieces
            if number != END and int(number) < self._read.get(name, 0)
        ]
        self._used = read
        self._saved = len(self._used)
        if self.reads is not None:
            keys = _queue().kv_list(self.partition).get(self.partition, {})
            rows = [(key, *key.partition("/")[::2]) for key in keys]
            self._there = {key for key, name, number in rows if int(number) < self._read.get(name, 0)}


def _as_table(rows: TensorDictBase) -> TensorDict:
    """Columns of numbers as one sample of the queue."""
    return TensorDict({TABLE: pack_thin(rows).unsqueeze(0)}, batch_size=[1])


def _tables(keys: Sequence[str], partition: str) -> list[TensorDict]:
    """The rows of :func:`_as_table`, of each key.

    Raises:
        BatchError: the queue has lost one.
    """
    found = _queue().kv_batch_get(list(keys), partition)
    if TABLE not in found.keys() or found.batch_size[0] != len(keys):
        raise BatchError(
            f"TransferQueue returns all tables that were put in partition {partition!r}; it lacks some of "
            f"{listing(keys)}"
        )
    return [unpack_thin(table) for table in found[TABLE].unbind()]


def _keys_of(first: str, rows: int) -> list[str]:
    """The keys of so many rows that were put together, by the first."""
    name, _, number = first.partition("/")
    return [f"{name}/{row}" for row in range(int(number), int(number) + rows)] if rows else []


def _keys(stored: Tensor) -> list[str]:
    """The keys of rows, (n, 3) int64."""
    return [f"{name:x}/{number}" for name, number, _ in stored.tolist()]


def _stored_in(state: Any, name: str = "") -> Iterator[Tensor]:
    """Where rows are stored that are anywhere in a state."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _stored_in(value, str(key))
    elif isinstance(state, TensorDictBase):
        yield from _stored_in(to_plain(state))
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _stored_in(value)
    elif isinstance(state, Tensor) and name == ELSEWHERE[-1]:
        yield state


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
    for it. Its partition is the name, a slash and its number. Of rows that a :class:`RolloutQueue` read with
    `decided_by` a rank is told which they are and what was decided of them. It fetches their tokens from the
    storage units, once for all steps that were put together.

    Args:
        partition: of the queue; a name that no earlier run has used.
        ranks: that train, ≥ 1.
        max_steps: that wait for a rank before :meth:`put` waits. None: any number.
        rollouts: the partition in which rows are whose tokens ranks fetch. None: rows have their tokens.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option with a wrong value.
    """

    def __init__(
        self, partition: str, *, ranks: int, max_steps: int | None = None, rollouts: str | None = None
    ):
        _queue()
        self.partition, self.ranks = partition, at_least("ranks", ranks, 1)
        self.max_steps = at_least("max_steps", max_steps, 1)
        self.rollouts = rollouts
        self.steps = 0
        """Steps that were put."""
        self._sent: dict[tuple[int, int], Tensor] = {}  # by rank and step, where rows are that it fetches

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sent": {}}

    def put(self, minibatches: Iterable[TensorDictBase], *, patience: float | None = None) -> int:
        """Send optimiser steps, and return how many.

        Args:
            minibatches: of a run, cut for all ranks: ``ShuffleSplit(ranks=…)`` without a rank of its own.
            patience: seconds for which to wait until a rank takes a step. None: without end.

        Raises:
            MissingKeyError: rows do not say which rank they are for.
            BatchError: they are for a rank that there is not; their tokens are elsewhere, without `rollouts`.
            StalledError: a rank has taken none in time.
        """
        before, patience = self.steps, check_patience(patience)
        for minibatch in self._numbered(minibatches):
            # All is looked at before anything is sent: else some ranks would have a step that others lack.
            parts = rows_by_rank(minibatch, self.ranks)
            for rank in range(self.ranks):
                if not wait_until(self._has_room, patience, rank):
                    late = f"rank {rank} has not taken optimiser step {min(self._tags(rank), key=int)}"
                    raise StalledError(f"{late} for {patience:g} s")
            for rank, rows in enumerate(parts):
                tag: dict[str, Any] = {}
                name, table = f"{self.partition}/{rank}", None
                if len(rows) and has_key(rows, ELSEWHERE):
                    masked, finite = minibatch[MASKS]
                    table, tag = _as_table(rows.exclude(MASKS)), {"masked": _paths(masked)}
                    tag["finite"] = None if finite is None else [_paths(finite[:2]), _paths(finite[2])]
                    self._sent[rank, self.steps] = rows[ELSEWHERE]
                elif len(rows):
                    columns, tag = encode_rows(rows)
                    keys = [f"{self.steps}/{row}" for row in range(len(rows))]
                    _queue().kv_batch_put(keys, name, fields=columns, tags=[tag] * len(rows))
                tags = [tag | {"rows": len(rows)}]
                _queue().kv_batch_put([f"{self.steps}"], name, fields=table, tags=tags)
            self.steps += 1
        return self.steps - before

    def _numbered(self, minibatches: Iterable[TensorDictBase]) -> Iterator[TensorDictBase]:
        """Say of rows whose tokens are elsewhere whether their rank gets them in a later step again."""
        steps = iter(minibatches)
        for first in steps:
            if not len(first) or not has_key(first, ELSEWHERE):
                yield first
                continue
            if self.rollouts is None:
                raise BatchError(
                    "the tokens of these rows are stored elsewhere: name the partition of their RolloutQueue "
                    "as StepQueue(rollouts=…), or fetch the rows before the pipeline"
                )
            found, later = [first, *steps], set[tuple[int, ...]]()
            for step in reversed(found):
                ranks = step[RANK].tolist() if has_key(step, RANK) else [0] * len(step)
                keys = [(rank, *key) for rank, key in zip(ranks, step[ELSEWHERE].tolist(), strict=True)]
                step[AGAIN] = torch.tensor([key in later for key in keys])
                later.update(keys)
            yield from found

    def under_way(self) -> Tensor:
        """(n, 3) int64: where rows are stored that were put here and that a rank is still to fetch."""
        waiting = {
            (rank, int(step)) for rank in range(self.ranks) for step in self._tags(rank) if step != END
        }
        self._sent = {place: stored for place, stored in self._sent.items() if place in waiting}
        return torch.cat([torch.empty(0, 3, dtype=torch.int64), *self._sent.values()])

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
        tokens = RankTokens(self.rollouts)
        while True:
            tags = self._tags(rank)
            if (tag := tags.get(f"{step}")) is not None:
                keys = [] if "masked" in tag else [f"{step}/{row}" for row in range(tag["rows"])]
                if "masked" in tag:
                    rows = tokens.of_step(_tables([f"{step}"], name)[0], tag)
                else:
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


# -- tokens, fetched by those who train on them -------------------------------------------------------------


class RankTokens:
    """The tokens of a rank's rows, fetched once for the steps that were put together.

    Args:
        partition: in which they are.
    """

    def __init__(self, partition: str | None):
        self.partition = partition
        self.rows: TensorDictBase | None = None
        """Those that later steps have again."""
        self.at: dict[str, int] = {}
        """Where each of them is, by its key."""

    def of_step(self, thin: TensorDictBase, tag: Mapping[str, Any]) -> TensorDictBase:
        """The rows of a step, as the pipeline gathers them where tokens are at hand.

        Args:
            thin: TensorDict ``[N]``, N ≥ 1: what was decided of them.
            tag: of the step: which columns of tokens are masked.

        Raises:
            BatchError: as :func:`fetch_stored`; rows are out of the loss, and no column can say so.
        """
        keys = _keys(thin[ELSEWHERE])
        missing = torch.tensor([key not in self.at for key in keys])
        if bool(missing.any()):
            new = list(dict.fromkeys(key for key in keys if key not in self.at))
            stored = dict(zip(keys, thin[ELSEWHERE], strict=True))
            fetched = fetch_stored(self.partition or "", torch.stack([stored[key] for key in new]))
            start = 0 if self.rows is None else len(self.rows)
            self.at |= {key: start + number for number, key in enumerate(new)}
            self.rows = fetched if self.rows is None else join_rows([self.rows, fetched], "rows of a rank")
        at = torch.tensor([self.at[key] for key in keys])
        rows = with_tokens(thin, take_rows(cast(TensorDictBase, self.rows), at))
        again = list(dict.fromkeys(key for key, flag in zip(keys, thin[AGAIN].tolist(), strict=True) if flag))
        self._let_go(set(keys) - set(again))
        mask_rows(rows, thin, map(_key_at, tag["masked"]))
        if tag["finite"] is not None:
            (mask, *log_prob), others = tag["finite"]
            own = _key_at(log_prob[0]) if log_prob else None
            fill_out_of_loss(rows, _key_at(mask), own, map(_key_at, others))
        return rows

    def _let_go(self, keys: set[str]) -> None:
        kept = [key for key in self.at if key not in keys]
        if not kept:
            self.rows = None
        elif keys and self.rows is not None:
            self.rows = take_rows(self.rows, torch.tensor([self.at[key] for key in kept]))
        self.at = {key: number for number, key in enumerate(kept)}


def mask_rows(rows: TensorDictBase, thin: TensorDictBase, keys: Iterable[Any]) -> None:
    """Mask the tokens of rows that are out of the loss, or padding.

    Args:
        rows: TensorDict ``[N]``, the caller's own.
        thin: TensorDict ``[N]``, which says which they are.
        keys: of masks and log-probabilities; None is none.

    Raises:
        BatchError: the rows have none of these columns.
    """
    silent = torch.zeros(len(rows), dtype=torch.bool)
    if has_key(thin, IN_LOSS):
        silent |= ~thin[IN_LOSS]
    if has_key(thin, PADDING):
        silent |= thin[PADDING]
    if not bool(silent.any()):
        return
    keys = list(dict.fromkeys(key for key in keys if key is not None))
    found = [key for key in keys if has_key(rows, key)]
    if not found:
        raise BatchError(
            f"{int(silent.sum())} rows are out of the loss, which a row says by one of {keys}; found "
            f"{key_names(rows)}"
        )
    for key in found:
        mask_tokens_of(rows, key, silent)


def with_tokens(thin: TensorDictBase, rows: TensorDictBase) -> TensorDictBase:
    """Rows with what was decided of them: the columns of `thin` over those of `rows`, which are the caller's.

    Args:
        thin: TensorDict ``[N]``.
        rows: TensorDict ``[N]``, the same rows.
    """
    for key in thin.keys(include_nested=True, leaves_only=True):
        if key not in (ELSEWHERE, AGAIN) and key[:2] != number_of("")[:2]:
            write_column(rows, key, thin.get(key))
    return rows


def fetch_stored(partition: str, stored: Tensor) -> TensorDictBase:
    """Rows out of the storage units, in the order given.

    Args:
        partition: in which they are.
        stored: (N, 3) int64, N ≥ 1: producer, number, kind; rows may come twice.

    Raises:
        BatchError: there are fewer, or columns are missing; dense rows differ in width.
    """
    parts, places = [], []
    for kind in stored[:, 2].unique().tolist():
        at = (stored[:, 2] == kind).nonzero().flatten()
        some, own = stored[at].unique(dim=0, return_inverse=True)
        rows = fetch_rows(_queue(), _keys(some), partition, {"columns": kind >> 1, "lazy": kind & 1})
        parts.append(take_rows(rows, own))
        places.append(at)
    rows = parts[0] if len(parts) == 1 else join_rows(parts, "rows of a batch")
    return take_rows(rows, torch.cat(places).argsort())


def _paths(keys: Iterable[Any]) -> list[list[str]]:
    return [[key] if isinstance(key, str) else list(key) for key in keys if key is not None]


def _key_at(path: Sequence[str]) -> Any:
    return path[0] if len(path) == 1 else tuple(path)


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
        singles = ({key: column[row] for key, column in each.items()} for row in range(count))
        return lazy_stack([TensorDict(row, batch_size=[]).unflatten_keys(SEPARATOR) for row in singles])
    for key, column in each.items():
        if isinstance(column, Tensor) and column.is_nested:  # dense ones come back so, all their rows alike
            rows = column.unbind()
            if len({row.shape for row in rows}) > 1:
                raise BatchError(
                    f"dense rows have one width; {key!r} has {sorted({tuple(row.shape) for row in rows})}: "
                    "pad to one width, or keep ragged rows in a lazy stack"
                )
            each[key] = torch.stack(rows)
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

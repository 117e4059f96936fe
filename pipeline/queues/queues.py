"""Send rollouts to an assembler and optimiser steps to ranks, through TransferQueue."""

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

from headrace.installed import import_extra
from headrace.pipeline.collect import (
    POLL,
    ColumnsRead,
    check_patience,
    pack_thin,
    unpack_thin,
    wait_until,
)
from headrace.transforms import BatchError, StalledError
from headrace.transforms.carry import join_rows, to_plain
from headrace.transforms.streams import RowPiece, gather
from headrace.transforms.table import MissingKeyError, count_of, enter_rows, listing
from headrace.transforms.table.options import at_least, takes_options
from headrace.transforms.table.schema import (
    IN_LOSS,
    MASKS,
    PADDING,
    RANK,
    facts_of,
    has_key,
    key_names,
    read_written,
)
from headrace.transforms.table.tensordicts import (
    ELSEWHERE,
    fill_out_of_loss,
    mask_tokens_of,
    number_of,
    take_rows,
    write_column,
)

SEPARATOR = "."
END = "end"  # key of the entry that ends the rows of a producer, or the steps
TABLE = "table"  # the field of a sample that holds a table of rows


def tq() -> Any:
    """Import the module of the extra `tq`."""
    return import_extra("transfer_queue", "a queue of TransferQueue")


@takes_options
class RolloutQueue:
    """Send rows from several producers to one reader, through a partition of TransferQueue.

    ::

        RolloutQueue("rollouts").put(rows)                          # each producer, and .end() after its last
        source = RolloutQueue("rollouts", producers=4)              # the reader
        for batch in assembled(source, assembler, patience=600): ...

    Each row is a sample of the queue with its own key, and is read when all its columns are stored. The rows
    of one producer are read in the order of its puts. A handle that is sent to another process, or used after
    a restart, counts as another producer. If it sends rows twice, the assembler detects the duplicate ids.
    TransferQueue's own group sampler, which counts rows, is not used. Start Ray and TransferQueue
    (``transfer_queue.init()``) before you make a queue.

    With `decided_by` the tokens stay in the storage units. The reader gets only the columns that assembler
    and pipeline need to decide, token counts, and the location of each row: less than 200 bytes per row::

        source = RolloutQueue("rollouts", producers=4, decided_by=[assembler, pipeline])
        for batch in assembled(source, assembler):
            steps.put(pipeline.minibatches(batch))                  # a StepQueue(..., rollouts="rollouts")
            source.keep_only(assembler, pipeline, steps)

    A pipeline with a stage that reads tokens refuses such a batch. Give it ``source.fetch(batch)``.

    Args:
        partition: a name that no earlier run of the queue has used. A second partition, with ``/pieces``
            after this name, lists the puts.
        producers: number of producers that must call :meth:`end` before the reader ends; None: it never ends.
        clear: when rows that were read are deleted from the queue. ``read``: at the next read.
            ``saved``: at the second call of :meth:`state_dict` after the read, so that a reader can continue
            from its last state or the state before. With `decided_by` only :meth:`keep_only` deletes rows.
        max_rows: number of rows after which a read ends, ≥ 1. The rows of one put are always read together.
        decided_by: GroupAssemblers and pipelines; the reader gets only the columns that these read. Give the
            queues of producers the same `decided_by`. None: the reader gets whole rows.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option has an invalid value.
        TypeError: `decided_by` contains another object.
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
        tq()
        self.partition, self.producers = partition, at_least("producers", producers, 1)
        self.clear = clear
        self.max_rows = at_least("max_rows", max_rows, 1)
        self.reads = None if decided_by is None else ColumnsRead.of(decided_by)
        """The columns that the reader gets; None: whole rows."""
        self._name, self._sent = "", 0
        self._read: dict[str, int] = {}  # number of rows read, by producer
        self._used: list[tuple[str, int]] = []  # puts that were read and are not deleted, with row counts
        self._saved = 0  # number of entries of `_used` in the last state
        self._stored: set[str] = set()  # keys of rows that were read without tokens and are not deleted
        self._free: set[str] = set()  # keys in `_stored` that no holder had at the last keep_only

    # -- producers ----------------------------------------------------------------------------------

    def put(self, batch: TensorDictBase | None) -> None:
        """Send rows.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack; None: no rows.

        Raises:
            BatchError: a key contains a dot; or, with `decided_by`, an id is missing.
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
        tq().kv_batch_put(keys, self.partition, fields=columns)
        # Put the tag after the data, so that the reader sees only complete puts.
        tq().kv_batch_put([self._key(first)], self._pieces, fields=table, tags=[tag])

    def end(self) -> None:
        """Tell the reader that this producer sends no more rows."""
        tq().kv_batch_put([self._key(END)], self._pieces, tags=[{END: self._sent}])

    @property
    def _pieces(self) -> str:
        """The partition that lists the puts."""
        return f"{self.partition}/pieces"

    def _key(self, what: int | str) -> str:
        self._name = self._name or f"{uuid4().int >> 65:x}"  # unique per process; a copy gets its own
        return f"{self._name}/{what}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_name": "", "_sent": 0}

    # -- the reader ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield batches of new rows, or None after a short wait without rows.

        Raises:
            BatchError: the queue has lost rows or columns; or the producer of rows had no `decided_by`.
        """
        while True:
            if self.clear == "read":
                self._forget(len(self._used))
            ended, new = self._look()
            for _, pieces in groupby(new, key=lambda piece: (piece[1]["columns"], piece[1]["lazy"])):
                alike = list(pieces)
                keys = [key for first, tag in alike for key in _keys_of(first, tag["rows"])]
                batch = self._rows_of(alike, keys)
                for first, tag in alike:
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
        """The rows of puts that have the same columns. With `decided_by`, only the columns in `reads`."""
        tag = pieces[0][1]
        if self.reads is None:
            return fetch_rows(tq(), keys, self.partition, tag)
        if odd := [key for key, tag in pieces if "table" not in tag]:
            raise BatchError(
                "all producers of partition {partition} must use decided_by; puts {found} did "
                "not: create the producers' RolloutQueue with the decided_by of the reader",
                partition=repr(self.partition),
                found=listing(odd),
            )
        parts = []
        tables = _tables([key for key, _ in pieces], self._pieces)
        for (first, tag), thin in zip(pieces, tables, strict=True):
            name, _, number = first.partition("/")
            stored = torch.tensor([int(name, 16), 0, 2 * tag["columns"] + tag["lazy"]]).repeat(len(thin), 1)
            stored[:, 1] = torch.arange(int(number), int(number) + len(thin))
            write_column(thin, ELSEWHERE, stored)
            parts.append(thin)
        self._stored.update(keys)
        return parts[0] if len(parts) == 1 else join_rows(parts, "rows of a producer")

    def _look(self) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]]]:
        """The end keys, and the keys and tags of new puts."""
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
        """The tags of all puts in the queue, by key."""
        return tq().kv_list(self._pieces).get(self._pieces, {})

    def _forget(self, count: int) -> None:
        """Delete the first `count` puts of `_used`. With `decided_by`, their rows stay in the queue."""
        used = self._used[:count]
        keys = [key for first, rows in used for key in _keys_of(first, rows)]
        if keys and self.reads is None:
            tq().kv_clear(keys, self.partition)
        if used:
            tq().kv_clear([first for first, _ in used], self._pieces)
        self._used, self._saved = self._used[count:], max(0, self._saved - count)

    def fetch(self, rows: TensorDictBase) -> TensorDictBase:
        """Fetch the tokens of rows from the storage units.

        Args:
            rows: TensorDict ``[N]`` that was read with `decided_by`.

        Raises:
            MissingKeyError: the column that says where the rows are stored is missing.
            BatchError: the queue has lost rows or columns; or dense rows differ in width.
        """
        if not has_key(rows, ELSEWHERE):
            facts = facts_of(rows, ELSEWHERE, "", type(self).__name__)
            raise MissingKeyError("{reader} {missing}. Read the rows by a queue with decided_by", **facts)
        whole = with_tokens(rows, fetch_stored(self.partition, rows[ELSEWHERE]))
        mask_rows(whole, rows, self.reads.masked if self.reads is not None else [])
        return whole

    def keep_only(self, *holders: Any) -> int:
        """Delete all rows from the queue that were read with `decided_by`, except rows that a holder has.

        With ``clear="saved"`` rows are deleted only if no holder had them at the previous call either. Call
        this after each saved state. Then a run can continue from the last state or the state before.

        Args:
            holders: all objects with rows whose tokens are needed later: assemblers, pipelines, streams such
                as :func:`informative`, and StepQueues.

        Returns:
            The number of deleted rows.
        """
        held: set[str] = set()
        for holder in holders:
            if isinstance(holder, StepQueue):
                held.update(_keys(holder.under_way()))
                continue
            state = getattr(holder, "own_state", None) or holder.state_dict
            held.update(key for part in _stored_in(state()) for key in _keys(part))
        free = self._stored - held
        gone = sorted(free & self._free if self.clear == "saved" else free)
        if gone:
            tq().kv_clear(gone, self.partition)
        self._stored.difference_update(gone)
        self._free = free.difference(gone)
        return len(gone)

    def state_dict(self) -> dict[str, Any]:
        """The number of rows that were read, by producer."""
        if self.clear == "saved":
            self._forget(self._saved)
            self._saved = len(self._used)
        return {"read": dict(self._read)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows that a state counts. These are deleted as if this reader had read them."""
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
            keys = tq().kv_list(self.partition).get(self.partition, {})
            rows = [(key, *key.partition("/")[::2]) for key in keys]
            self._stored = {key for key, name, number in rows if int(number) < self._read.get(name, 0)}


def _as_table(rows: TensorDictBase) -> TensorDict:
    """Pack columns of numbers into one sample of the queue."""
    return TensorDict({TABLE: pack_thin(rows).unsqueeze(0)}, batch_size=[1])


def _tables(keys: Sequence[str], partition: str) -> list[TensorDict]:
    """Read the rows that :func:`_as_table` packed, for each key.

    Raises:
        BatchError: the queue has lost a table.
    """
    found = tq().kv_batch_get(list(keys), partition)
    if TABLE not in found.keys() or found.batch_size[0] != len(keys):
        raise BatchError(
            "TransferQueue must return all tables that were put into partition {partition}; some of "
            "these are missing: {found}",
            partition=repr(partition),
            found=listing(keys),
        )
    return [unpack_thin(table) for table in found[TABLE].unbind()]


def _keys_of(first: str, rows: int) -> list[str]:
    """The keys of all rows of one put, from the key of the first row and the number of rows."""
    name, _, number = first.partition("/")
    return [f"{name}/{row}" for row in range(int(number), int(number) + rows)] if rows else []


def _keys(stored: Tensor) -> list[str]:
    """The keys of stored rows, (n, 3) int64: producer, number, kind."""
    return [f"{name:x}/{number}" for name, number, _ in stored.tolist()]


def _stored_in(state: Any, name: str = "") -> Iterator[Tensor]:
    """Find the locations of stored rows anywhere in a state."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _stored_in(value, str(key))
    elif isinstance(state, TensorDictBase):
        yield from _stored_in(to_plain(state))
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _stored_in(value)
    elif isinstance(state, Tensor) and name == ELSEWHERE[1]:
        yield state


@takes_options
class StepQueue:
    """Send optimiser steps to the ranks that train, through partitions of TransferQueue.

    ::

        queue = StepQueue("steps", ranks=2)                         # with pipeline.stages.split.ranks=2
        for batch in assembled(source, assembler):                  # one process runs the pipeline
            queue.put(pipeline.minibatches(batch))
        queue.end()
        optimise(StepQueue("steps", ranks=2).minibatches(rank), loss, optimizer, process_group="world")

    A rank gets its rows of each step, in order. A step without rows for a rank gives it an empty batch. The
    partition of a rank is ``{partition}/{rank}``. If a :class:`RolloutQueue` read the rows with `decided_by`,
    a rank gets their locations and the columns that stages wrote. It fetches their tokens from the storage
    units, once for all steps of one put.

    Args:
        partition: a name that no earlier run of the queue has used.
        ranks: number of ranks that train, ≥ 1.
        max_steps: number of steps that may wait for a rank before :meth:`put` blocks; None: any number.
        rollouts: the partition from which ranks fetch tokens; None: rows are put with their tokens.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option has an invalid value.
    """

    def __init__(
        self, partition: str, *, ranks: int, max_steps: int | None = None, rollouts: str | None = None
    ):
        tq()
        self.partition, self.ranks = partition, at_least("ranks", ranks, 1)
        self.max_steps = at_least("max_steps", max_steps, 1)
        self.rollouts = rollouts
        self.steps = 0
        """Number of steps that were put."""
        self._sent: dict[tuple[int, int], Tensor] = {}  # by rank and step: the rows that the rank must fetch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sent": {}}

    def put(self, minibatches: Iterable[TensorDictBase], *, patience: float | None = None) -> int:
        """Send optimiser steps, and return their number.

        Args:
            minibatches: the minibatches of a run with the rows of all ranks: ``ShuffleSplit(ranks=…)`` with
                rank=None.
            patience: seconds to wait until a rank takes a step; None: forever.

        Raises:
            MissingKeyError: the rank column is missing.
            BatchError: a rank number is too large; or tokens are stored elsewhere, and `rollouts` is None.
            StalledError: a rank has taken no step in time.
        """
        before, patience = self.steps, check_patience(patience)
        for minibatch in minibatches:
            elsewhere = len(minibatch) > 0 and has_key(minibatch, ELSEWHERE)
            if elsewhere and self.rollouts is None:
                raise BatchError(
                    "the tokens of these rows are stored elsewhere: set StepQueue(rollouts=…) to the "
                    "partition of their RolloutQueue, or call RolloutQueue.fetch before the pipeline"
                )
            # Check everything before sending, so that an error cannot give a step to only some ranks.
            parts = rows_by_rank(minibatch, self.ranks)
            for rank in range(self.ranks):
                if not wait_until(self._has_room, patience, rank):
                    late = f"rank {rank} has not taken optimiser step {min(self._tags(rank), key=int)}"
                    raise StalledError(f"{late} for {patience:g} s")
            for rank, rows in enumerate(parts):
                tag: dict[str, Any] = {}
                name, table = f"{self.partition}/{rank}", None
                if len(rows) and elsewhere:
                    masked, finite = minibatch[MASKS]
                    table, tag = _as_table(rows.exclude(MASKS)), {"masked": _paths(masked), "put": before}
                    tag["finite"] = None if finite is None else [_paths(finite[:2]), _paths(finite[2])]
                    self._sent[rank, self.steps] = rows[ELSEWHERE]
                elif len(rows):
                    columns, tag = encode_rows(rows)
                    keys = [f"{self.steps}/{row}" for row in range(len(rows))]
                    tq().kv_batch_put(keys, name, fields=columns, tags=[tag] * len(rows))
                tags = [tag | {"rows": len(rows)}]
                tq().kv_batch_put([f"{self.steps}"], name, fields=table, tags=tags)
            self.steps += 1
        return self.steps - before

    def under_way(self) -> Tensor:
        """(n, 3) int64: the locations of rows that were put and that a rank has not fetched yet."""
        waiting = {
            (rank, int(step)) for rank in range(self.ranks) for step in self._tags(rank) if step != END
        }
        self._sent = {place: stored for place, stored in self._sent.items() if place in waiting}
        return torch.cat([torch.empty(0, 3, dtype=torch.int64), *self._sent.values()])

    def _has_room(self, rank: int) -> bool:
        return self.max_steps is None or len(self._tags(rank)) < self.max_steps

    def _tags(self, rank: int) -> dict[str, Any]:
        """The tags of the steps that a rank has not taken, by number."""
        name = f"{self.partition}/{rank}"
        tags = tq().kv_list(name).get(name, {})
        return {key: tag for key, tag in tags.items() if "/" not in key and tag}

    def end(self) -> None:
        """Tell all ranks that there are no more steps."""
        for rank in range(self.ranks):
            tq().kv_batch_put([END], f"{self.partition}/{rank}", tags=[{END: self.steps}])

    def minibatches(
        self, rank: int, *, first: int = 0, patience: float | None = None
    ) -> Iterator[TensorDictBase]:
        """Yield the rows of a rank in each step.

        Args:
            rank: the rank.
            first: the first step to yield. After a restart, give the number of steps trained before.
            patience: seconds to wait for a step; None: forever.

        Raises:
            StalledError: no step arrived in time.
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
                    rows = fetch_rows(tq(), keys, name, tag) if keys else TensorDict({}, batch_size=[0])
                tq().kv_clear([*keys, f"{step}"], name)
                yield rows
                step, asked = step + 1, time.monotonic()
            elif END in tags and tags[END][END] == step:
                tq().kv_clear([END], name)
                return
            elif patience is not None and time.monotonic() - asked >= patience:
                raise StalledError(f"rank {rank} has waited {patience:g} s for optimiser step {step}")
            else:
                time.sleep(POLL)


def rows_by_rank(minibatch: TensorDictBase, ranks: int) -> list[TensorDictBase]:
    """Split an optimiser step by rank.

    Raises:
        MissingKeyError: there are several ranks, and the rank column is missing.
        BatchError: a rank number is too large.

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
            f"rows must be for ranks 0 to {ranks - 1}; found rank {int(rank.max())}: set StepQueue(ranks=…) "
            "to pipeline.stages.split.ranks"
        )
    return [take_rows(minibatch, (rank == each).nonzero().flatten()) for each in range(ranks)]


# -- tokens, fetched by the ranks ---------------------------------------------------------------------------


class RankTokens:
    """Fetches the tokens of a rank's rows, once for all steps of one put.

    Args:
        partition: the partition in which the rows are stored.
    """

    def __init__(self, partition: str | None):
        self.partition = partition
        self.put: int | None = None
        """The number of the current put."""
        self.rows: dict[str, tuple[RowPiece, int]] = {}
        """The fetched rows of the current put, by key."""

    def of_step(self, thin: TensorDictBase, tag: Mapping[str, Any]) -> TensorDictBase:
        """Add tokens to the rows of a step, masked as the pipeline would mask them.

        Args:
            thin: TensorDict ``[N]``, N ≥ 1: the rows without tokens, with the written columns.
            tag: the tag of the step, with the number of its put, and the token columns to mask.

        Raises:
            BatchError: rows or columns are missing; dense rows differ in width; or rows are out of the loss
                and there is no column to mask.
        """
        if tag["put"] != self.put:
            self.put, self.rows = tag["put"], {}
        stored = dict(zip(_keys(thin[ELSEWHERE]), thin[ELSEWHERE], strict=True))
        if new := [key for key in stored if key not in self.rows]:
            fetched = fetch_stored(self.partition or "", torch.stack([stored[key] for key in new]))
            piece = RowPiece(fetched, range(len(new)))
            self.rows |= {key: (piece, row) for row, key in enumerate(new)}
        rows = with_tokens(thin, gather([self.rows[key] for key in _keys(thin[ELSEWHERE])], {}))
        mask_rows(rows, thin, map(_key_at, tag["masked"]))
        if tag["finite"] is not None:
            (mask, *log_prob), others = tag["finite"]
            own = _key_at(log_prob[0]) if log_prob else None
            fill_out_of_loss(rows, _key_at(mask), own, map(_key_at, others))
        return rows


def mask_rows(rows: TensorDictBase, thin: TensorDictBase, keys: Iterable[Any]) -> None:
    """Mask in place the tokens of rows that are out of the loss, or that are padding.

    Args:
        rows: TensorDict ``[N]``, changed in place.
        thin: TensorDict ``[N]``, the same rows, with the columns that mark them.
        keys: keys of the masks and log-probabilities to change; None is skipped.

    Raises:
        BatchError: the rows have none of these columns.
    """
    masked = torch.zeros(len(rows), dtype=torch.bool)
    if has_key(thin, IN_LOSS):
        masked |= ~thin[IN_LOSS]
    if has_key(thin, PADDING):
        masked |= thin[PADDING]
    if not bool(masked.any()):
        return
    keys = list(dict.fromkeys(key for key in keys if key is not None))
    found = [key for key in keys if has_key(rows, key)]
    if not found:
        raise BatchError(
            f"the batch has {count_of(int(masked.sum()), 'row')} out of the loss, to be masked in one of "
            f"{keys}; it has only {key_names(rows)}"
        )
    for key in found:
        mask_tokens_of(rows, key, masked)


def with_tokens(thin: TensorDictBase, rows: TensorDictBase) -> TensorDictBase:
    """Write the columns of `thin` to `rows`, in place.

    Args:
        thin: TensorDict ``[N]``, with the columns that stages wrote.
        rows: TensorDict ``[N]``, the same rows with their tokens, changed in place.
    """
    for key in thin.keys(include_nested=True, leaves_only=True):
        if key != ELSEWHERE and key[:2] != number_of("")[:2]:
            write_column(rows, key, thin.get(key))
    return rows


def fetch_stored(partition: str, stored: Tensor) -> TensorDictBase:
    """Fetch rows from the storage units, in the given order.

    Args:
        partition: the partition in which the rows are stored.
        stored: (N, 3) int64, N ≥ 1: producer, number, kind. A row may be given several times.

    Raises:
        BatchError: rows or columns are missing; or dense rows differ in width.
    """
    parts, positions = [], []
    for kind in stored[:, 2].unique().tolist():
        at = (stored[:, 2] == kind).nonzero().flatten()
        distinct, index = stored[at].unique(dim=0, return_inverse=True)
        rows = fetch_rows(tq(), _keys(distinct), partition, {"columns": kind >> 1, "lazy": kind & 1})
        parts.append(take_rows(rows, index))
        positions.append(at)
    rows = parts[0] if len(parts) == 1 else join_rows(parts, "rows of a batch")
    return take_rows(rows, torch.cat(positions).argsort())


def _paths(keys: Iterable[Any]) -> list[list[str]]:
    return [[key] if isinstance(key, str) else list(key) for key in keys if key is not None]


def _key_at(path: Sequence[str]) -> Any:
    return path[0] if len(path) == 1 else tuple(path)


# -- rows as TransferQueue stores them: flat columns and one key per row ------------------------------------


def encode_rows(batch: TensorDictBase) -> tuple[TensorDict, dict[str, Any]]:
    """Convert a batch to flat columns for TransferQueue, and make a tag for its rows.

    Nested keys are joined by dots, and ragged columns become nested tensors. The tag holds a checksum of the
    column names, because the queue silently returns only the columns that all requested rows have. The tag
    also says whether the batch is a lazy stack.

    Args:
        batch: TensorDict ``[N]`` or ``[envs, time]``, N ≥ 1, dense or a lazy stack.

    Raises:
        BatchError: a key contains a dot.

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
            f"TransferQueue needs keys without dots; found {listing(map(str, dotted))}: rename these columns"
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
        return NonTensorStack(*rows)
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def decode_rows(columns: TensorDictBase, tag: Mapping[str, Any]) -> TensorDictBase:
    """Restore the rows of :func:`encode_rows`.

    Raises:
        BatchError: columns are missing; or dense rows differ in width.

    Example:
        >>> rows = TensorDict({("next", "reward"): torch.ones(2)}, batch_size=[2])
        >>> decode_rows(*encode_rows(rows))["next", "reward"].tolist()
        [1.0, 1.0]
    """
    if _columns_of(columns) != tag["columns"]:
        raise BatchError(
            f"TransferQueue must return all columns that were put; it returned only {sorted(columns.keys())}"
        )
    count = columns.batch_size[0]
    each = {key: columns.get(key) for key in columns.keys()}
    if tag["lazy"]:
        for key, column in each.items():
            each[key] = column.unbind() if isinstance(column, Tensor) else column.tolist()
        singles = ({key: column[row] for key, column in each.items()} for row in range(count))
        return lazy_stack([TensorDict(row, batch_size=[]).unflatten_keys(SEPARATOR) for row in singles])
    for key, column in each.items():
        if isinstance(column, Tensor) and column.is_nested:  # the queue also nests dense columns
            rows = column.unbind()
            if len({row.shape for row in rows}) > 1:
                raise BatchError(
                    f"dense rows must have one width; {key!r} has "
                    f"{sorted({tuple(row.shape) for row in rows})}: pad all rows to one width, or keep "
                    "ragged rows in a lazy stack"
                )
            each[key] = torch.stack(rows)
    return TensorDict(each, batch_size=[count]).unflatten_keys(SEPARATOR)


def _columns_of(columns: TensorDictBase) -> int:
    """A checksum of the column names."""
    return zlib.crc32("\n".join(sorted(columns.keys())).encode())


def fetch_rows(queue: Any, keys: Sequence[str], partition: str, tag: Mapping[str, Any]) -> TensorDictBase:
    """Fetch rows by their keys. All rows must have been put with this tag.

    Raises:
        BatchError: rows or columns are missing.
    """
    columns = queue.kv_batch_get(list(keys), partition)
    if columns.batch_size[0] != len(keys):
        raise BatchError(
            "TransferQueue must return all rows that were put into partition {partition}; it returned "
            f"{columns.batch_size[0]} of {len(keys)}: {{found}}",
            partition=repr(partition),
            found=listing(keys),
        )
    return decode_rows(columns, tag)

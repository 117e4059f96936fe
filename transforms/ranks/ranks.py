"""Exchange the tables of ranks that share a batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.transforms.table import Alone, BatchError, Ids, OtherRankError, SharedIds, listing
from headrace.transforms.table.tensordicts import (
    bits_of,
    describe_columns,
    device_of,
    flat_rows,
    of_bits,
    without_rows,
)

from .barrier import Barrier

log = logging.getLogger(__name__)


class Ranks(Alone):
    """The connection of this process to the other ranks that share a batch.

    Args:
        group: a process group with this process.
        shared_ids: whether an id on several ranks is the ``same`` unit or ``different`` units; ``raise``
            refuses such ids. None: not checked, because no stage compares ids of different ranks.
        patience: seconds to wait for the other ranks.
        id_keys: columns of ids, with their names for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shared_ids: SharedIds | None = None,
        patience: float = 600.0,
        id_keys: Mapping[Any, str] | None = None,
    ):
        self.group, self.shared_ids, self.id_keys = group, shared_ids, id_keys or {}
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.place = "a batch"  # what this rank is doing, for messages
        self.refused = False  # all ranks know that the current batch is refused
        self._barrier = Barrier(group, patience)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Share a batch with other ranks in a ``with`` block. All ranks raise an error of one rank's block.

        Raises:
            OtherRankError: another rank raised in its block, or did not reach the end of its block in time.
        """
        lock = _LOCKS.setdefault(id(self.group), threading.RLock())
        lock.acquire()  # several threads may share a group, and a group shares one batch at a time
        try:
            yield
            self.place = "the end of a batch"
            self.meet()
        except Exception as err:
            if not self.refused:  # tell the other ranks; all raise the error that came first
                try:
                    self.meet(error=err)
                except OtherRankError as first:
                    if not str(first).startswith(f"rank {self.rank}:"):
                        raise
                except dist.DistError as gone:  # rank 0 has the store, and may have ended after a refusal
                    log.warning("rank %d cannot send its error to the others: %s", self.rank, gone)
            raise
        finally:
            lock.release()

    def meet(self, about: str = "", error: BaseException | None = None) -> None:
        """Wait for all ranks (:meth:`Barrier.meet`), and note if the barrier refuses the batch."""
        try:
            self._barrier.meet(f"{self.place}\n{about}", error)
        except OtherRankError:
            self.refused = True
            raise

    def gather_objects(self, value: Any) -> list[Any]:
        """Exchange small picklable objects by a barrier and two collectives. The result is sorted by rank."""
        self.meet()
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def send_object(self, value: Any, sender: int) -> Any:
        """Send a picklable object of the rank `sender` to all ranks, by a barrier and two collectives."""
        self.meet()
        sent = [value]
        dist.broadcast_object_list(sent, dist.get_global_rank(self.group, sender), group=self.group)
        return sent[0]

    def share(self, table: Any, about: Callable[[], str] = str) -> None:
        """Extend the table of each rank by the rows of all ranks, with one barrier and two collectives.

        If columns differ or a rank has no rows, there are one more barrier and two collectives. A rank
        without rows gets the columns of another rank, and an empty batch with these columns.

        Args:
            table: a :class:`~headrace.transforms.table.table.Table` of this rank's rows, changed in place.
            about: returns a description that must be equal on all ranks.

        Raises:
            BatchError: on all ranks, if columns differ, or if ranks have the same id under ``raise``.
        """
        own = len(table.live)
        kinds = {
            key: (column.dtype, table.dtypes.get(key), tuple(column.shape[1:]))
            for key, column in table.columns.items()
        }
        self.meet(about())
        # 1. Exchange the number of rows and a hash of the columns, so that equal columns need no message.
        counts, hashes = self._all_gather(torch.tensor([own, _hashed(repr(kinds))])).T.tolist()
        if not any(counts):
            return
        if 0 in counts or len(set(hashes)) > 1:
            kinds = self._agree_on_columns(table, kinds, counts)
        # 2. Join the rows of all ranks, in order of the ranks.
        table.ranks = self
        table.columns = self._gather({key: table.columns[key] for key in kinds}, counts)
        rank = torch.arange(self.size).repeat_interleave(torch.tensor(counts))
        for key, name in self.id_keys.items():
            if key in table.columns:
                table.columns[key] = tell_apart(table.columns[key], rank, self.shared_ids, name)
        table.begin([0, *accumulate(counts)])

    def _agree_on_columns(self, table: Any, kinds: dict[Any, Any], counts: list[int]) -> dict[Any, Any]:
        """Return the columns to exchange, with their dtypes and shapes per row.

        Args:
            table: the table of :meth:`share`. A table without rows gets empty columns.
            kinds: for each column of this rank: dtype in the table and in the batch, and shape per row.
            counts: number of rows, by rank.

        Raises:
            BatchError: on all ranks, if columns differ.
        """
        own = counts[self.rank]
        described = (describe_columns(table.batch), device_of(table.batch).type) if own else None
        every = self.gather_objects((kinds, described))
        known = {rank: each for rank, each in enumerate(every) if counts[rank]}  # ranks with rows
        # 1. Columns with different widths are not exchanged: a narrow column of tokens looks like numbers.
        in_batch = [{key for key, *_ in of_row[0]} for _, of_row in known.values()]
        for key in {key for theirs, _ in known.values() for key in theirs}:
            shapes = {theirs.get(key, (None,))[-1] for theirs, _ in known.values()}
            if len(shapes) > 1 and all(key in there for there in in_batch):
                for theirs, _ in known.values():
                    theirs.pop(key, None)
        # 2. All other columns must be equal. A rank without rows takes the columns of the first with rows.
        kinds, of_first = next(iter(known.values()))
        every_key = {key for theirs, _ in known.values() for key in theirs}
        for rank, (theirs, _) in known.items():
            if theirs != kinds:
                lacks = sorted(str(key) for key in every_key - theirs.keys())
                odd = sorted(str(key) for key in theirs if theirs[key] != kinds.get(key))
                found = f"lacks {listing(lacks)}" if lacks else f"has others in {listing(odd)}"
                raise BatchError(
                    f"all ranks must have the same columns, with equal dtypes and shapes; rank {rank} {found}"
                )
        if not own:
            table.columns = {
                key: torch.zeros(0, *shape, dtype=dtype) for key, (dtype, _, shape) in kinds.items()
            }
            table.dtypes = {key: came for key, (_, came, _) in kinds.items() if came is not None}
            if table.batch is None or not len(table.batch):
                table.batch = without_rows(of_first[0], torch.device(of_first[1]))
        return kinds

    def gather_rows(self, values: Tensor, counts: list[int]) -> Tensor:
        """Join (B, ...) values of the rows of each rank to (ΣB, ...), by a barrier and a collective.

        Args:
            values: (B, ...) of this rank.
            counts: B by rank.
        """
        self.meet()
        return self._gather({"values": values}, counts)["values"]

    def _gather(self, columns: Mapping[Any, Tensor], counts: list[int]) -> dict[Any, Tensor]:
        own = counts[self.rank]
        bits = [bits_of(flat_rows(column.detach())) for column in columns.values()]
        widths = [part.shape[1] for part in bits]
        padded = torch.zeros(max(counts), sum(widths), dtype=torch.int64)
        if own and bits:
            padded[:own] = torch.cat(bits, 1)
        parts = self._all_gather(padded)
        together = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        pairs = zip(together.split(widths, 1), columns.items(), strict=True)
        return {
            key: of_bits(part, column.dtype).reshape(len(part), *column.shape[1:])
            for part, (key, column) in pairs
        }

    def _all_gather(self, values: Tensor) -> Tensor:
        """(R, ...) on the CPU: the values of all ranks, which have equal shapes."""
        values = self._to_exchange(values)
        every = values.new_empty(self.size, *values.shape)
        dist.all_gather(list(every.unbind()), values, group=self.group)
        return every.cpu()

    def _to_exchange(self, values: Tensor) -> Tensor:
        return values.cuda() if dist.get_backend(self.group) == "nccl" else values

    def note(self, starts: list[int]) -> str:
        """Explain the row numbers and ids of messages."""
        note = f" (Rows are numbered over all ranks, from {starts[self.rank]} on rank {self.rank}.)"
        if self.shared_ids == "different":
            note += " (Short ids have the number of their rank in front.)"
        return note


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


_LOCKS: dict[int, Any] = {}


def tell_apart(ids: Tensor, rank: Tensor, shared: SharedIds | None, name: str) -> Tensor:
    """Make ids of different ranks different, unless `shared` is ``same`` or ``raise``.

    Args:
        ids: (M,) int64.
        rank: (M,) int64, the rank of each row.
        shared: `shared_ids` of :class:`Ranks`.
        name: the name of the ids for messages.

    Raises:
        BatchError: several ranks have the same id, under ``raise``.

    Example:
        >>> ids, rank = torch.tensor([7, 15, 7, -1]), torch.tensor([0, 0, 1, 1])
        >>> tell_apart(ids, rank, "different", "rollout_id").tolist()
        [7, 15, 107, -1]
    """
    if shared == "same" or len(ids) == 0:
        return ids
    numbered = Ids(ids)
    if shared == "raise":
        if numbered.n == len(ids):
            return ids
        on_several = numbered.min(rank) < numbered.max(rank)
        found = ids[numbered.first[on_several]].tolist() if bool(on_several.any()) else []
        if found := [number for number in found if number >= 0]:
            raise BatchError(
                f"{name} {listing(map(str, found))} on more than one rank: set pipeline.shared_ids=same if "
                "it is the same unit on all ranks, or pipeline.shared_ids=different if each rank has "
                "its own ids"
            )
        return ids
    digits = 10 ** len(str(max(int(ids.amax()), 0)))
    fits = digits * (int(rank.amax()) + 1) < 2**62
    first = numbered.spread(numbered.first)
    different = rank * digits + ids if fits else first * (rank.amax() + 1) + rank
    return torch.where(ids < 0, ids, different)

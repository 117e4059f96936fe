"""What the ranks that share a batch tell one another about their rows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.ids import Ids
from headrace.transforms.tensordicts import (
    bits_of,
    describe_columns,
    device_of,
    flat_rows,
    of_bits,
    without_rows,
)

from .barrier import Barrier, OtherRankError
from .process_group import DecideOn, SharedIds

log = logging.getLogger(__name__)


class Ranks:
    """The ranks of a process group, as one of them sees the others while a batch is with them.

    Args:
        group: of which this process is a rank.
        shared_ids: an id that several ranks have is the ``same`` rollout or group there, or ``different``
            ones, or must not be: ``raise``. None: nobody asks, each rank numbers its own.
        patience: seconds to wait for the others.
        decide_on: ``first_rank``: its table alone has the rows of all, and :func:`hand_out` gives each of the
            others what was decided about its own.

    Attributes:
        one_decides: it is the first rank.
        decides: this rank does.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shared_ids: SharedIds | None = None,
        patience: float = 600.0,
        decide_on: DecideOn = "each_rank",
    ):
        self.group, self.shared_ids = group, shared_ids
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.one_decides = decide_on == "first_rank"
        self.decides = self.rank == 0 or not self.one_decides
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        self.id_keys: dict[Any, str] = {}  # columns of ids, and what messages call them
        self.place = "a batch"  # where this rank is, for messages
        self.refused = False  # all know that the batch at hand is
        self._barrier = Barrier(group, patience)

    def meet(self, about: str = "", error: BaseException | None = None) -> None:
        """Wait until all ranks are at the same place, or one of them refuses (:meth:`Barrier.meet`)."""
        try:
            self._barrier.meet(f"{self.place}\n{about}", error)
        except OtherRankError:
            self.refused = True
            raise

    def gather_objects(self, value: Any, about: str = "") -> list[Any]:
        """Exchange something small that pickles, by rank. A barrier, and two collectives."""
        self.meet(about)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def scatter_objects(self, values: list[Any] | None) -> Any:
        """What the first rank has for this one of `values`, by rank. A barrier, and two collectives."""
        self.meet()
        found: list[Any] = [None]
        dist.scatter_object_list(found, values, src=self._first, group=self.group)
        return found[0]

    def share(self, table: Any, about: str = "") -> None:
        """Let the table of each rank that decides have the rows of all: one barrier, and two collectives.

        Where columns differ, one more barrier and two collectives say how. A rank without rows gets columns
        from one that has some, and a batch of no rows with its columns.

        Args:
            table: a :class:`~headrace.transforms.table.Table` of this rank's rows, changed in place.
            about: what must be the same on all ranks.

        Raises:
            BatchError: on all ranks alike, where ranks have other columns, or share an id and must not.
        """
        own = len(table.live)
        kinds = {key: (column.dtype, tuple(column.shape[1:])) for key, column in table.columns.items()}
        self.meet(about)
        # 1. How many rows each rank has. Who has the same columns as the others need not tell which.
        told = self._all_gather(torch.tensor([own, _hashed(repr(kinds))]))
        counts, hashes = told.T.tolist()
        if not any(counts):
            table.size = 0
            return
        if 0 in counts or len(set(hashes)) > 1:
            kinds = self._agree_on_columns(table, kinds, counts)
        # 2. The rows of each rank behind those of the one before it.
        table.ranks = self
        table.columns = self._gather({key: table.columns[key] for key in kinds}, counts)
        if self.decides:
            if self.one_decides:
                table.told = dict(table.columns)
                table.of_others = {rank: {} for rank in range(1, self.size)}
            rank = torch.arange(self.size).repeat_interleave(torch.tensor(counts))
            for key, name in self.id_keys.items():
                if key in table.columns:
                    table.columns[key] = tell_apart(table.columns[key], rank, self.shared_ids, name)
        else:  # of the others it has none
            counts = [own if rank == self.rank else 0 for rank in range(self.size)]
        table.starts = [0, *accumulate(counts)]
        table.begin(sum(counts), slice(table.starts[self.rank], table.starts[self.rank + 1]))

    def _agree_on_columns(self, table: Any, kinds: dict[Any, Any], counts: list[int]) -> dict[Any, Any]:
        """The dtype and shape in a row of each column that is exchanged, by key.

        Args:
            table: as :meth:`share` has it; without rows it gets columns of none.
            kinds: of the columns of this rank.
            counts: rows by rank.

        Raises:
            BatchError: on all ranks alike, where ranks have other columns.
        """
        own = counts[self.rank]
        described = (describe_columns(table.batch), device_of(table.batch).type) if own else None
        every = self.gather_objects((kinds, table.dtypes, described))
        known = {rank: each for rank, each in enumerate(every) if counts[rank]}  # ranks with rows
        # 1. Columns of few numbers a row on some ranks, and of other widths on others, are of tokens.
        in_batch = [{key for key, *_ in of_row[0]} for _, _, of_row in known.values()]
        for key in {key for theirs, *_ in known.values() for key in theirs}:
            shapes = {theirs.get(key, (None, None))[1] for theirs, *_ in known.values()}
            if len(shapes) > 1 and all(key in there for there in in_batch):
                for theirs, *_ in known.values():
                    theirs.pop(key, None)
        # 2. All others are the same on all of them. A rank without rows gets them from the first.
        kinds, dtypes, of_first = next(iter(known.values()))
        every_key = {key for theirs, *_ in known.values() for key in theirs}
        for rank, (theirs, *_) in known.items():
            if theirs != kinds:
                lacks = sorted(str(key) for key in every_key - theirs.keys())
                odd = sorted(str(key) for key in theirs if theirs[key] != kinds.get(key))
                found = f"lacks {listing(lacks)}" if lacks else f"has others in {listing(odd)}"
                raise BatchError(
                    f"ranks must have the same columns, of one dtype and shape; rank {rank} {found}"
                )
        if not own:
            table.columns = {
                key: torch.zeros(0, *shape, dtype=dtype) for key, (dtype, shape) in kinds.items()
            }
            table.dtypes = dict(dtypes)
            if table.batch is None or not len(table.batch):
                table.batch = without_rows(of_first[0], torch.device(of_first[1]))
        return kinds

    def gather_rows(self, values: Tensor, counts: list[int]) -> Tensor:
        """(B, ...) of the rows in this rank's batch → (ΣB, ...) of those in the batches of all.

        A barrier, and a collective.

        Args:
            values: of this rank.
            counts: B by rank.

        Raises:
            BatchError: one rank decides.
        """
        self.refuse_tokens()
        self.meet()
        return self._gather({"values": values}, counts)["values"]

    def refuse_tokens(self) -> None:
        """Refuse what a stage does on each rank, where one decides and the others wait for it.

        Raises:
            BatchError: one rank decides.
        """
        if self.one_decides:
            raise BatchError(
                "under decide_on='first_rank' that rank decides by the columns of a few numbers a row that "
                "were read with the batch; here it needs tokens, or a column that nobody has declared. Set "
                "pipeline.decide_on=each_rank"
            )

    def _gather(self, columns: Mapping[Any, Tensor], counts: list[int]) -> dict[Any, Tensor]:
        own = counts[self.rank]
        bits = [bits_of(flat_rows(column.detach())) for column in columns.values()]
        widths = [part.shape[1] for part in bits]
        padded = torch.zeros(max(counts), sum(widths), dtype=torch.int64)
        if own and bits:
            padded[:own] = torch.cat(bits, 1)
        parts = self._gather_first(padded) if self.one_decides else self._all_gather(padded)
        if not self.decides:
            return dict(columns)
        together = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        pairs = zip(together.split(widths, 1), columns.items(), strict=True)
        return {
            key: of_bits(part, column.dtype).reshape(len(part), *column.shape[1:])
            for part, (key, column) in pairs
        }

    def _all_gather(self, values: Tensor) -> Tensor:
        """(R, ...) values of the ranks, of one shape on all; through the device where the group needs it."""
        values = self._to_exchange(values)
        every = values.new_empty(self.size, *values.shape)
        dist.all_gather(list(every.unbind()), values, group=self.group)
        return every.cpu()

    def _gather_first(self, values: Tensor) -> Tensor:
        """The same on the first rank; on the others nothing, (0, ...)."""
        values = self._to_exchange(values)
        every = values.new_empty(self.size if self.decides else 0, *values.shape)
        dist.gather(values, list(every.unbind()) or None, dst=self._first, group=self.group)
        return every.cpu()

    def _to_exchange(self, values: Tensor) -> Tensor:
        return values.cuda() if dist.get_backend(self.group) == "nccl" else values

    def note(self, start: int) -> str:
        """What row numbers mean in messages."""
        note = f" (Rows are numbered over all ranks, from {start} on rank {self.rank}.)"
        if self.shared_ids == "different":
            note += " (Short ids are written behind the number of their rank.)"
        return note


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


_LOCKS: dict[int, Any] = {}


@contextmanager
def sharing(ranks: Ranks | None) -> Iterator[None]:
    """Share the batch of a block with other ranks: what one of them raises inside is raised on all.

    Raises:
        OtherRankError: another rank raised in its block, or does not come to the end of it.
    """
    if ranks is None:
        yield
        return
    lock = _LOCKS.setdefault(id(ranks.group), threading.RLock())
    lock.acquire()  # a group carries one batch at a time, whatever the threads
    try:
        yield
        ranks.place = "the end of a batch"
        ranks.meet()
    except Exception as err:
        if not ranks.refused:  # the others are told; what was told first is raised on all
            try:
                ranks.meet(error=err)
            except OtherRankError as first:
                if not str(first).startswith(f"rank {ranks.rank}:"):
                    raise
            except dist.DistError as gone:  # the store went with rank 0, which heard of a refusal and ended
                log.warning("rank %d cannot tell the others what it refuses: %s", ranks.rank, gone)
        raise
    finally:
        lock.release()


def tell_apart(ids: Tensor, rank: Tensor, shared: SharedIds | None, name: str) -> Tensor:
    """Ids under which rows of different ranks are one unit only where that is meant.

    Args:
        ids: (M,) int64.
        rank: (M,) int64.
        shared: as :class:`Ranks` has it.
        name: what the message calls the ids.

    Raises:
        BatchError: several ranks have an id, under ``raise``. One device read, none under ``same``.

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
        torn = numbered.min(rank) < numbered.max(rank)
        if bool(torn.any()) and (found := [n for n in ids[numbered.first[torn]].tolist() if n >= 0]):
            raise BatchError(
                f"{name} {listing(map(str, found))} on more than one rank: say shared_ids='same' if it is "
                "the same unit there, 'different' if each rank numbers its own"
            )
        return ids
    digits = 10 ** len(str(max(int(ids.amax()), 0)))
    fits = digits * (int(rank.amax()) + 1) < 2**62
    first = numbered.spread(numbered.first)
    apart = rank * digits + ids if fits else first * (rank.amax() + 1) + rank
    return torch.where(ids < 0, ids, apart)

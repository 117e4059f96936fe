"""What the ranks that share a batch tell one another about their rows."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.ids import first_row
from headrace.transforms.rows import Column, describe_columns, device_of, without_rows

from .meeting import Meetings, OtherRankError
from .process_group import SharedIds

log = logging.getLogger(__name__)


class Gathered(NamedTuple):
    """Columns of all ranks, and where this rank's rows are."""

    columns: list[Tensor]
    """(M, ...) each, rank after rank."""
    own: slice
    """This rank's rows among M."""


class Ranks:
    """The ranks of a process group, as one of them sees the others while a batch is with them.

    Args:
        group: of which this process is a rank.
        shared_ids: an id that several ranks have is the ``same`` rollout or group there, or ``different``
            ones, or must not be: ``raise``. None: nobody asks, each rank numbers its own.
        patience: seconds to wait for the others.
    """

    def __init__(
        self, group: dist.ProcessGroup, shared_ids: SharedIds | None = None, patience: float = 600.0
    ):
        self.group, self.shared_ids = group, shared_ids
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.place = "a batch"  # where this rank is, for messages
        self.refused = False  # all know that the batch at hand is
        self._meetings = Meetings(group, patience)

    def meet(self, about: str = "", error: BaseException | None = None) -> None:
        """Wait until all ranks are at the same place, or one of them refuses (:meth:`Meetings.meet`)."""
        try:
            self._meetings.meet(f"{self.place}\n{about}", error)
        except OtherRankError:
            self.refused = True
            raise

    def gather(self, columns: Mapping[str, Tensor], ids: Mapping[str, Tensor] | None = None) -> Gathered:
        """Exchange columns of as many rows as each rank has, also none. A meeting, and two collectives.

        Args:
            columns: (N, ...) numbers each, by name, the same on all ranks but for N, on the group's kind of
                device.
            ids: (N,) int64 each: ``rollouts``, ``groups``. Where each rank numbers its own, they come back
                as labels: the number of the rank and behind it the id; negative ones stay.

        Returns:
            `columns`, then `ids`.

        Raises:
            BatchError: several ranks have an id, and must not; on all of them. A device read.
        """
        named = {**columns, **(ids or {})}
        names, every = list(named), list(named.values())
        kinds = [f"{name} {column.dtype} {tuple(column.shape[1:])}" for name, column in named.items()]
        self.meet(f"exchanging {', '.join(kinds)}")
        bits = torch.cat([_as_bits(column) for column in every], 1)
        size = torch.tensor([len(bits)], device=bits.device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self.group)
        counts = torch.cat(sizes).tolist()
        padded = bits.new_zeros(max(counts), bits.shape[1])
        padded[: len(bits)] = bits
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        together = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        split = together.split([_width(column) for column in every], 1)
        found = [_from_bits(part, column) for part, column in zip(split, every, strict=True)]
        rank = torch.arange(self.size, device=bits.device).repeat_interleave(torch.cat(sizes))
        for place, name in list(enumerate(names))[len(columns) :]:
            found[place] = tell_apart(found[place], rank, self.shared_ids, f"{name.removesuffix('s')}_id")
        start = sum(counts[: self.rank])
        return Gathered(found, slice(start, start + counts[self.rank]))

    def gather_objects(self, value: Any) -> list[Any]:
        """Exchange something small that pickles, by rank. A meeting and a collective."""
        self.meet("exchanging objects")
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def admit(self, batch: TensorDictBase, about: str) -> TensorDictBase | None:
        """Meet at the door of a batch; a rank without rows gets the columns of another's.

        Args:
            batch: TensorDict ``[N]``, N ≥ 0.
            about: what is done with it, equal on all ranks.

        Returns:
            The batch; None where no rank has rows.
        """
        self.meet(about)
        found = self._columns_of_any(batch)
        if found is None:
            return None
        return batch if batch.shape.numel() else without_rows(*found)

    def share_columns(self, batch: TensorDictBase) -> TensorDictBase:
        """Let a rank without rows have the columns that a stage wrote where there were some."""
        found = self._columns_of_any(batch)
        return batch if found is None or len(batch) else without_rows(*found).update(batch)

    def _columns_of_any(self, batch: TensorDictBase) -> tuple[list[Column], torch.device] | None:
        """The columns of the first rank that has rows, and the kind of device they are on; None: none has."""
        own = (describe_columns(batch), device_of(batch).type) if batch.shape.numel() else None
        found = next((each for each in self.gather_objects(own) if each is not None), None)
        return None if found is None else (found[0], torch.device(found[1]))


_LOCKS: dict[int, Any] = {}
_PRESENT: ContextVar[Ranks | None] = ContextVar("headrace_ranks", default=None)


def present_ranks() -> Ranks | None:
    """The ranks that share the batch at hand; None where this process has the whole of it."""
    return _PRESENT.get()


@contextmanager
def sharing(ranks: Ranks | None) -> Iterator[None]:
    """Share the batch of a block with other ranks: what one of them raises inside is raised on all.

    Raises:
        OtherRankError: another rank raised in its block, or does not come to the end of it.
    """
    if ranks is None:
        yield
        return
    token = _PRESENT.set(ranks)
    lock = _LOCKS.setdefault(id(ranks.group), threading.RLock())
    lock.acquire()  # a group carries one batch at a time, whatever the threads
    try:
        yield
        ranks.place = "the end of a batch"
        ranks.meet()
    except Exception as err:
        if not ranks.refused:
            _tell(ranks, err)
        raise
    finally:
        lock.release()
        _PRESENT.reset(token)


def _tell(ranks: Ranks, error: Exception) -> None:
    """Tell the others; what was told first is raised on all."""
    try:
        ranks.meet(error=error)
    except OtherRankError as err:
        if not str(err).startswith(f"rank {ranks.rank}:"):
            raise
    except dist.DistError as gone:  # the store went with rank 0, which heard of a refusal before and ended
        log.warning("rank %d cannot tell the others what it refuses: %s", ranks.rank, gone)


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
    first = first_row(ids)
    if shared == "raise":
        twice = (rank.index_select(0, first) != rank) & (ids >= 0)
        if found := ids[twice].unique().tolist():
            raise BatchError(
                f"{name} {listing(map(str, found))} on more than one rank: say shared_ids='same' if it is "
                "the same unit there, 'different' if each rank numbers its own"
            )
        return ids
    digits = 10 ** len(str(max(int(ids.amax()), 0)))
    fits = digits * (int(rank.amax()) + 1) < 2**62
    apart = rank * digits + ids if fits else first * (rank.amax() + 1) + rank
    return torch.where(ids < 0, ids, apart)


# -- columns as bits ------------------------------------------------------------------------------------


def _width(column: Tensor) -> int:
    return math.prod(column.shape[1:])


def _as_bits(column: Tensor) -> Tensor:
    """(N, K) int64: floats by the bits of their float64."""
    column = column.detach()
    number = column.double().view(torch.int64) if column.is_floating_point() else column.long()
    return number.reshape(len(column), _width(column))


def _from_bits(bits: Tensor, like: Tensor) -> Tensor:
    number = bits.contiguous().view(torch.float64) if like.is_floating_point() else bits
    return number.to(like.dtype).reshape(len(bits), *like.shape[1:])

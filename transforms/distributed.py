"""What the ranks of a process group say to one another about their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import BatchError, listing
from .options import at_least

SharedIds = Literal["raise", "same", "different"]


class Gathered(NamedTuple):
    """Columns of all ranks, and where this rank's are."""

    columns: Tensor
    """(K, M) int64, rank after rank."""
    rank: Tensor
    """(M,) int64, whose row."""
    own: slice
    """This rank's rows among M."""


def resolve_group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    """A process group, also by the name ``world``, as YAML has it.

    Raises:
        ValueError: another name, or torch.distributed is not initialised.
    """
    if group is None or not isinstance(group, str):
        return group
    if group != "world":
        raise ValueError(f"process_group must be a process group, 'world' or None; got {group!r}")
    if not dist.is_initialized():
        raise ValueError(
            "process_group='world' needs torch.distributed: call init_process_group before the first batch"
        )
    return dist.group.WORLD


def gather_columns(columns: Tensor, group: dist.ProcessGroup) -> Gathered:
    """Exchange columns of as many rows as each rank has, also none. Two collectives, one device read.

    Args:
        columns: (K, N) int64, on the group's kind of device.
        group: all its ranks call this.
    """
    ranks, this = dist.get_world_size(group), dist.get_rank(group)
    size = torch.tensor([columns.shape[1]], device=columns.device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size, group=group)
    counts = torch.cat(sizes).tolist()
    padded = columns.new_zeros(columns.shape[0], max(counts))
    padded[:, : columns.shape[1]] = columns
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    together = torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1)
    rank = torch.arange(ranks, device=columns.device).repeat_interleave(torch.cat(sizes))
    start = sum(counts[:this])
    return Gathered(together, rank, slice(start, start + counts[this]))


def tell_apart(ids: Tensor, rank: Tensor, shared: SharedIds, name: str) -> Tensor:
    """Ids under which rows of different ranks are one unit only where that is meant.

    Args:
        ids: (M,) int64.
        rank: (M,) int64.
        shared: an id that several ranks have is the ``same`` unit, ``different`` ones, or must not be.
        name: what the message calls the ids.

    Raises:
        BatchError: several ranks have an id, under ``raise``. A few device reads.
    """
    if shared == "same":
        return ids
    pairs, number = torch.unique(torch.stack([ids, rank], 1), dim=0, return_inverse=True)
    if shared == "raise":
        found, times = torch.unique_consecutive(pairs[:, 0], return_counts=True)
        twice = found[times > 1].tolist()
        if twice:
            raise BatchError(
                f"{name} {listing(map(str, twice))} on more than one rank: say shared_ids='same' if it is "
                "the same unit there, 'different' if each rank numbers its own"
            )
        return ids
    return number


class OtherRankError(BatchError):
    """What one rank refused, raised on all of them."""


def raise_together(error: BatchError | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank what any of them has to refuse, so that none waits for it. One collective.

    Raises:
        OtherRankError: some rank had an error.
    """
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if error is None else str(error), group=group)
    wrong = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if wrong:
        raise OtherRankError("; ".join(wrong)) from error


def agree_on_counts(counts: list[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each count over the ranks. One collective.

    Raises:
        OtherRankError: on every rank alike, where the ranks have not as many counts.
    """
    by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, counts, group=group)
    lengths = [len(of_rank) for of_rank in by_rank]
    if len(set(lengths)) > 1:
        raise OtherRankError(
            f"every rank takes as many optimiser steps; by rank there are {lengths} minibatches: give all "
            "ranks as many units, by minibatches=K rather than minibatch_size, and none of them an empty "
            "batch"
        )
    return [max(column) for column in zip(*by_rank, strict=True)]


@contextmanager
def refuse_together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """What a block refuses on one rank is raised on all, at its end. One collective; none without a group.

    Raises:
        OtherRankError: some rank's block raised a BatchError.
    """
    try:
        yield
    except OtherRankError:
        raise
    except BatchError as err:
        if group is not None:
            raise_together(err, group)
        raise
    if group is not None:
        raise_together(None, group)


def check_one_way(ranks: int, process_group: object) -> None:
    """Check that rows are spread over ranks in one way.

    Raises:
        ValueError: each rank would hold the whole batch, and rows of its own.
    """
    at_least("ranks", ranks, 1)
    if ranks > 1 and process_group is not None:
        raise ValueError(
            "give ranks where each rank holds the whole batch, process_group where each holds rows of its "
            f"own; got {ranks=} and {process_group=}"
        )

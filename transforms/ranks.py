"""What the ranks of a process group tell one another about their rows."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .base import at_least
from .errors import BatchError, listing

SharedIds = Literal["raise", "same", "different"]
SHARED_IDS = ("raise", "same", "different")


class Gathered(NamedTuple):
    """Columns of all ranks, and where one's own are."""

    columns: Tensor
    """(K, M) int64, rank after rank."""
    rank: Tensor
    """(M,) int64, whose row."""
    mine: slice
    """One's own rows among M."""


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
    world, me = dist.get_world_size(group), dist.get_rank(group)
    mine = torch.tensor([columns.shape[1]], device=columns.device)
    sizes = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(sizes, mine, group=group)
    counts = torch.cat(sizes).tolist()
    padded = columns.new_zeros(columns.shape[0], max(counts))
    padded[:, : columns.shape[1]] = columns
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    together = torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1)
    rank = torch.arange(world, device=columns.device).repeat_interleave(torch.cat(sizes))
    start = sum(counts[:me])
    return Gathered(together, rank, slice(start, start + counts[me]))


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


class ToldError(BatchError):
    """What one rank refused, raised on all of them."""


def raise_together(error: BatchError | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank what any of them has to refuse, lest the others wait for it. One collective.

    Raises:
        ToldError: some rank had an error.
    """
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, None if error is None else str(error), group=group)
    wrong = [f"rank {rank}: {message}" for rank, message in enumerate(told) if message is not None]
    if wrong:
        raise ToldError("; ".join(wrong)) from error


def agree_on_counts(counts: list[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each count over the ranks. One collective.

    Raises:
        ToldError: on every rank alike, where the ranks have not as many counts.
    """
    everyones: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyones, counts, group=group)
    lengths = [len(theirs) for theirs in everyones]
    if len(set(lengths)) > 1:
        raise ToldError(
            f"every rank takes as many optimiser steps; by rank there are {lengths} minibatches: give all "
            "ranks as many units, by minibatches=K rather than minibatch_size, and none of them an empty "
            "batch"
        )
    return [max(column) for column in zip(*everyones, strict=True)]


def check_ranks(
    ranks: int, rank: int | None, process_group: object, max_tokens: int | None, remainder: str
) -> None:
    """Check how a stage's rows are spread.

    Raises:
        ValueError: a rank that is none, both ways to spread at once, or a budget that needs padding.
    """
    at_least("rank", rank, 0)
    if rank is not None and rank >= ranks:
        raise ValueError(f"rank must be below ranks; got {rank=} and {ranks=}")
    if ranks > 1 and process_group is not None:
        raise ValueError(
            "give ranks where each rank holds the whole batch, process_group where each holds rows of its "
            f"own; got {ranks=} and {process_group=}"
        )
    if max_tokens is not None and (ranks > 1 or process_group is not None) and remainder != "pad":
        raise ValueError(
            "with max_tokens a rank may have fewer rows than others have micro-batches, and must fill them "
            f"up: set remainder='pad'; got {remainder=}"
        )

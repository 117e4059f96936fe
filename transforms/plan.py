"""Which row is trained in which forward pass of which optimiser step on which rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import has_key, key_names
from .columns import IN_LOSS, MICROBATCH, MINIBATCH, PADDING, RANK, ROW
from .deal import deal
from .errors import BatchError
from .rows import device_of, silence_rows, take_rows
from .split import Cut


class Plan(NamedTuple):
    """Rows in training order, by minibatch, rank and micro-batch. On the CPU."""

    order: Tensor
    """(M,) int64, row numbers; a padding row repeats the number of a row of its minibatch."""
    padding: Tensor
    """(M,) bool."""
    sizes: list[list[list[int]]]
    """Rows by minibatch, rank and micro-batch; they add up to M."""
    left: Tensor
    """(·,) int64, rows in no minibatch."""

    def numbers(self) -> Tensor:
        """(3, M) int64: the minibatch, rank and micro-batch of each row in the order."""
        places = [
            (k, r, m)
            for k, ranks in enumerate(self.sizes)
            for r, mine in enumerate(ranks)
            for m in range(len(mine))
        ]
        counts = [size for ranks in self.sizes for mine in ranks for size in mine]
        table = torch.tensor(places, dtype=torch.int64).view(-1, 3)
        return table.repeat_interleave(torch.tensor(counts, dtype=torch.int64), dim=0).T

    def spans(self, rank: int | None) -> list[slice]:
        """Where each minibatch lies in the order, or the part of one rank in it."""
        held = [[sum(mine) for mine in ranks] for ranks in self.sizes]
        ends = list(accumulate(size for ranks in held for size in ranks))
        spans, done = [], 0
        for ranks in held:
            mine = range(len(ranks)) if rank is None else [rank]
            stop = ends[done + mine[-1]]
            spans.append(slice(stop - sum(ranks[r] for r in mine), stop))
            done += len(ranks)
        return spans


def make_plan(
    cut: Cut,
    lengths: Tensor,
    *,
    ranks: int,
    pad: bool,
    agree: Callable[[list[int]], list[int]] | None = None,
    **how: Any,
) -> Plan:
    """Deal the rows of each minibatch to ranks and micro-batches (:func:`deal`).

    Args:
        cut: rows by minibatch.
        lengths: (N,) int64 on the CPU, tokens a row.
        ranks: ≥ 1.
        pad: fill up what is short, so that no micro-batch is empty and, cut by count or size, all have as
            many rows.
        agree: from the number of micro-batches of each minibatch to the numbers that there shall be, no
            smaller.
        how: further options of :func:`deal`.

    Raises:
        BatchError: a minibatch has fewer rows than micro-batches that must not be empty; not under `pad`.
    """
    minibatches = list(cut.order.split(cut.sizes)) if cut.sizes else []
    dealt = [_deal_rows(rows, lengths, ranks, pad, how) for rows in minibatches]
    if agree is not None:
        agreed = agree([len(each[0]) for each in dealt])
        dealt = [
            each
            if len(each[0]) == count
            else _deal_rows(rows, lengths, ranks, pad, how | {"multiple_of": count})
            for rows, each, count in zip(minibatches, dealt, agreed, strict=True)
        ]
    full = 1
    if pad and how.get("max_tokens") is None:
        full = max((len(part) for each in dealt for mine in each for part in mine), default=0)
    order, padding, sizes = [], [], []
    for number, (rows, each) in enumerate(zip(minibatches, dealt, strict=True)):
        parts = [part for mine in each for part in mine]
        if not pad and any(len(part) == 0 for part in parts):
            raise BatchError(
                f"minibatch {number} has {len(rows)} rows for {ranks} ranks × {len(each[0])} micro-batches, "
                "and none may be empty: set remainder='pad', or make minibatches larger"
            )
        for part in parts:
            short = max(full - len(part), 0) if pad else 0
            order.append(torch.cat([rows[part], rows[:1].expand(short)]))
            padding.append(torch.arange(len(part) + short) >= len(part))
        sizes.append([[max(len(part), full) if pad else len(part) for part in mine] for mine in each])
    nothing = cut.order[:0]
    return Plan(torch.cat([nothing, *order]), torch.cat([nothing.bool(), *padding]), sizes, cut.left)


def _deal_rows(
    rows: Tensor, lengths: Tensor, ranks: int, pad: bool, how: dict[str, Any]
) -> list[list[Tensor]]:
    if not pad and how.get("microbatches") is not None:  # none is empty
        how = how | {"microbatches": max(min(how["microbatches"], len(rows) // ranks), 1)}
    return deal(lengths[rows], ranks=ranks, **how)


def mark(batch: TensorDictBase, plan: Plan) -> TensorDictBase:
    """Write, in row order, where each row is trained; -1 where it is not. Moves no row.

    Returns:
        A shallow copy with the columns ``("headrace", "minibatch")``, ``("headrace", "microbatch")`` and,
        for more than one rank, ``("headrace", "rank")``.
    """
    table = torch.full((3, len(batch)), -1, dtype=torch.int64)
    real = ~plan.padding
    table[:, plan.order[real]] = plan.numbers()[:, real]
    table = table.to(device_of(batch))
    marked = batch.clone(recurse=False).set(MINIBATCH, table[0]).set(MICROBATCH, table[2])
    return marked.set(RANK, table[1]) if any(len(ranks) > 1 for ranks in plan.sizes) else marked


class Silence(NamedTuple):
    """The columns by which a row is kept out of the loss."""

    mask: NestedKey
    """(N, T) bool, becomes False."""
    log_prob: NestedKey | None
    """(N, T) float, becomes NaN."""
    weight: NestedKey
    """(N,) float, becomes 0."""


def take_span(batch: TensorDictBase, plan: Plan, span: slice | Tensor, silence: Silence) -> TensorDictBase:
    """Gather some of the order; views where the rows are in order already.

    Args:
        batch: TensorDict ``[N]``, marked.
        plan: of it.
        span: places in the order.
        silence: columns that keep padding out of the loss.

    Raises:
        BatchError: there is padding, and no column to keep it out.
    """
    rows, padding = plan.order[span], plan.padding[span]
    device = device_of(batch)
    if len(rows) and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows))):
        taken = batch[int(rows[0]) : int(rows[0]) + len(rows)].clone(recurse=False)
    else:
        taken = take_rows(batch, rows.to(device))
    if not bool(plan.padding.any()) or not len(rows):
        return taken
    places = plan.numbers()[:, span].to(device)
    taken.set(MINIBATCH, places[0]).set(MICROBATCH, places[2])
    if has_key(taken, RANK):
        taken.set(RANK, places[1])
    quiet = padding.to(device)
    for key, value in ((ROW, -1), (silence.weight, 0), (IN_LOSS, False)):
        if has_key(taken, key):
            taken.set(key, taken.get(key).masked_fill(quiet, value))
    kept_out = [key for key in (silence.mask, silence.log_prob) if key is not None and has_key(taken, key)]
    if not kept_out:
        raise BatchError(
            f"padding rows are kept out of the loss by {silence.mask!r} (loss_mask_key) or "
            f"{silence.log_prob!r} (log_prob_key), and the batch has neither: it has {key_names(batch)}"
        )
    for key in kept_out:
        silence_rows(taken, key, quiet)
    return taken.set(PADDING, quiet)

"""Which row is trained in which forward pass of which optimiser step on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import has_key, key_names
from .columns import IN_LOSS, MICROBATCH, MINIBATCH, PADDING, RANK, ROW
from .deal import deal
from .errors import BatchError
from .rows import check_mask, device_of, silence_rows, take_rows
from .shallow import shallow_copy
from .split import Cut


@dataclass(frozen=True)
class Plan:
    """Rows in training order, by minibatch, rank and micro-batch. On the CPU."""

    order: Tensor
    """(M,) int64, row numbers; a padding row repeats the number of a row of its minibatch."""
    padding: Tensor
    """(M,) bool."""
    sizes: list[list[list[int]]]
    """Rows by minibatch, rank and micro-batch; they add up to M."""
    left: Tensor
    """(·,) int64, rows in no minibatch."""

    @cached_property
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


Dealt = list[list[list[Tensor]]]
"""By minibatch, rank and micro-batch, the positions of its rows in the minibatch."""


def deal_minibatches(
    cut: Cut, lengths: Tensor, *, ranks: int, pad: bool, multiples: Sequence[int] | None = None, **how: Any
) -> Dealt:
    """Deal the rows of each minibatch to ranks and micro-batches (:func:`deal`).

    Args:
        cut: rows by minibatch.
        lengths: (N,) int64 on the CPU, tokens a row.
        ranks: ≥ 1.
        pad: micro-batches may be empty, since they will be filled up; else there are as many as rows allow.
        multiples: by minibatch, what the number of micro-batches is to be a multiple of.
        how: further options of :func:`deal`.
    """
    dealt = []
    for k, rows in enumerate(cut.order.split(cut.sizes) if cut.sizes else ()):
        options = dict(how)
        if not pad and options.get("microbatches") is not None:  # none is empty
            options["microbatches"] = max(min(options["microbatches"], len(rows) // ranks), 1)
        multiple = 1 if multiples is None else multiples[k]
        dealt.append(deal(lengths[rows], ranks=ranks, multiple_of=multiple, **options))
    return dealt


def make_plan(cut: Cut, dealt: Dealt, *, ranks: int, pad: bool, level: bool) -> Plan:
    """Put the dealt rows in order.

    Args:
        cut: rows by minibatch.
        dealt: of it.
        ranks: ≥ 1.
        pad: fill up what is short, so that no micro-batch is empty.
        level: under `pad`, until all micro-batches have as many rows.

    Raises:
        BatchError: a minibatch has fewer rows than micro-batches that must not be empty; not under `pad`.
    """
    minibatches = cut.order.split(cut.sizes) if cut.sizes else ()
    full = 1
    if pad and level:
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


def mark(batch: TensorDictBase, plan: Plan) -> TensorDictBase:
    """Write, in row order, where each row is trained; -1 where it is not. Moves no row.

    Returns:
        A shallow copy with the columns ``("headrace", "minibatch")``, ``("headrace", "microbatch")`` and,
        for more than one rank, ``("headrace", "rank")``.
    """
    table = torch.full((3, len(batch)), -1, dtype=torch.int64)
    real = ~plan.padding
    table[:, plan.order[real]] = plan.numbers[:, real]
    table = table.to(device_of(batch))
    marked = shallow_copy(batch)
    for key in (RANK, PADDING):
        if has_key(marked, key):
            marked.pop(key)
    marked.set(MINIBATCH, table[0]).set(MICROBATCH, table[2])
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
        taken = shallow_copy(batch[int(rows[0]) : int(rows[0]) + len(rows)])
    else:
        taken = take_rows(batch, rows.to(device))
    if not bool(plan.padding.any()) or not len(rows):
        return taken
    places = plan.numbers[:, span].to(device)
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
    if silence.mask in kept_out:
        check_mask(taken, silence.mask)
    for key in kept_out:
        silence_rows(taken, key, quiet)
    return taken.set(PADDING, quiet)


def measure(plan: Plan, lengths: Tensor | None, max_tokens: int | None) -> dict[str, float]:
    """What a stage tells of its plan: how many parts, how level, how full.

    Args:
        plan: of a batch.
        lengths: (N,) int64 on the CPU, tokens a row; None: not known.
        max_tokens: of a micro-batch.
    """
    counts = [len(ranks[0]) for ranks in plan.sizes]
    found = {
        "minibatches": float(len(plan.sizes)),
        "microbatches": float(sum(counts)),
        "padded": float(plan.padding.sum()),
    }
    if lengths is not None and counts:
        k, r, m = plan.numbers
        loads = torch.zeros(len(counts), len(plan.sizes[0]), max(counts), dtype=torch.float64)
        loads.index_put_((k, r, m), (lengths[plan.order] * ~plan.padding).double(), accumulate=True)
        by_rank = loads.sum(-1)
        found["rank_imbalance"] = float((by_rank.amax(-1) / by_rank.mean(-1).clamp_min(1)).max() - 1)
        found["max_tokens"] = float(loads.max())
        if max_tokens is not None:
            found["oversized"] = float((lengths > max_tokens).sum())
    return found

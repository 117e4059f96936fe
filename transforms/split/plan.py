"""Which row is trained in which forward pass of which optimiser step on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.transforms.errors import BatchError

from .microbatches import deal
from .minibatches import Cut
from .trees import Forest


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
            for r, passes in enumerate(ranks)
            for m in range(len(passes))
        ]
        counts = [size for ranks in self.sizes for passes in ranks for size in passes]
        table = torch.tensor(places, dtype=torch.int64).view(-1, 3)
        return table.repeat_interleave(torch.tensor(counts, dtype=torch.int64), dim=0).T

    @cached_property
    def is_padded(self) -> bool:
        """Whether any row is padding."""
        return bool(self.padding.any())

    def is_in_order(self, spans: Sequence[slice]) -> bool:
        """Whether the rows of each span follow one another in the batch."""
        follows = self.order[1:] == self.order[:-1] + 1
        return all(
            bool(follows[span.start : span.stop - 1].all()) for span in spans if span.stop > span.start
        )

    def passes(self, rank: int | None) -> list[list[int]]:
        """Rows of each micro-batch, by minibatch; of all ranks, or of one."""
        chosen = slice(None) if rank is None else slice(rank, rank + 1)
        return [[size for passes in ranks[chosen] for size in passes] for ranks in self.sizes]

    def spans(self, rank: int | None) -> list[slice]:
        """Where each minibatch lies in the order, or the part of one rank in it."""
        held = [[sum(passes) for passes in ranks] for ranks in self.sizes]
        ends = list(accumulate(size for ranks in held for size in ranks))
        spans, done = [], 0
        for ranks in held:
            wanted = range(len(ranks)) if rank is None else [rank]
            stop = ends[done + wanted[-1]]
            spans.append(slice(stop - sum(ranks[r] for r in wanted), stop))
            done += len(ranks)
        return spans


Dealt = list[list[list[Tensor]]]
"""By minibatch, rank and micro-batch, the positions of its rows in the minibatch."""


def deal_minibatches(
    cut: Cut,
    lengths: Tensor,
    *,
    ranks: int,
    pad: bool,
    multiples: Sequence[int],
    forest: Forest | None = None,
    **how: Any,
) -> Dealt:
    """Deal the rows of each minibatch to ranks and micro-batches (:func:`deal`).

    Args:
        cut: rows by minibatch.
        lengths: (N,) int64 on the CPU, tokens a row.
        ranks: ≥ 1.
        pad: micro-batches may be empty, since they will be filled up; else there are as many as rows allow.
        multiples: by minibatch, what the number of micro-batches is to be a multiple of.
        forest: of the rows, where those of a tree stay together; None: each goes by itself.
        how: further options of :func:`deal`.
    """
    dealt, done = [], 0
    ordered = lengths.index_select(0, cut.order)
    for k, own in enumerate(ordered.split(cut.sizes) if cut.sizes else ()):
        options, units = dict(how), len(own)
        if forest is not None:
            rows = cut.order[done : done + len(own)]
            options["tree"], options["shared"] = forest.pieces(rows, how.get("max_tokens"))
            units = len(options["tree"].unique())
        done += len(own)
        if not pad and options.get("microbatches") is not None:  # none is empty
            options["microbatches"] = max(min(options["microbatches"], units // ranks), 1)
        dealt.append(deal(own, ranks=ranks, multiple_of=multiples[k], **options))
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
        full = max((len(microbatch) for each in dealt for passes in each for microbatch in passes), default=0)
    order, padding, sizes = [], [], []
    for number, (rows, each) in enumerate(zip(minibatches, dealt, strict=True)):
        microbatches = [microbatch for passes in each for microbatch in passes]
        if not pad and len(rows) and any(len(microbatch) == 0 for microbatch in microbatches):
            raise BatchError(
                f"minibatch {number} has {len(rows)} rows for {ranks} ranks × {len(each[0])} micro-batches, "
                "and none may be empty: set remainder='pad', or make minibatches larger"
            )
        some = rows[:1] if len(rows) else cut.order[:1]  # a rank may have no row for this minibatch
        for microbatch in microbatches:
            whole = len(microbatch) == len(rows)  # rows keep their order
            short = max(full - len(microbatch), 0) if pad and len(some) else 0
            order.append(rows if whole else rows.index_select(0, microbatch))
            order += [some.expand(short)] if short else []
            padding += [(False, len(microbatch)), (True, short)]
        filled = full if pad and len(cut.order) else 0
        sizes.append([[max(len(microbatch), filled) for microbatch in passes] for passes in each])
    is_padding, runs = (torch.tensor(column) for column in zip(*(padding or [(False, 0)]), strict=True))
    padded = is_padding.repeat_interleave(runs)
    return Plan(torch.cat([cut.order[:0], *order]), padded, sizes, cut.left)


def measure(
    plan: Plan, lengths: Tensor | None, max_tokens: int | None, forest: Forest | None = None
) -> dict[str, float]:
    """How many minibatches and micro-batches a plan has, how level they are, and how full.

    Args:
        plan: of a batch.
        lengths: (N,) int64 on the CPU, tokens a row; None: not known.
        max_tokens: of a micro-batch.
        forest: of the rows, where tokens that those of a micro-batch share cost once.
    """
    counts = [len(ranks[0]) for ranks in plan.sizes]
    measured = {
        "minibatches": float(len(plan.sizes)),
        "microbatches": float(sum(counts)),
        "padded": float(plan.padding.sum()),
    }
    if lengths is not None and counts:
        k, r, m = plan.numbers
        loads = torch.zeros(len(counts), len(plan.sizes[0]), max(counts), dtype=torch.float64)
        tokens = lengths[plan.order]
        if forest is not None:
            shared = forest.shared(plan.order, (k * len(plan.sizes[0]) + r) * max(counts) + m)
            tokens = tokens - shared
            measured["shared_tokens"] = float((shared * ~plan.padding).sum())
        loads.index_put_((k, r, m), (tokens * ~plan.padding).double(), accumulate=True)
        by_rank = loads.sum(-1)
        measured["rank_imbalance"] = float((by_rank.amax(-1) / by_rank.mean(-1).clamp_min(1)).max() - 1)
        measured["max_tokens"] = float(loads.max())
        if max_tokens is not None:
            measured["oversized"] = float((lengths > max_tokens).sum())
    return measured

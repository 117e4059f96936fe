"""Orders are drawn and cut: for each pass over a batch, a plan of which row is trained where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.distributed import Ranks, population_of, present_ranks
from headrace.transforms.errors import BatchError, listing
from headrace.transforms.ids import first_row
from headrace.transforms.rows import device_of, take_rows
from headrace.transforms.schema import ROW, has_key

from .checkpoint import SplitState, with_carried
from .cut_options import CutOptions
from .fit import fit_budget
from .gather import mark
from .minibatches import Cut, Remainder, shuffle_split
from .placed import Placed, place
from .plan import Dealt, Plan, deal_minibatches, make_plan, measure
from .progress import Progress
from .seeds import stream_seed
from .trees import Forest


class Draw(NamedTuple):
    """The orders of one batch, and what follows from them; nothing is remembered before it is accepted."""

    batch: TensorDictBase
    """TensorDict ``[N + C]``: the rows that came in, and behind them those carried from earlier batches."""
    plans: list[Plan]
    """One for each pass over the rows."""
    placed: list[Placed]
    """The same, where the batch lies."""
    verdict: Tensor
    """(N + C,) int8."""
    measured: dict[str, float]
    state: SplitState
    """After the batch."""
    progress: Progress

    def marked(self) -> list[TensorDictBase]:
        """For each plan the batch, with columns that say where its rows are trained (:func:`mark`)."""
        return [mark(self.batch, *each) for each in zip(self.plans, self.placed, strict=True)]


def draw_plans(
    ids: Tensor | None,
    lengths: Tensor,
    cut: CutOptions,
    *,
    calls: int,
    epochs: int,
    forest: Forest | None = None,
) -> list[Plan]:
    """Draw an order of the rows for each pass, and cut it.

    Under ``carry`` the first order says who is carried, and the others are orders of the rest. Ranks that
    share the batch take as many optimiser steps as one another, each of as many micro-batches.

    Args:
        ids: (N,) int64 on the CPU, which rows are one unit; None: each is one.
        lengths: (N,) int64 on the CPU, tokens a row.
        cut: how.
        calls: orders drawn before.
        epochs: passes, ≥ 1.
        forest: of the rows, where those of a tree stay in one micro-batch.

    Raises:
        BatchError: as :func:`shuffle_split` and :func:`make_plan`; ranks that have not as many steps.
    """
    if cut.oversized == "raise" and cut.max_tokens is not None:
        _check_oversized(lengths, cut.max_tokens)
    orders = _draw_orders(ids, len(lengths), cut, calls, epochs)
    if cut.max_tokens is not None and cut.remainder == "drop":
        orders = fit_budget(orders, ids, lengths, cut)
    dealt = [_deal(order, lengths, cut, forest) for order in orders]
    if (ranks := present_ranks()) is not None:
        counts = agree_on_counts([[len(of_rank[0]) for of_rank in each] for each in dealt], cut, ranks)
        orders = [_with_empty(order, len(most)) for order, most in zip(orders, counts, strict=True)]
        dealt = [_deal(order, lengths, cut, forest, most) for order, most in zip(orders, counts, strict=True)]
    pad, level = cut.remainder == "pad", cut.max_tokens is None
    return [
        make_plan(order, each, ranks=cut.ranks, pad=pad, level=level)
        for order, each in zip(orders, dealt, strict=True)
    ]


def agree_on_counts(counts: list[list[int]], cut: CutOptions, ranks: Ranks) -> list[list[int]]:
    """By pass and optimiser step, the largest number of micro-batches that a rank has.

    A rank that has no rows for a step takes part in it without any: one that has no rows at all, or where
    the number of steps is given, fewer units than that.

    Args:
        counts: by pass and optimiser step, the number of this rank's micro-batches.
        cut: how.
        ranks: that share the batch.

    Raises:
        BatchError: on every rank alike, where ranks have rows for other numbers of steps.
    """
    by_rank = ranks.gather_objects(counts)
    steps = [len(of_rank[0]) for of_rank in by_rank]
    if cut.minibatches is None and len(set(steps) - {0}) > 1:
        raise BatchError(
            f"every rank takes as many optimiser steps; by rank there are {steps} minibatches: give all "
            "ranks as many units, or set minibatches=K in place of minibatch_size"
        )
    passes = zip(*by_rank, strict=True)
    return [[max(step) for step in zip_longest(*of_ranks, fillvalue=0)] for of_ranks in passes]


def with_those_carried(
    batch: TensorDictBase, state: SplitState, key: NestedKey | None, unit: str, cut: CutOptions
) -> TensorDictBase:
    """A batch, and behind it the rows carried from earlier ones, known again by the ids of `unit`."""
    came = ids_that_came(batch, key, unit, cut)
    return batch if state.carried is None else with_carried(batch, state.carried, key, came, unit)


def ids_that_came(batch: TensorDictBase, key: NestedKey | None, unit: str, cut: CutOptions) -> Tensor | None:
    """(M,) int64, the ids of a batch by which carried rows are known again, on all ranks that share it.

    None where the batch has none, or nothing is carried.
    """
    if cut.remainder != "carry" or not has_key(batch, key):
        return None
    own = batch.get(key).reshape(-1)
    return population_of(batch, every=True).take({}, {f"{unit}s": own})[f"{unit}s"]


def meet_to_draw(ids: Tensor | None, unit: str, cut: CutOptions, state: SplitState, taken: int) -> None:
    """Let ranks that share the batch draw only where each can keep its units together, from the same state.

    Args:
        ids: (N,) int64, the units of this rank's rows; None: each is one.
        unit: what they are.
        cut: how.
        state: before the batch.
        taken: minibatches of it that were taken before an interruption.

    Raises:
        BatchError: on every rank alike, units with rows on several ranks: each rank draws minibatches of its
            own. With the ids.
    """
    if (ranks := present_ranks()) is None:
        return
    ranks.meet(f"{state.calls} draws before, and {taken} minibatches taken")
    if ids is None or cut.minibatches == 1 or ranks.shared_ids in (None, "different"):
        return
    rank, every = ranks.gather({"rank": torch.full_like(ids, ranks.rank)}, {f"{unit}s": ids}).columns
    torn = every[rank.index_select(0, first_row(every)) != rank].unique().tolist()
    if torn:
        raise BatchError(
            f"{unit}s {listing(map(str, torn))} have rows on more than one rank, and each rank draws its own "
            "minibatches: they would be in several optimiser steps. Keep the rows of a "
            f"{unit} on one rank, or set split.minibatches=1"
        )


def _with_empty(order: Cut, steps: int) -> Cut:
    """An order with empty minibatches behind it, for the steps that only other ranks have rows for."""
    return order._replace(sizes=order.sizes + [0] * (steps - len(order.sizes)))


def conclude(
    batch: TensorDictBase,
    plans: list[Plan],
    lengths: Tensor,
    cut: CutOptions,
    progress: Progress,
    forest: Forest | None = None,
) -> Draw:
    """What follows from the plans of a batch: who is left or carried, its numbers, and the state after it."""
    progress.minibatches = sum(len(plan.sizes) for plan in plans)
    before = progress.before
    verdict = judge_rows(plans, len(batch), cut.remainder)
    device, carried = device_of(batch), (verdict == 2).nonzero().flatten()
    kept = take_rows(batch, carried.to(device), on_cpu=carried).exclude(ROW) if len(carried) else None
    placed, verdict_there = place(plans, verdict, device)
    measured = measure(plans[-1], lengths if cut.measures else None, cut.max_tokens, forest)
    measured["left"] = float((verdict > 0).sum())
    if cut.remainder == "carry":
        measured["carried_in"] = float(len(batch) - progress.known_by.rows)
    after = SplitState(before.calls + len(plans), kept)
    return Draw(batch, plans, placed, verdict_there, measured, after, progress)


def judge_rows(plans: Sequence[Plan], rows: int, remainder: Remainder) -> Tensor:
    """(rows,) int8: 0 is trained in some pass, 1 left over in all, 2 carried.

    Args:
        plans: one a pass.
        rows: N.
        remainder: whether those that the first pass leaves are carried.
    """
    verdicts = torch.zeros(len(plans), rows, dtype=torch.int8)
    for verdict, plan in zip(verdicts, plans, strict=True):
        verdict[plan.left] = 1
        if remainder == "carry":
            verdict[plans[0].left] = 2
    return verdicts.amin(0)


def _draw_orders(ids: Tensor | None, rows: int, cut: CutOptions, calls: int, epochs: int) -> list[Cut]:
    chosen: Tensor | None = None  # all
    orders: list[Cut] = []
    for call in range(calls, calls + epochs):
        order = shuffle_split(
            rows if chosen is None else len(chosen),
            ids if ids is None or chosen is None else ids[chosen],
            minibatches=cut.minibatches,
            minibatch_size=cut.minibatch_size,
            remainder=cut.remainder,
            shuffle=cut.shuffle,
            generator=torch.Generator().manual_seed(stream_seed("split", cut.seed, call)),
        )
        if chosen is not None:
            order = order._replace(order=chosen[order.order], left=chosen[order.left])
        orders.append(order)
        if cut.remainder == "carry" and call == calls and len(order.left):
            chosen = order.order.sort().values
    return orders


def _deal(
    order: Cut,
    lengths: Tensor,
    cut: CutOptions,
    forest: Forest | None,
    multiples: Sequence[int] | None = None,
) -> Dealt:
    return deal_minibatches(
        order,
        lengths,
        ranks=cut.ranks,
        pad=cut.remainder == "pad",
        multiples=multiples or [cut.multiple_of] * len(order.sizes),
        forest=forest,
        microbatches=cut.microbatches,
        microbatch_size=cut.microbatch_size,
        max_tokens=cut.max_tokens,
        balance=cut.balance,
        linear=cut.linear,
    )


def _check_oversized(lengths: Tensor, max_tokens: int) -> None:
    """Refuse rows that no micro-batch holds.

    Raises:
        BatchError: naming them, with their lengths.
    """
    long = (lengths > max_tokens).nonzero().flatten()[:10]
    if len(long):
        raise BatchError(
            f"rows {long.tolist()} have {lengths[long].tolist()} tokens, and a micro-batch holds "
            f"{max_tokens} (max_tokens): raise it, filter them, or set oversized='alone'"
        )

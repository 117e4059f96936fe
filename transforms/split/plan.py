"""Which row is trained in which forward pass of which optimiser step on which rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.transforms.distributed import check_one_way
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import Ids, stable_order
from headrace.transforms.options import at_least, has_effect, one_of, takes_options, within

from .bins import balance_evenly, balance_within, bins_within
from .shuffle import Cut, Remainder, check_split, cut_order, stream_seed
from .trees import Forest, Tree

Balance = Literal["none", "tokens", "attention"]
Oversized = Literal["alone", "raise"]


@dataclass(frozen=True)
class CutOptions:
    """How a batch is cut: the options of :class:`ShuffleSplit` that do not name columns.

    Raises:
        ValueError: one is none of its values, or two do not go together.
    """

    minibatches: int | None
    minibatch_size: int | None
    remainder: Remainder
    microbatches: int | None
    microbatch_size: int | None
    max_tokens: int | None
    multiple_of: int
    oversized: Oversized
    balance: Balance
    linear: float
    tree: Tree
    ranks: int
    rank: int | None
    process_group: dist.ProcessGroup | str | None
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        check_split(self.minibatches, self.minibatch_size, self.remainder)
        cuts = {name: getattr(self, name) for name in ("microbatches", "microbatch_size", "max_tokens")}
        given = {name: value for name, value in cuts.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"give at most one of {', '.join(cuts)}; got {given}")
        for name, value in {"ranks": self.ranks, **given, "multiple_of": self.multiple_of}.items():
            at_least(name, value, 1)
        one_of("balance", self.balance, get_args(Balance))
        within("linear", self.linear, 0)
        at_least("rank", self.rank, 0)
        if self.rank is not None and self.rank >= self.ranks:
            raise ValueError(f"rank must be below ranks; got rank={self.rank} and ranks={self.ranks}")
        check_one_way(self.ranks, self.process_group)
        over_ranks = self.ranks > 1 or self.process_group is not None
        if self.max_tokens is not None and over_ranks and self.remainder not in ("pad", "drop"):
            raise ValueError(
                "with max_tokens a rank may have fewer rows than others have micro-batches: set "
                "remainder='pad' to fill them up, or 'drop' to leave out rows that make them too many; got "
                f"remainder={self.remainder!r}"
            )
        if one_of("tree", self.tree, get_args(Tree)) != "none" and (
            self.microbatch_size is not None or (self.max_tokens is not None and self.remainder == "drop")
        ):
            raise ValueError(
                f"tree={self.tree!r} assigns whole trees with any number of rows: cut by max_tokens or "
                "microbatches in place of microbatch_size, and with max_tokens set remainder='pad' in place "
                f"of 'drop'; got microbatch_size={self.microbatch_size}, remainder={self.remainder!r}"
            )
        one_of("oversized", self.oversized, get_args(Oversized))
        one_of("shuffle", self.shuffle, (True, False))

    @property
    def measures(self) -> bool:
        """Whether the lengths of rows matter."""
        return self.max_tokens is not None or self.balance != "none" or self.tree != "none"

    def plain(self) -> dict[str, Any]:
        """What an order and its cut follow from, by name; the process group is no part of that."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "process_group"}


# -- one optimiser step ---------------------------------------------------------------------------------


@takes_options
def assign_rows(
    lengths: Tensor,
    *,
    ranks: int = 1,
    microbatches: int | None = None,
    microbatch_size: int | None = None,
    max_tokens: int | None = None,
    balance: Balance = "none",
    linear: float = 24576.0,
    multiple_of: int = 1,
    tree: Tensor | None = None,
    shared: Tensor | None = None,
) -> list[list[Tensor]]:
    """Assign rows to ranks × micro-batches, every rank as many micro-batches as the others.

    With B micro-batches on all ranks together, and c_i the cost of row i: its length t_i under ``none`` and
    ``tokens``, t_i² + linear · t_i under ``attention``:

    - by count and by size their row counts differ by at most one; ``none`` cuts the order as it is, else
      rows go where the heaviest micro-batch is as light as :func:`balance_evenly` makes it;
    - by `max_tokens` the lengths in each add up to at most that, a longer row being alone; B is at most
      what first fit fills, and costs are levelled within the budget (:func:`balance_within`).

    The rows of a `tree` are assigned as one, for what their tokens cost without those that are `shared`,
    which are computed once: with s_i of these, under ``attention`` t_i² − s_i² + linear · (t_i − s_i). What
    is said of counts of rows is then said of trees.

    Micro-batches of like cost share a number, and ranks take turns at the heavier one. Rows keep their
    order within a micro-batch. Fewer rows than micro-batches leave some empty.

    Args:
        lengths: (n,) int64 on the CPU, tokens a row, padding left out.
        ranks: R ≥ 1.
        microbatches: per rank, ≥ 1; of the three give at most one. None of them: 1.
        microbatch_size: rows at most, ≥ 1.
        max_tokens: of a micro-batch, ≥ 1.
        balance: ``none``, ``tokens``, ``attention``.
        linear: the price of a token besides attention, in units of token²: 6 × the model's hidden size,
            from 24·h² FLOPs a token for the matrices and 4·h·t² for attention in each layer.
        multiple_of: B/R is a multiple of this.
        tree: (n,) int64, rows with one number go to one micro-batch; None: each goes by itself.
        shared: (n,) int64, the first tokens of each row that another one of its tree has computed; None: 0.

    Returns:
        By rank and micro-batch, the positions (·,) int64 of its rows.

    Example:
        >>> assigned = assign_rows(torch.tensor([9, 1, 1, 9]), ranks=2, balance="tokens")
        >>> [[rows.tolist() for rows in of_rank] for of_rank in assigned]
        [[[0, 2]], [[1, 3]]]
    """
    has_effect(assign_rows, "linear", linear, balance == "attention", "balance='attention'")
    order, sizes = _assign(
        lengths, ranks, microbatches, microbatch_size, max_tokens, balance, linear, multiple_of, tree, shared
    )
    parts = iter(order.split([size for of_rank in sizes for size in of_rank]))
    return [[next(parts) for _ in of_rank] for of_rank in sizes]


class Assigned(NamedTuple):
    """The rows of a minibatch by rank and micro-batch."""

    order: Tensor
    """(n,) int64, those of the first, in their order, then those of the next."""
    sizes: list[list[int]]
    """Rows by rank and micro-batch."""


def _assign(
    lengths: Tensor,
    ranks: int,
    microbatches: int | None,
    microbatch_size: int | None,
    max_tokens: int | None,
    balance: Balance,
    linear: float,
    multiple_of: int,
    tree: Tensor | None,
    shared: Tensor | None,
) -> Assigned:
    """:func:`assign_rows`, of arguments that are known to be good."""

    def cost(tokens: Tensor) -> Tensor:
        return tokens.double() * (tokens.double() + linear) if balance == "attention" else tokens

    # 1. What is assigned: rows, or trees, numbered as they come, for the tokens that are their own.
    tokens, costs, number = lengths, cost(lengths), lengths
    if tree is not None:
        trees = Ids(tree)
        number = Ids(trees.spread(trees.first)).of
        own = torch.zeros_like(lengths) if shared is None else shared
        tokens, costs = (
            values.new_zeros(trees.n).index_add_(0, number, values)
            for values in (lengths - own, costs - cost(own))
        )
    # 2. Into how many micro-batches, and which goes where.
    home, together = None, ranks * multiple_of
    if max_tokens is not None:
        home = balance_within(tokens, max_tokens, multiple_of=together, costs=costs)
        count = int(home.max()) + 1 if len(home) else 1
    elif microbatch_size is not None:
        count = ranks * (-(-len(tokens) // (ranks * microbatch_size)) or 1)
    else:
        count = ranks * (microbatches or 1)
    count += -count % together
    if home is None and balance != "none":
        home = balance_evenly(costs, count)
    # 3. Which rank trains which: a place for each item, by rank and micro-batch.
    if home is None:
        small, larger = divmod(len(tokens), count)
        place = torch.arange(count).repeat_interleave(small + (torch.arange(count) < larger))
    else:
        load = torch.bincount(home, costs.double(), count)
        place = torch.empty(count, dtype=torch.int64).scatter_(0, _level(load, ranks), torch.arange(count))
        place = place.index_select(0, home)
    # 4. Rows go where their item does.
    if tree is not None:
        place = place.index_select(0, number)
    in_order = home is None and tree is None
    order = torch.arange(len(place)) if in_order else stable_order(place)
    return Assigned(order, torch.bincount(place, minlength=count).view(ranks, -1).tolist())


def _level(load: Tensor, ranks: int) -> Tensor:
    """(B,) int64, micro-batches by rank: heaviest first, one a rank to those that have least."""
    by_load = load.sort(descending=True, stable=True)
    if ranks == 1:
        return by_load.indices
    total = [0.0] * ranks
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for loads, numbers in zip(*(column.view(-1, ranks).tolist() for column in by_load), strict=True):
        lightest_first = sorted(range(ranks), key=total.__getitem__)
        for rank, number, more in zip(lightest_first, numbers, loads, strict=True):
            assigned[rank].append(number)
            total[rank] += more
    return torch.tensor(assigned).view(-1)


# -- one pass over a batch ------------------------------------------------------------------------------


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
        """(3, M) int64: the minibatch, micro-batch and rank of each row in the order."""
        places = [
            (k, m, r)
            for k, ranks in enumerate(self.sizes)
            for r, passes in enumerate(ranks)
            for m in range(len(passes))
        ]
        counts = [size for ranks in self.sizes for passes in ranks for size in passes]
        table = torch.tensor(places, dtype=torch.int64).view(-1, 3)
        return table.repeat_interleave(torch.tensor(counts, dtype=torch.int64), dim=0).T

    def passes(self, rank: int | None) -> list[list[int]]:
        """Rows of each micro-batch, by minibatch; of all ranks, or of one."""
        chosen = slice(None) if rank is None else slice(rank, rank + 1)
        return [[size for passes in ranks[chosen] for size in passes] for ranks in self.sizes]

    def of_rank(self, rank: int | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The part of a rank, or of all: order, padding or None, and (3, M) minibatch, micro-batch and rank.

        Where there is one rank, its number is left out.
        """
        several = any(len(each) > 1 for each in self.sizes)
        numbers = self.numbers if several else self.numbers[:2]
        padding = self.padding if self.is_padded else None
        if rank is None:
            return self.order, padding, numbers
        own = (self.numbers[2] == rank).nonzero().flatten()
        padding = padding if padding is None else padding.index_select(0, own)
        return self.order.index_select(0, own), padding, numbers.index_select(1, own)

    @cached_property
    def is_padded(self) -> bool:
        """Whether any row is padding."""
        return bool(self.padding.any())


def assign_minibatches(
    order: Cut,
    lengths: Tensor,
    cut: CutOptions,
    forest: Forest | None,
    multiples: Sequence[int] | None = None,
) -> list[Assigned]:
    """Assign the rows of each minibatch to ranks and micro-batches (:func:`assign_rows`).

    Args:
        order: rows by minibatch.
        lengths: (N,) int64, tokens a row.
        cut: how.
        forest: of the rows, where those of a tree stay together; None: each goes by itself.
        multiples: by minibatch, what the number of micro-batches is to be a multiple of; None: as `cut` says.
    """
    assigned: list[Assigned] = []
    for number, rows in enumerate(order.order.split(order.sizes) if order.sizes else ()):
        multiple_of = cut.multiple_of if multiples is None else multiples[number]
        tree = shared = None
        if forest is not None:
            tree, shared = forest.pieces(rows, cut.max_tokens)
        microbatches = cut.microbatches
        if microbatches is not None and cut.remainder != "pad":  # none is empty
            items = len(rows) if tree is None else len(tree.unique())
            microbatches = max(min(microbatches, items // cut.ranks), 1)
        in_one = cut.max_tokens is None and cut.microbatch_size is None and (microbatches or 1) == 1
        if in_one and cut.ranks == multiple_of == 1:
            assigned.append(Assigned(rows, [[len(rows)]]))
            continue
        positions, sizes = _assign(
            lengths.index_select(0, rows),
            cut.ranks,
            microbatches,
            cut.microbatch_size,
            cut.max_tokens,
            cut.balance,
            cut.linear,
            multiple_of,
            tree,
            shared,
        )
        assigned.append(Assigned(rows.index_select(0, positions), sizes))
    return assigned


def make_plan(order: Cut, assigned: Sequence[Assigned], cut: CutOptions) -> Plan:
    """Put the assigned rows in order, and fill up what is short, under ``pad``.

    Without a budget all micro-batches are filled up to as many rows as the largest has; under one, those that
    are empty to one row.

    Raises:
        BatchError: a minibatch has fewer rows than micro-batches that must not be empty; not under ``pad``.
    """
    pad, full = cut.remainder == "pad" and len(order.order) > 0, 1
    if pad and cut.max_tokens is None:
        full = max(size for each in assigned for of_rank in each.sizes for size in of_rank)
    pieces: list[Tensor] = []
    padding, sizes, start = [], [], 0
    for number, (held, (rows, by_rank)) in enumerate(zip(order.sizes, assigned, strict=True)):
        in_each = [size for of_rank in by_rank for size in of_rank]
        if not pad:
            if held and not all(in_each):
                raise BatchError(
                    f"minibatch {number} has {held} rows for {len(by_rank)} ranks × {len(by_rank[0])} "
                    "micro-batches, and none may be empty: set remainder='pad', or make minibatches larger"
                )
            pieces.append(rows)
            sizes.append(by_rank)
            continue
        # What fills up is a row of this minibatch, or where none is for it, of any.
        some = start if held else 0
        for part in rows.split(in_each):
            short = max(full - len(part), 0)
            pieces += [part, order.order[some : some + 1].expand(short)]
            padding += [(False, len(part)), (True, short)]
        start += held
        sizes.append([[max(size, full) for size in of_rank] for of_rank in by_rank])
    row_numbers = torch.cat(pieces) if pieces else order.order
    if not any(short for is_padding, short in padding if is_padding):
        return Plan(row_numbers, torch.zeros(len(row_numbers), dtype=torch.bool), sizes, order.left)
    is_padding, runs = (torch.tensor(column) for column in zip(*padding, strict=True))
    return Plan(row_numbers, is_padding.repeat_interleave(runs), sizes, order.left)


def measure_plan(
    plan: Plan, lengths: Tensor, cut: CutOptions, forest: Forest | None = None
) -> dict[str, float]:
    """How many minibatches and micro-batches a plan has, how level they are, and how full.

    Args:
        plan: of a batch.
        lengths: (N,) int64, tokens a row.
        cut: how it was cut.
        forest: of the rows, where tokens that those of a micro-batch share cost once.
    """
    counts = [len(ranks[0]) for ranks in plan.sizes]
    measured = {
        "minibatches": float(len(plan.sizes)),
        "microbatches": float(sum(counts)),
        "padded": float(plan.padding.sum()) if plan.is_padded else 0.0,
    }
    if cut.measures and counts:
        k, m, r = plan.numbers
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
    return measured


# -- all passes, on all ranks -----------------------------------------------------------------------------


class Part(NamedTuple):
    """The rows of which a rank draws an order."""

    rows: Tensor
    """(n,) int64, their numbers, ascending."""
    units: Ids | None
    """Which of them are one unit; None: each is one."""


def draw_plans(
    parts: Sequence[Part],
    labels: Tensor | None,
    lengths: Tensor,
    cut: CutOptions,
    *,
    calls: int,
    epochs: int,
    forest: Forest | None = None,
) -> list[list[Plan]]:
    """Draw an order of the rows for each pass, and cut it.

    Under ``carry`` the first order says who is carried, and the others are orders of the rest. Each part is
    that of a rank which draws an order of its own rows, as it would alone. All take as many optimiser steps
    as one another, each of as many micro-batches: a rank that has no rows for a step takes part without any.

    Args:
        parts: of the ranks.
        labels: (N,) int64, by which rows are one unit; None: each is one.
        lengths: (N,) int64, tokens a row.
        cut: how.
        calls: orders drawn before.
        epochs: passes, ≥ 1.
        forest: of the rows, where those of a tree stay in one micro-batch.

    Returns:
        By part and pass.

    Raises:
        BatchError: as :func:`shuffle_split` and :func:`make_plan`; parts that have not as many steps.
    """
    orders = []
    for rank, part in enumerate(parts):
        with _naming(rank, len(parts)):
            orders.append(_draw_orders(part, len(lengths), labels, cut, calls, epochs))
    if cut.max_tokens is not None and cut.remainder == "drop":
        orders = fit_budget(orders, labels, lengths, cut)
    assigned = [[assign_minibatches(order, lengths, cut, forest) for order in own] for own in orders]
    if len(parts) > 1:
        counts = _agree_on_counts(assigned, cut)
        for own, its in zip(orders, assigned, strict=True):
            for epoch, most in enumerate(counts):
                sizes = own[epoch].sizes
                own[epoch] = own[epoch]._replace(sizes=sizes + [0] * (len(most) - len(sizes)))
                if [len(each.sizes[0]) for each in its[epoch]] != most:
                    its[epoch] = assign_minibatches(own[epoch], lengths, cut, forest, most)
    plans = []
    for rank, (own, its) in enumerate(zip(orders, assigned, strict=True)):
        with _naming(rank, len(parts)):
            plans.append([make_plan(order, each, cut) for order, each in zip(own, its, strict=True)])
    return plans


@contextmanager
def _naming(rank: int, ranks: int) -> Iterator[None]:
    """Say in errors whose rows they are about, where there are several ranks."""
    try:
        yield
    except BatchError as err:
        if ranks > 1:
            err.args = (f"{err} (These are the rows of rank {rank}.)",)
        raise


def _draw_orders(
    part: Part, size: int, labels: Tensor | None, cut: CutOptions, calls: int, epochs: int
) -> list[Cut]:
    (rows, units), orders = part, list[Cut]()
    for call in range(calls, calls + epochs):
        generator = torch.Generator().manual_seed(stream_seed("split", cut.seed, call))
        how = cut.minibatches, cut.minibatch_size, cut.remainder, cut.shuffle
        order = cut_order(len(rows), units, *how, generator)
        if len(rows) < size:
            numbers = rows.index_select(0, order.order), rows.index_select(0, order.left)
            order = Cut(numbers[0], order.sizes, numbers[1])
        orders.append(order)
        if cut.remainder == "carry" and call == calls and len(order.left):
            rows = order.order.sort().values
            units = None if labels is None else Ids(labels.index_select(0, rows))
    return orders


def _agree_on_counts(assigned: Sequence[Sequence[Sequence[Assigned]]], cut: CutOptions) -> list[list[int]]:
    """By pass and optimiser step, the largest number of micro-batches that a part has.

    Raises:
        BatchError: parts have rows for other numbers of steps.
    """
    counts = [[[len(each.sizes[0]) for each in plan] for plan in own] for own in assigned]
    steps = [len(own[0]) for own in counts]
    if cut.minibatches is None and len(set(steps) - {0}) > 1:
        raise BatchError(
            f"every rank takes as many optimiser steps; by rank there are {steps} minibatches: give all "
            "ranks as many units, or set minibatches=K in place of minibatch_size"
        )
    passes = zip(*counts, strict=True)
    return [[max(step) for step in zip_longest(*own, fillvalue=0)] for own in passes]


def fit_budget(
    orders: Sequence[Sequence[Cut]], labels: Tensor | None, lengths: Tensor, cut: CutOptions
) -> list[list[Cut]]:
    """Leave out the last units of minibatches that need more micro-batches than some rank has rows for.

    A rank makes as many micro-batches as the others, and each needs a row. Of n rows a rank can make
    ⌊n / `multiple_of`⌋ · `multiple_of`, and all can make what the least of them can that has a row; whoever
    needs more to keep the budget leaves out one unit after the other, from the end of its order. Then ranks
    look again, since who left out rows has fewer. A minibatch of which nothing remains on some rank is none.

    Args:
        orders: by part and pass.
        labels: (N,) int64, which rows are one unit; None: each is one.
        lengths: (N,) int64, tokens a row.
        cut: with `max_tokens`.

    Returns:
        The orders, with what was left out among their `left`.

    Raises:
        BatchError: no minibatch remains to a part.
    """

    def capacity(rows: Tensor) -> int:
        """Micro-batches per rank that so many rows can make, none of them empty."""
        return len(rows) // cut.ranks // cut.multiple_of * cut.multiple_of

    def needed(rows: Tensor) -> int:
        """Micro-batches per rank that these rows need."""
        multiple_of = cut.ranks * cut.multiple_of
        own = lengths.index_select(0, rows)
        return bins_within(own, cut.max_tokens or 1, multiple_of=multiple_of) // cut.ranks

    def shorten(rows: Tensor, limit: int) -> Tensor:
        """The first units of (n,) rows, those that keep the budget in `limit` micro-batches per rank."""
        units = torch.ones_like(rows)
        if labels is not None:
            units = torch.unique_consecutive(labels.index_select(0, rows), return_counts=True)[1]
        ends = [0, *units.cumsum(0).tolist()]
        return rows[: ends[bisect_right(ends, limit, key=lambda end: needed(rows[:end])) - 1]]

    # By part, the minibatches of all passes, one after the other.
    minibatches = [
        [rows for order in own if order.sizes for rows in order.order.split(order.sizes)] for own in orders
    ]
    most: list[int] = []
    while True:
        capacities = zip_longest(*([capacity(rows) for rows in own] for own in minibatches))
        fewest = [min(count for count in each if count is not None) for each in capacities]
        if fewest == most:
            break
        most = fewest
        minibatches = [
            [shorten(rows, limit) for rows, limit in zip(own, most, strict=False)] for own in minibatches
        ]
    fitted: list[list[Cut]] = []
    for own, mine in zip(orders, minibatches, strict=True):
        fitted.append([])
        kept = iter(zip(mine, most, strict=False))
        for order in own:
            held = [rows for _, (rows, limit) in zip(order.sizes, kept, strict=False) if limit > 0]
            if order.sizes and not held:
                raise BatchError(
                    "no minibatch has a row for each of its micro-batches, and remainder='drop' would leave "
                    f"out all {len(order.order)} rows: raise max_tokens, or set remainder='pad'"
                )
            together = torch.cat([order.order[:0], *held])
            out = order.order[~torch.isin(order.order, together)]
            fitted[-1].append(Cut(together, [len(rows) for rows in held], torch.cat([out, order.left])))
    return fitted

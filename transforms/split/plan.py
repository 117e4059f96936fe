"""Assign each row of a batch to a minibatch (optimiser step), a rank and a micro-batch (forward pass)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, islice, zip_longest
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.transforms.table import BatchError, Ids, count_of, stable_order
from headrace.transforms.table.options import at_least, takes_options
from headrace.transforms.table.process_group import check_one_way

from .bins import balance_evenly, balance_within, bins_within
from .shuffle import Cut, Remainder, check_split, cut_order, stream_seed

Balance = Literal["none", "tokens", "attention"]
Tree = Literal["none", "rollout", "group"]
LINEAR = 24576.0
"""The linear cost of a token under ``attention``, in units of token²: 6 × a hidden size of 4096.

A layer of hidden size h takes 24·h² FLOPs per token for its matrices, and 4·h·t² for the attention of t
tokens.
"""


class PrefixTrees(Protocol):
    """Rows that share tokens, for ``tree`` (`Forest`)."""

    def shared(self, rows: Tensor, part: Tensor | None = None) -> Tensor:
        """(n,) for each row, the number of leading tokens that an earlier row already has."""

    def pieces(self, rows: Tensor, budget: int | None) -> tuple[Tensor, Tensor]:
        """(n,) the tree of each row, and (n,) how many of its tokens another row of the tree computes."""


@takes_options
@dataclass(frozen=True)
class CutOptions:
    """The options of :class:`ShuffleSplit` that do not name columns.

    Raises:
        ValueError: an option has an invalid value, or two options exclude each other.
    """

    minibatches: int | None
    minibatch_size: int | None
    remainder: Remainder
    microbatches: int | None
    max_tokens: int | None
    balance: Balance
    tree: Tree
    ranks: int
    rank: int | None
    process_group: dist.ProcessGroup | str | None
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        check_split(self.minibatches, self.minibatch_size, self.remainder)
        if self.microbatches is not None and self.max_tokens is not None:
            given = f"microbatches={self.microbatches} and max_tokens={self.max_tokens}"
            raise ValueError(f"give at most one of microbatches and max_tokens; got {given}")
        for name in ("ranks", "microbatches", "max_tokens"):
            at_least(name, getattr(self, name), 1)
        at_least("rank", self.rank, 0)
        if self.rank is not None and self.rank >= self.ranks:
            raise ValueError(f"rank must be below ranks; got rank={self.rank} and ranks={self.ranks}")
        check_one_way(self.ranks, self.process_group)
        over_ranks = self.ranks > 1 or self.process_group is not None
        if self.max_tokens is not None and over_ranks and not (self.pads or self.remainder == "drop"):
            raise ValueError(
                "with max_tokens and several ranks, a rank may have fewer rows than the others have "
                "micro-batches: set remainder='pad' or 'carry' to fill it up with masked rows, or 'drop' to "
                f"drop rows of the others; got remainder={self.remainder!r}"
            )
        if self.tree != "none" and self.max_tokens is not None and self.remainder == "drop":
            raise ValueError(
                f"tree={self.tree!r} assigns whole trees, which have any number of rows: with max_tokens "
                "replace remainder='drop' by 'pad'"
            )

    @cached_property
    def measures(self) -> bool:
        """Whether any option depends on the lengths of rows."""
        return self.max_tokens is not None or self.balance != "none" or self.tree != "none"

    @property
    def pads(self) -> bool:
        """Whether masked copies of rows fill empty micro-batches."""
        return self.remainder in ("pad", "carry")

    @cached_property
    def plain(self) -> dict[str, Any]:
        """All options that decide a plan, by name: all but the process group."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "process_group"}


# -- one optimiser step ---------------------------------------------------------------------------------


@takes_options
def assign_rows(
    lengths: Tensor,
    *,
    ranks: int = 1,
    microbatches: int | None = None,
    max_tokens: int | None = None,
    balance: Balance = "none",
    tree: Tensor | None = None,
    shared: Tensor | None = None,
) -> list[list[Tensor]]:
    """Assign the rows of one minibatch to ranks and micro-batches.

    Every rank gets the same number of micro-batches. B is the number on all ranks together. A row of t_i
    tokens costs c_i = t_i, or c_i = t_i² + :data:`LINEAR` · t_i under ``attention``.

    - With `microbatches`, row counts differ by at most one. ``none`` cuts the rows in the order given.
      ``tokens`` and ``attention`` even out the costs (:func:`balance_evenly`).
    - With `max_tokens`, a micro-batch has at most this number of tokens. A longer row is alone. B is at most
      what first fit needs, and costs are evened out within the budget (:func:`balance_within`).

    The rows of a `tree` are assigned together, and each tree counts as one row. A row with s_i `shared`
    tokens counts t_i − s_i tokens, and costs c(t_i) − c(s_i).

    Micro-batches of similar cost get the same index on all ranks, and the heaviest of an index goes to the
    rank with the least cost so far. Rows keep their order within a micro-batch. If there are fewer rows than
    micro-batches, some are empty.

    Args:
        lengths: (n,) int64 on the CPU, tokens per row without padding.
        ranks: R ≥ 1.
        microbatches: micro-batches per rank, ≥ 1; give at most one of this and `max_tokens`. Without both: 1.
        max_tokens: largest number of tokens per micro-batch, ≥ 1.
        balance: ``none``, ``tokens`` or ``attention``.
        tree: (n,) int64, rows with the same number go to one micro-batch; None: each row is its own tree.
        shared: (n,) int64, the leading tokens of each row that another row of its tree computes; None: 0.

    Returns:
        By rank and micro-batch, the positions (·,) int64 of its rows.

    Example:
        >>> assigned = assign_rows(torch.tensor([9, 1, 1, 9]), ranks=2, balance="tokens")
        >>> [[rows.tolist() for rows in of_rank] for of_rank in assigned]
        [[[0, 2]], [[1, 3]]]
    """
    order, sizes = _assign(lengths, ranks, microbatches, max_tokens, balance, 1, tree, shared)
    parts = iter(order.split([size for of_rank in sizes for size in of_rank]))
    return [[next(parts) for _ in of_rank] for of_rank in sizes]


class Assigned(NamedTuple):
    """The rows of a minibatch, assigned to ranks and micro-batches."""

    order: Tensor
    """(n,) int64, rows sorted by rank, then by micro-batch."""
    sizes: list[list[int]]
    """Number of rows by rank and micro-batch."""


def _assign(
    lengths: Tensor,
    ranks: int,
    microbatches: int | None,
    max_tokens: int | None,
    balance: Balance,
    multiple_of: int,
    tree: Tensor | None,
    shared: Tensor | None,
) -> Assigned:
    """:func:`assign_rows` without checks. A rank gets a multiple of `multiple_of` micro-batches."""

    def cost(tokens: Tensor) -> Tensor:
        return tokens.double() * (tokens.double() + LINEAR) if balance == "attention" else tokens

    # 1. The items to assign: rows, or trees in the order of their first rows. Shared tokens cost nothing.
    tokens, costs, item_of = lengths, cost(lengths), None  # None: each row is an item
    if tree is not None:
        trees = Ids(tree)
        item_of = Ids(trees.spread(trees.first)).of
        free = torch.zeros_like(lengths) if shared is None else shared
        tokens, costs = (
            values.new_zeros(trees.n).index_add_(0, item_of, values)
            for values in (lengths - free, costs - cost(free))
        )
    # 2. The number of micro-batches, and a bin for each item; None: cut the items in order.
    bin_of, unit = None, ranks * multiple_of
    if max_tokens is not None:
        bin_of = balance_within(tokens, max_tokens, multiple_of=unit, costs=costs)
        count = int(bin_of.max()) + 1 if len(bin_of) else 1
    else:
        count = ranks * (microbatches or 1)
    count += -count % unit  # every rank has the same number, a multiple of `multiple_of`
    if bin_of is None and balance != "none":
        bin_of = balance_evenly(costs, count)
    # 3. The micro-batch of each item, numbered by rank, then by micro-batch.
    if bin_of is None:
        small, larger = divmod(len(tokens), count)
        place = torch.arange(count).repeat_interleave(small + (torch.arange(count) < larger))
    else:
        load = torch.bincount(bin_of, costs.double(), count)
        bins = _bins_by_rank(load, ranks)
        place = torch.empty(count, dtype=torch.int64).scatter_(0, bins, torch.arange(count))
        place = place.index_select(0, bin_of)
    # 4. Each row goes where its item goes.
    if item_of is not None:
        place = place.index_select(0, item_of)
    in_order = bin_of is None and item_of is None  # `place` ascends, so a sort would change nothing
    order = torch.arange(len(place)) if in_order else stable_order(place)
    return Assigned(order, torch.bincount(place, minlength=count).view(ranks, -1).tolist())


def _bins_by_rank(load: Tensor, ranks: int) -> Tensor:
    """Give the bins to ranks, R at a time, heaviest first. The heaviest goes to the rank with the least cost.

    Returns:
        (B,) int64, bin numbers, sorted by rank.
    """
    by_load = load.sort(descending=True, stable=True)
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
    """Rows in training order: sorted by minibatch, rank and micro-batch. On the CPU."""

    order: Tensor
    """(M,) int64, row numbers. A padding row has the number of a row of its minibatch."""
    padding: Tensor | None
    """(M,) bool, True at padding rows; None: no row is padding."""
    sizes: list[list[list[int]]]
    """Number of rows by minibatch, rank and micro-batch; the sum is M."""
    left: Tensor
    """(·,) int64, leftover rows, which are in no minibatch."""

    @cached_property
    def numbers(self) -> list[Tensor]:
        """(M,) int64 each: the minibatch, the micro-batch and, with several ranks, the rank of each row."""
        cells = [
            (k, m, r, size)
            for k, ranks in enumerate(self.sizes)
            for r, passes in enumerate(ranks)
            for m, size in enumerate(passes)
        ]
        *places, sizes = torch.tensor(cells, dtype=torch.int64).view(-1, 4).unbind(1)
        of = torch.repeat_interleave(sizes)
        return [place.index_select(0, of) for place in places[: 3 if self.has_ranks else 2]]

    def passes(self, rank: int | None) -> list[list[int]]:
        """Number of rows of each micro-batch, by minibatch, for one rank; None: of all ranks."""
        chosen = slice(None) if rank is None or not self.has_ranks else slice(rank, rank + 1)
        return [list(chain.from_iterable(ranks[chosen])) for ranks in self.sizes]

    def of_rank(self, rank: int | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The rows of one rank; None: of all ranks.

        Returns:
            - (M,) int64, row numbers in training order.
            - (M,) bool, True at padding; None without any.
            - :attr:`numbers` of these rows.
        """
        if rank is None or not self.has_ranks:
            return self.order, self.padding, self.numbers
        own = (self.numbers[2] == rank).nonzero().flatten()
        padding = None if self.padding is None else self.padding.index_select(0, own)
        return self.order.index_select(0, own), padding, [each.index_select(0, own) for each in self.numbers]

    @property
    def has_ranks(self) -> bool:
        """Whether the rows are of several ranks."""
        return len(self.sizes) > 0 and len(self.sizes[0]) > 1


def assign_minibatches(
    cut: Cut,
    lengths: Tensor,
    options: CutOptions,
    forest: PrefixTrees | None,
    multiples: Sequence[int] | None = None,
) -> list[Assigned]:
    """Assign the rows of each minibatch to ranks and micro-batches (:func:`assign_rows`).

    Args:
        cut: rows by minibatch.
        lengths: (N,) int64, tokens per row.
        options: the options.
        forest: keeps the rows of a tree together; None: each row is its own tree.
        multiples: for each minibatch, a divisor of its number of micro-batches per rank; None: 1.
    """
    assigned: list[Assigned] = []
    for number, rows in enumerate(cut.order.split(cut.sizes) if cut.sizes else ()):
        multiple_of = 1 if multiples is None else multiples[number]
        tree = shared = None
        if forest is not None:
            tree, shared = forest.pieces(rows, options.max_tokens)
        microbatches = options.microbatches
        if microbatches is not None and options.remainder != "pad":  # fewer, so that none is empty
            items = len(rows) if tree is None else len(tree.unique())
            microbatches = max(min(microbatches, items // options.ranks), 1)
        in_one = options.max_tokens is None and (microbatches or 1) == 1
        if in_one and options.ranks == multiple_of == 1:
            assigned.append(Assigned(rows, [[len(rows)]]))
            continue
        positions, sizes = _assign(
            lengths.index_select(0, rows),
            options.ranks,
            microbatches,
            options.max_tokens,
            options.balance,
            multiple_of,
            tree,
            shared,
        )
        assigned.append(Assigned(rows.index_select(0, positions), sizes))
    return assigned


def make_plan(
    cut: Cut, assigned: Sequence[Assigned], options: CutOptions, firsts: Sequence[Tensor] = ()
) -> Plan:
    """Join the assigned rows into one plan. Under ``pad`` and ``carry``, add padding rows.

    ``pad`` fills all micro-batches up to the row count of the largest. With `max_tokens`, and under
    ``carry``, each empty micro-batch gets one row instead.

    Args:
        cut: rows by minibatch.
        assigned: the rows of `cut`, by rank and micro-batch.
        options: the options.
        firsts: by minibatch, (1,) the row that padding copies if this rank has no row there.

    Raises:
        BatchError: a micro-batch would be empty, and `remainder` is not ``pad`` or ``carry``.
    """
    pieces: list[Tensor] = []
    sizes: list[list[list[int]]] = []
    if not options.pads or not cut.sizes:
        for number, (held, (rows, by_rank)) in enumerate(zip(cut.sizes, assigned, strict=True)):
            # Without rows for a step, a rank takes empty micro-batches. With rows, it must fill all of them.
            if held and not all(map(all, by_rank)):
                raise BatchError(
                    f"minibatch {number} has {count_of(held, 'row')} for {count_of(len(by_rank), 'rank')} × "
                    f"{count_of(len(by_rank[0]), 'micro-batch')}, and no micro-batch may be empty: set "
                    "{remainder=pad}, or make minibatches larger"
                )
            pieces.append(rows)
            sizes.append(by_rank)
        return Plan(torch.cat(pieces) if pieces else cut.order, None, sizes, cut.left)
    full, start, padding = 1, 0, list[tuple[bool, int]]()
    if options.remainder == "pad" and options.max_tokens is None:
        full = max(1, *(size for each in assigned for of_rank in each.sizes for size in of_rank))
    for number, (held, (rows, by_rank)) in enumerate(zip(cut.sizes, assigned, strict=True)):
        in_each = [size for of_rank in by_rank for size in of_rank]
        copied = cut.order[start : start + 1] if held else firsts[number]
        for part in rows.split(in_each):
            short = max(full - len(part), 0)
            pieces += [part, copied.expand(short)]
            padding += [(False, len(part)), (True, short)]
        start += held
        sizes.append([[max(size, full) for size in of_rank] for of_rank in by_rank])
    is_padding, runs = (torch.tensor(column) for column in zip(*padding, strict=True))
    of_rows = is_padding.repeat_interleave(runs)
    return Plan(torch.cat(pieces), of_rows if bool(of_rows.any()) else None, sizes, cut.left)


def measure_plans(
    plans: Sequence[Plan], lengths: Tensor, options: CutOptions, forest: PrefixTrees | None = None
) -> dict[str, float]:
    """Compute the metrics of a pass: its minibatches, micro-batches, padding, and the balance of ranks.

    Args:
        plans: the plans of all ranks that have their own rows, with the same numbers of micro-batches.
        lengths: (N,) int64, tokens per row.
        options: the options by which the batch was cut.
        forest: counts the shared tokens of a micro-batch once; None: no tokens are shared.
    """
    counts = [len(ranks[0]) for ranks in plans[0].sizes]
    measured = {
        "minibatches": float(len(counts)),
        "microbatches": float(sum(counts)),
        "padded": sum(0.0 if plan.padding is None else float(plan.padding.sum()) for plan in plans),
    }
    if not options.measures or not counts:
        return measured
    loads, shared_tokens = list[Tensor](), 0.0  # (K, R, M) by minibatch, rank and micro-batch
    for plan in plans:
        k, m, *ranks = plan.numbers
        r = ranks[0] if ranks else torch.zeros_like(k)
        load = torch.zeros(len(counts), len(plan.sizes[0]), max(counts), dtype=torch.float64)
        real = torch.tensor(1) if plan.padding is None else ~plan.padding
        tokens = lengths[plan.order]
        if forest is not None:
            # Tokens are shared within a micro-batch only, so each micro-batch has a number.
            shared = forest.shared(plan.order, (k * len(plan.sizes[0]) + r) * max(counts) + m)
            tokens = tokens - shared
            shared_tokens += float((shared * real).sum())
        loads.append(load.index_put_((k, r, m), (tokens * real).double(), accumulate=True))
    if forest is not None:
        measured["shared_tokens"] = shared_tokens
    every = torch.cat(loads, 1)
    by_rank = every.sum(-1)
    measured["rank_imbalance"] = float((by_rank.amax(-1) / by_rank.mean(-1)).nan_to_num(1.0).max() - 1)
    measured["max_tokens"] = float(every.max())
    return measured


# -- all passes, on all ranks -----------------------------------------------------------------------------


def draw_plans(
    parts: Sequence[tuple[Tensor, Ids | None]],
    labels: Tensor | None,
    lengths: Tensor,
    options: CutOptions,
    *,
    calls: int,
    epochs: int,
    forest: PrefixTrees | None = None,
    came: int | None = None,
) -> list[list[Plan]]:
    """Draw a permutation of the rows for each pass, and cut it.

    Each rank permutes its own rows, as it would alone. All ranks take the same number of optimiser steps, and
    the same number of micro-batches in each. A rank without rows for a step takes micro-batches of padding
    under ``pad`` and ``carry``, else empty ones, which :func:`split_microbatches` does not yield. Under
    ``carry`` the first pass decides which rows are carried, and the other passes permute the remaining rows.
    A rank that has rows for more steps than others carries the rows of the further steps.

    Args:
        parts: for each rank (n,) int64, its row numbers, ascending; and the unit of each row, None: each row
            is a unit.
        labels: (N,) int64, the unit of each row; None: each row is a unit.
        lengths: (N,) int64, tokens per row.
        options: the options.
        calls: number of permutations drawn before; it seeds the next ones.
        epochs: passes, ≥ 1.
        forest: keeps the rows of a tree in one micro-batch; None: each row is its own tree.
        came: number of the first row that was carried from an earlier batch; carried rows are the last ones,
            the oldest first. None: no row was carried.

    Returns:
        The plans by rank and pass.

    Raises:
        BatchError: as :func:`shuffle_split` and :func:`make_plan`; or ranks have different numbers of
            minibatches.
    """

    # 1. The order of each rank and pass, from indices into its rows to row numbers.
    def cut_of(rank: int, rows: Tensor, units: Ids | None, call: int) -> Cut:
        generator = torch.Generator().manual_seed(stream_seed("split", options.seed, call))
        how = options.minibatches, options.minibatch_size, options.remainder, options.shuffle
        carried = 0 if came is None else int((rows >= came).sum())
        with _rank_in_errors(rank, len(parts)):
            cut = cut_order(len(rows), units, *how, generator, carried)
        return Cut(rows.index_select(0, cut.order), cut.sizes, rows.index_select(0, cut.left))

    cuts = [[cut_of(rank, *part, calls)] for rank, part in enumerate(parts)]
    if options.remainder == "carry":
        fewest = min((len(first.sizes) for (first,) in cuts if first.sizes), default=0)
        cuts = [[_first_steps(first, fewest)] for (first,) in cuts]
    for rank, ((rows, units), own) in enumerate(zip(parts, cuts, strict=True)):
        # Later passes permute the remaining rows, as if the carried rows had not come.
        if options.remainder == "carry" and len(own[0].left):
            rows = own[0].order.sort().values
            units = None if labels is None else Ids(labels.index_select(0, rows))
        own += [cut_of(rank, rows, units, call) for call in range(calls + 1, calls + epochs)]
    # 2. The micro-batches of each rank, and then the same number of them on all ranks.
    if options.max_tokens is not None and options.remainder == "drop":
        cuts = fit_budget(cuts, labels, lengths, options)
    assigned = [[assign_minibatches(cut, lengths, options, forest) for cut in own] for own in cuts]
    if len(parts) > 1:
        steps = [len(own[0]) for own in assigned]
        if options.minibatches is None and len(set(steps) - {0}) > 1:
            raise BatchError(
                f"all ranks must take the same number of optimiser steps; they have {steps} minibatches, by "
                "rank: give all ranks the same number of units, or set minibatches=K instead of "
                "minibatch_size"
            )
        counts = [[[len(each.sizes[0]) for each in plan] for plan in own] for own in assigned]
        of_passes = [list(map(max, zip_longest(*own, fillvalue=0))) for own in zip(*counts, strict=True)]
        for own, own_assigned in zip(cuts, assigned, strict=True):
            for epoch, most in enumerate(of_passes):
                sizes = own[epoch].sizes
                own[epoch] = own[epoch]._replace(sizes=sizes + [0] * (len(most) - len(sizes)))
                # If this rank has fewer micro-batches in one step, all steps of the pass are assigned again.
                # With `most` as the multiple, their number is rounded up to exactly `most`.
                if [len(each.sizes[0]) for each in own_assigned[epoch]] != most:
                    own_assigned[epoch] = assign_minibatches(own[epoch], lengths, options, forest, most)
    # 3. One plan for each rank and pass.
    firsts = [_first_rows(of_pass) for of_pass in zip(*cuts, strict=True)]
    plans = []
    for rank, (own, own_assigned) in enumerate(zip(cuts, assigned, strict=True)):
        with _rank_in_errors(rank, len(parts)):
            passes = zip(own, own_assigned, firsts, strict=True)
            plans.append([make_plan(cut, rows, options, first) for cut, rows, first in passes])
    return plans


def _first_steps(cut: Cut, steps: int) -> Cut:
    """The first minibatches of a cut. The rows of its other minibatches are left over, too."""
    stop = sum(cut.sizes[:steps])
    return Cut(cut.order[:stop], cut.sizes[:steps], torch.cat([cut.order[stop:], cut.left]))


def _first_rows(cuts: Sequence[Cut]) -> list[Tensor]:
    """(1,) for each minibatch of a pass: its first row, of the first rank that has one. `cuts`: by rank."""
    by_rank = [cut.order.split(cut.sizes) if cut.sizes else () for cut in cuts]
    return [torch.cat(rows)[:1] for rows in zip(*by_rank, strict=True)]


@contextmanager
def _rank_in_errors(rank: int, ranks: int) -> Iterator[None]:
    """Add the rank to the message of an error, if there are several ranks."""
    try:
        yield
    except BatchError as err:
        if ranks > 1:
            err.more += f" (These are the rows of rank {rank}.)"
        raise


def fit_budget(
    cuts: Sequence[Sequence[Cut]], labels: Tensor | None, lengths: Tensor, options: CutOptions
) -> list[list[Cut]]:
    """Drop the last units of minibatches that need more micro-batches than a rank has rows.

    All ranks need the same number of micro-batches, and each micro-batch needs a row. A rank with n rows can
    fill n micro-batches. The limit is the smallest n of the ranks that take the step. A rank that needs more
    micro-batches to keep the budget drops units, from the end of its permutation. This repeats until no limit
    changes, because a rank that drops rows can fill fewer micro-batches. A minibatch with limit 0 is dropped
    on all ranks.

    For example, ``max_tokens`` is 10, rank 0 has three rows of 6 tokens, and rank 1 has two rows of 5 tokens.
    Rank 0 needs three micro-batches and can fill three. Rank 1 needs one and can fill two. So the limit is 2,
    and rank 0 drops its last row.

    Args:
        cuts: the cuts, by rank and pass.
        labels: (N,) int64, the unit of each row; None: each row is a unit.
        lengths: (N,) int64, tokens per row.
        options: the options, with `max_tokens`.

    Returns:
        The cuts, with the dropped rows in `left`.

    Raises:
        BatchError: a rank has no minibatch left.
    """

    def capacity(rows: Tensor) -> int:
        """Micro-batches per rank that these rows can fill."""
        return len(rows) // options.ranks

    def needed(rows: Tensor) -> int:
        """Micro-batches per rank that these rows need to keep the budget."""
        own = lengths.index_select(0, rows)
        return bins_within(own, options.max_tokens or 1, multiple_of=options.ranks) // options.ranks

    def shorten(rows: Tensor, limit: int) -> Tensor:
        """The longest run of leading units that keeps the budget in `limit` micro-batches per rank."""
        units = torch.ones_like(rows)
        if labels is not None:
            units = torch.unique_consecutive(labels.index_select(0, rows), return_counts=True)[1]
        ends = [0, *units.cumsum(0).tolist()]
        return rows[: ends[bisect_right(ends, limit, key=lambda end: needed(rows[:end])) - 1]]

    # By rank, the minibatches of all passes, one after the other.
    minibatches = [[rows for cut in own if cut.sizes for rows in cut.order.split(cut.sizes)] for own in cuts]
    most: list[int] = []
    while True:
        capacities = zip_longest(*([capacity(rows) for rows in own] for own in minibatches))
        fewest = [min(count for count in each if count is not None) for each in capacities]
        if fewest == most:
            break
        most = fewest
        minibatches = [  # not strict: a rank may have fewer minibatches than there are steps
            [shorten(rows, limit) for rows, limit in zip(own, most, strict=False)] for own in minibatches
        ]
    fitted: list[list[Cut]] = []
    for own, mine in zip(cuts, minibatches, strict=True):
        fitted.append([])
        kept = iter(zip(mine, most, strict=False))
        for cut in own:
            held = [rows for rows, limit in islice(kept, len(cut.sizes)) if limit > 0]
            if cut.sizes and not held:
                raise BatchError(
                    "every minibatch has fewer rows than micro-batches, so remainder='drop' would drop all "
                    f"{len(cut.order)} rows: raise max_tokens, or set {{remainder=pad}}"
                )
            together = torch.cat([cut.order[:0], *held])
            out = cut.order[~torch.isin(cut.order, together)]
            fitted[-1].append(Cut(together, [len(rows) for rows in held], torch.cat([out, cut.left])))
    return fitted

"""Items to bins so that the bins cost the same: by equal counts, or under a budget.

The time of a step is that of its heaviest bin, so that is what becomes light. An item here is a row, a
rollout or a sequence; its cost is what it takes to train it, in any unit: tokens, or tokens squared. Many
items are assigned and swapped as tensors. Where that does not keep a budget in as few bins as there could be,
items are packed one by one: which bin one fits depends on all before it, nothing there gains from tensors,
and bins are lists of item numbers in plain Python.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace, nsmallest

import torch
from torch import Tensor

from headrace.transforms.errors import BatchError, listing
from headrace.transforms.ids import stable_order
from headrace.transforms.options import at_least, takes_options

Bins = list[list[int]]
CLOSE = 5e-4  # of the mean; a step does not feel less
COMPARED = 64  # items of a bin that are compared in a round: 64² differences are as good as all
ROUNDS = 256  # no batch that was seen needs a tenth; a bin that one giant fills could use thousands
PARTNERS = 8  # light bins that the heaviest tries before it gives up
FEW = 256  # items that are packed one by one in less time than it takes to assign and swap them
EXACT = 2**53  # below which sums of integers are exact as floats


@takes_options
def balance_evenly(costs: Tensor, bins: int) -> Tensor:
    """Put n items into bins of equal count and about equal cost.

    Items are assigned by descending cost in snake order. Then each bin above the mean, the heaviest first,
    swaps one item with a bin at the other end, the one that halves their difference best, round after round
    until max/mean − 1 ≤ 5e-4 or the heaviest bin gains nothing from the lightest. With 32 items a bin or
    more, max/mean − 1 stays below 1e-3 unless a few items outweigh a bin. The same input gives the same bins.

    Args:
        costs: (n,) int64 or float64 ≥ 0 on the CPU, any unit; counted in float64.
        bins: B ≥ 1.

    Returns:
        (n,) int64, the bin of each item: ⌊n/B⌋ or ⌈n/B⌉ items in each. With n < B the last bins are empty.

    Raises:
        BatchError: another shape, dtype or device, or a cost that is negative or not finite.
        ValueError: B < 1.

    Example:
        >>> balance_evenly(torch.tensor([8, 7, 2, 1]), 2).tolist()
        [0, 1, 1, 0]
    """
    at_least("bins", bins, 1)
    _check(costs, "costs", (torch.int64, torch.float64))
    return _deal_and_swap(costs, bins, stable_order(-costs))


@takes_options
def balance_within(
    lengths: Tensor, budget: int, *, multiple_of: int = 1, costs: Tensor | None = None
) -> Tensor:
    """Put n items into few bins whose lengths sum to at most `budget`, and of about equal cost.

    As many bins as :func:`bins_within` says, rounded up to a multiple. If their costs are as level as their
    lengths, that is all. Else each item goes to the bin of least cost that has room, by
    descending cost, or else by descending length; where even that breaks the budget, bins stay as they were
    packed. Then the heaviest bin moves or swaps items with a light one for as long as that helps and the
    budget holds. The same input gives the same bins.

    Args:
        lengths: (n,) int64 ≥ 0 on the CPU, tokens.
        budget: most tokens a bin may have, ≥ 1. A longer item gets a bin of its own.
        multiple_of: what the number of bins is a multiple of, ≥ 1; say, the number of ranks.
        costs: (n,) int64 or float64 ≥ 0 on the CPU, any unit; None: the lengths.

    Returns:
        (n,) int64, the bin of each item, 0 … B − 1. No bin is empty unless there are fewer items than B: then
        each item has its own, and the last are empty.

    Raises:
        BatchError: another shape, dtype or device, or a value that is negative or not finite.
        ValueError: an option is below 1.

    Example:
        >>> balance_within(torch.tensor([6, 5, 4, 3, 2]), 10).tolist()
        [0, 1, 0, 1, 1]
    """
    at_least("budget", budget, 1)
    at_least("multiple_of", multiple_of, 1)
    _check(lengths, "lengths", (torch.int64,))
    costs = lengths if costs is None else costs
    _check(costs, "costs", (torch.int64, torch.float64))
    if len(costs) != len(lengths):
        raise BatchError(f"every item needs a cost; got {len(costs)} for {len(lengths)} lengths")
    over = lengths > budget
    alone, rest = int(over.sum()), (~over).nonzero().flatten()
    tokens, prices = lengths[rest], costs[rest]
    bins, home = _few_bins(tokens, budget, alone, multiple_of)
    if len(rest) <= bins:
        return torch.arange(len(lengths))
    if not _is_level(home, prices, bins):
        home = _level_one_by_one(home, tokens, prices, bins, budget)
    bin_of = torch.empty_like(lengths)
    bin_of[over], bin_of[rest] = torch.arange(alone), home + alone
    return bin_of


def bins_within(lengths: Tensor, budget: int, *, multiple_of: int = 1) -> int:
    """How many bins :func:`balance_within` needs.

    Never more than first fit fills, in the order given or by descending length; so at most 11/9 of the fewest
    possible and 6/9 of a bin (doi:10.1007/978-3-540-74450-4_1), before rounding.

    Args:
        lengths: (n,) int64 ≥ 0 on the CPU, tokens.
        budget: most tokens a bin may have, ≥ 1.
        multiple_of: what their number is a multiple of, ≥ 1.

    Example:
        >>> bins_within(torch.tensor([6, 5, 4, 3, 2, 11]), 10)
        3
    """
    over = lengths > budget
    alone = int(over.sum())
    return alone + _few_bins(lengths[~over], budget, alone, multiple_of)[0]


def _few_bins(length: Tensor, budget: int, alone: int, multiple_of: int) -> tuple[int, Tensor]:
    """How many bins items need that are within the budget, and the bin of each, (m,) int64; none is empty.

    Together with those that are `alone` the bins are a multiple. Where items are few, or where assigning and
    swapping does not do with the least number there could be, first fit says how many.
    """

    def rounded(bins: int) -> int:
        return -(-(alone + bins) // multiple_of) * multiple_of - alone

    total, least = float(length.double().sum()), 0
    if total < EXACT:
        half = int((length > budget // 2).sum())  # no two of them go together
        least = rounded(max(math.ceil(total / budget), half, min(1, len(length))))
        if len(length) <= least:
            return least, torch.arange(len(length))
        if len(length) > FEW:
            home = _deal_within(length, least, budget)
            if _heaviest(home, length) <= budget:
                return least, home
    items = length.tolist()
    packed = first_fit(stable_order(-length).tolist(), items, budget)
    if rounded(len(packed)) > least:
        packed = min(packed, first_fit(range(len(items)), items, budget), key=len)
    bins = rounded(len(packed))
    if len(items) <= bins:
        return bins, torch.arange(len(items))
    one_more_for_empty(packed, items, bins)
    return bins, _numbered(packed, len(items))


def _heaviest(home: Tensor, costs: Tensor) -> float:
    """What the heaviest bin costs."""
    return float(torch.bincount(home, costs.double()).amax())


def _is_level(home: Tensor, costs: Tensor, bins: int) -> bool:
    """Whether the heaviest bin is close to the mean, or of many items as close as a swap can bring it."""
    mean, heaviest = float(costs.double().sum()) / bins, _heaviest(home, costs)
    if heaviest <= mean * (1 + CLOSE) or len(costs) <= FEW:
        return heaviest <= mean * (1 + CLOSE)
    differences = costs.unique().diff()
    return len(differences) > 0 and heaviest < mean + float(differences.amin())


def _deal_within(costs: Tensor, bins: int, most: float) -> Tensor:
    """(n,) the bin of each item of (n,) int64 costs, of equal counts: level, and below `most` if it is found.

    Bins of items that were assigned by cost are alike: level from the first, with few differences to choose
    from. Those of items as they come have more of these.
    """
    mean = float(costs.double().sum()) / bins
    goal = min(max(mean * (1 + CLOSE), math.ceil(mean)), most)
    by_cost = _deal_and_swap(costs, bins, stable_order(-costs), goal, PARTNERS)
    if _heaviest(by_cost, costs) <= goal:
        return by_cost
    as_they_come = _deal_and_swap(costs, bins, torch.arange(len(costs)), goal, PARTNERS)
    return min(by_cost, as_they_come, key=lambda home: _heaviest(home, costs))


def _deal_and_swap(
    costs: Tensor, bins: int, order: Tensor, goal: float | None = None, partners: int = 1
) -> Tensor:
    """(n,) the bin of each item, of equal counts: assigned in snake order, and swapped."""
    per_bin = -(-len(costs) // bins)
    cost = torch.cat([costs.to(torch.float64), torch.zeros(1, dtype=torch.float64)])
    assigned = torch.full((per_bin, bins), len(costs))  # a seat that stays empty has the item after the last
    assigned.view(-1)[: len(costs)] = order
    assigned[1::2] = assigned[1::2].flip(1)
    seats = assigned.t().contiguous()
    swap_until_close(seats, cost, goal, partners)
    bin_of = torch.empty_like(cost, dtype=torch.int64)
    bin_of[seats.view(-1)] = torch.arange(bins).repeat_interleave(per_bin)
    return bin_of[:-1]


def swap_until_close(seats: Tensor, cost: Tensor, goal: float | None = None, partners: int = 1) -> None:
    """Swap items between rows, in place, until none is above the goal or the heaviest gains nothing.

    In a round each row above the goal, the heaviest first, meets one from the other end. Of all their
    differences x − y it makes the swap that is nearest to half of what their costs differ by.

    Args:
        seats: (B, C) int64, contiguous, item numbers; n stands for an empty seat, which stays where it is.
        cost: (n + 1,) float64 ≥ 0, the last one 0.
        goal: what a row may cost; None: as much as makes max/mean − 1 = 5e-4.
        partners: light rows that the heaviest tries before it gives up, ≥ 1.

    Example:
        >>> seats = torch.tensor([[0, 1], [2, 3]])
        >>> swap_until_close(seats, torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).double())
        >>> seats.tolist()
        [[2, 1], [0, 3]]
    """
    bins, per_bin = seats.shape
    value = cost[seats]
    load = value.sum(1)
    goal = float(load.mean()) * (1 + CLOSE) if goal is None else goal
    value.masked_fill_(seats == len(cost) - 1, -torch.inf)  # no difference to it is of use: it stays
    step, tried = max(1, per_bin // COMPARED), 0
    for number in range(ROUNDS):
        loads, ranked = load.sort(stable=True)
        pairs = min(bins // 2, bins - int(torch.searchsorted(loads, goal, right=True)))
        if pairs == 0 or per_bin < 2:
            return
        pairs = min(pairs, bins - pairs - tried)
        light, heavy = ranked[tried : tried + pairs], ranked[bins - pairs :].flip(0)
        half = (loads[bins - pairs :].flip(0) - loads[tried : tried + pairs]) / 2
        offset = number % step
        a = value[:, offset::step].index_select(0, heavy)
        b, place = value[:, offset::step].index_select(0, light).sort(1)
        wanted = a - half.unsqueeze(1)
        nearest = torch.searchsorted((b[:, 1:] + b[:, :-1]) / 2, wanted)  # between two lies their middle
        miss = (b.gather(1, nearest) - wanted).abs_().nan_to_num_(torch.inf, torch.inf)  # two empty seats
        miss, x = miss.min(1, keepdim=True)
        y = nearest.gather(1, x)
        helped = (miss.squeeze(1) < half).nonzero().squeeze(1)
        if len(helped) == 0 or helped[0] != 0:
            if step > 1:
                step = 1  # the heaviest bin found nothing among some, so all are looked at
                continue
            tried += 1
            if tried >= min(partners, bins // 2):
                return
        else:
            tried = 0
        x_seat = heavy * per_bin + x.squeeze(1) * step + offset
        y_seat = light * per_bin + place.gather(1, y).squeeze(1) * step + offset
        here, there = x_seat[helped], y_seat[helped]
        gain = (a.gather(1, x) - b.gather(1, y)).squeeze(1)[helped]
        load.index_add_(0, heavy[helped], gain, alpha=-1).index_add_(0, light[helped], gain)
        to, source = torch.cat([here, there]), torch.cat([there, here])
        for table in (value.view(-1), seats.view(-1)):
            table[to] = table[source]


def _check(values: Tensor, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if values.ndim != 1 or values.dtype not in dtypes or values.device.type != "cpu":
        raise BatchError(
            f"{name} must be (n,) {' or '.join(map(str, dtypes))} on the CPU; got shape "
            f"{tuple(values.shape)}, {values.dtype} on {values.device}"
        )
    wrong = ((values < 0) | ~values.isfinite()).nonzero().flatten()
    if len(wrong):
        raise BatchError(
            f"{name} must be finite and at least 0; got "
            + listing(f"{values[item].item()} at {item}" for item in wrong.tolist())
        )


# -- bins under a budget --------------------------------------------------------------------------------


def first_fit(order: Sequence[int], length: Sequence[int], budget: int) -> Bins:
    """Put each item into the first bin that has room, and open one where none has; O(n log B).

    A tree holds the most room below each node; its leaves are the bins, unopened ones at full budget.

    >>> first_fit([0, 1, 2, 3], [6, 5, 4, 3], 10)
    [[0, 2], [1, 3]]
    """
    # Two neighbouring bins hold more than the budget together, so there are at most this many.
    most = min(len(order), 2 * sum(length[item] for item in order) // budget + 1)
    leaves = 1 << max(0, most - 1).bit_length()
    room = [budget] * (2 * leaves)
    bins: Bins = []
    for item in order:
        needs, node = length[item], 1
        while node < leaves:
            node *= 2
            if room[node] < needs:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= needs
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            most_room = left if left > right else right
            if room[node] == most_room:
                break
            room[node] = most_room
    return bins


def lightest_first(
    order: Sequence[int], length: Sequence[int], cost: Sequence[float], count: int, budget: int
) -> Bins | None:
    """Put each item into the bin of least cost that has room; None where none of `count` bins has.

    A bin without room waits aside until an item comes that it can hold. If lengths descend, a bin that has
    come back takes an item before it can leave again; in other orders bins may go back and forth, and
    too much of that is given up.

    >>> lightest_first([0, 1, 2], [6, 5, 4], [6, 5, 4], 2, 10)
    [[0], [1, 2]]
    """
    bins: Bins = [[] for _ in range(count)]
    room = [budget] * count
    open_bins: list[tuple[float, int, int]] = [(0, 0, number) for number in range(count)]
    aside: list[tuple[int, tuple[float, int, int]]] = []
    patience = 2 * (len(order) + count)
    for item in order:
        needs = length[item]
        while aside and -aside[0][0] >= needs:
            heappush(open_bins, heappop(aside)[1])
        while open_bins and room[open_bins[0][2]] < needs:
            entry = heappop(open_bins)
            heappush(aside, (-room[entry[2]], entry))
            patience -= 1
        if not open_bins or patience < 0:
            return None
        load, items, number = open_bins[0]
        heapreplace(open_bins, (load + cost[item], items + 1, number))
        bins[number].append(item)
        room[number] -= needs
    return bins


def _level_one_by_one(home: Tensor, length: Tensor, cost: Tensor, bins: int, budget: int) -> Tensor:
    """(m,) the bin of each item, of all `bins`: level in cost as far as that is found item by item.

    Args:
        home: bins that keep the budget, where no others are found.
        length: (m,) int64, at most the budget.
        cost: (m,).
        bins: fewer than items.
        budget: most tokens of a bin.
    """
    lengths, costs = length.tolist(), cost.tolist()
    longest_first = stable_order(-length).tolist()
    for order in (sorted(longest_first, key=costs.__getitem__, reverse=True), longest_first):
        packed = lightest_first(order, lengths, costs, bins, budget)
        if packed is not None:
            break
    else:
        packed = [[] for _ in range(bins)]
        for item, number in enumerate(home.tolist()):
            packed[number].append(item)
    even_out(packed, lengths, costs, budget, CLOSE)
    return _numbered(packed, len(costs))


def _numbered(bins: Bins, items: int) -> Tensor:
    """(m,) int64, the bin of each item."""
    home = torch.empty(items, dtype=torch.int64)
    for number, some in enumerate(bins):
        home[some] = number
    return home


def one_more_for_empty(bins: Bins, cost: Sequence[float], count: int) -> None:
    """Open bins up to `count`, in place: each takes the costliest item of the heaviest bin that has two."""
    heap = [(-sum(cost[i] for i in items), number) for number, items in enumerate(bins) if len(items) > 1]
    heapify(heap)
    while len(bins) < count:
        load, number = heappop(heap)
        items = bins[number]
        item = items.pop(max(range(len(items)), key=lambda at: cost[items[at]]))
        bins.append([item])
        if len(items) > 1:
            heappush(heap, (load + cost[item], number))


def even_out(bins: Bins, length: Sequence[int], cost: Sequence[float], budget: int, close: float) -> None:
    """Move or swap items of the heaviest bin with light ones, in place, while that helps.

    Ends where max/mean − 1 ≤ `close`, or at the latest after 16 exchanges a bin.
    """
    load = [sum(cost[item] for item in items) for items in bins]
    room = [budget - sum(length[item] for item in items) for items in bins]
    for items in bins:
        items.sort(key=cost.__getitem__)
    enough = sum(load) / len(load) * (1 + close)
    for _ in range(16 * len(bins)):
        heavy = load.index(max(load))
        if load[heavy] <= enough:
            return
        for light in nsmallest(PARTNERS, range(len(bins)), key=load.__getitem__):
            exchange = _exchange(bins, heavy, light, load[heavy] - load[light], room, length, cost)
            if exchange is not None:
                break
        else:
            return
        for item, source, to in zip(exchange, (heavy, light), (light, heavy), strict=True):
            if item is not None:
                bins[source].remove(item)
                bins[to].append(item)
                bins[to].sort(key=cost.__getitem__)
                load[source], load[to] = load[source] - cost[item], load[to] + cost[item]
                room[source], room[to] = room[source] + length[item], room[to] - length[item]


def _exchange(
    bins: Bins,
    heavy: int,
    light: int,
    gap: float,
    room: Sequence[int],
    length: Sequence[int],
    cost: Sequence[float],
) -> tuple[int, int | None] | None:
    """The items of two bins, None for no item, that swapped bring the bins' costs closest together."""
    partners: list[int | None] = [None] if len(bins[heavy]) > 1 else []
    partners += bins[light]
    costs = [0 if item is None else cost[item] for item in partners]
    best, smallest = None, gap
    for x in bins[heavy]:
        at = bisect_left(costs, cost[x] - gap / 2)
        for near in (at - 1, at):
            if 0 <= near < len(partners):
                y = partners[near]
                miss = abs(2 * (cost[x] - costs[near]) - gap)
                longer = length[x] - (0 if y is None else length[y])
                if miss < smallest and -room[heavy] <= longer <= room[light]:
                    best, smallest = (x, y), miss
    return best

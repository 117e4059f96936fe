"""Put items into bins of about equal cost: with equal counts, or under a budget.

The heaviest bin decides the time of a step, so its cost is minimised. An item is a row, a rollout or a
sequence. Its cost has any unit, such as tokens or tokens squared.

Many items are assigned and swapped as tensors. If this finds no bins within the budget, items are packed one
by one. Each placement then depends on all earlier placements, so this part is plain Python: bins are lists of
item numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace, nsmallest

import torch
from torch import Tensor

from headrace.transforms.table import BatchError, listing, stable_order
from headrace.transforms.table.options import at_least, takes_options

Bins = list[list[int]]
CLOSE = 5e-4  # accepted imbalance, as a share of the mean; less imbalance does not make a step faster
COMPARED = 64  # items per bin that a round compares; comparing more does not improve the result
ROUNDS = 256  # limit of rounds, reached if a giant item fills a bin; measured batches need less than a tenth
PARTNERS = 8  # light bins that the heaviest bin tries before the search ends
FEW = 256  # up to this number of items, packing them one by one is faster than tensors


@takes_options
def balance_evenly(costs: Tensor, bins: int) -> Tensor:
    """Put n items into bins of equal count and about equal cost.

    Items are first assigned by descending cost in snake order. Then rounds of swaps follow. In a round the
    heaviest bin is paired with the lightest, the second heaviest with the second lightest, and so on for all
    bins above (1 + 5e-4) · mean. Each pair swaps the two items that bring its costs closest. The rounds end
    when no bin is above this, when no swap with the lightest bin helps the heaviest, or after 256 rounds.
    With at least 32 items per bin, max/mean − 1 is below 1e-3 unless a few items outweigh a bin. The result
    is deterministic.

    Args:
        costs: (n,) int64 or float64 ≥ 0 on the CPU, any unit; summed in float64.
        bins: B ≥ 1.

    Returns:
        (n,) int64, the bin of each item. Bins have ⌊n/B⌋ or ⌈n/B⌉ items. With n < B the last bins are empty.

    Raises:
        BatchError: `costs` has another shape, dtype or device, or a value that is negative or not finite.
        ValueError: B < 1.

    Example:
        >>> balance_evenly(torch.tensor([8, 7, 2, 1]), 2).tolist()
        [0, 1, 1, 0]
    """
    at_least("bins", bins, 1)
    _check(costs, "costs", (torch.int64, torch.float64))
    return _assign_and_swap(costs, bins, stable_order(-costs))


@takes_options
def balance_within(
    lengths: Tensor, budget: int, *, multiple_of: int = 1, costs: Tensor | None = None
) -> Tensor:
    """Put n items into few bins of about equal cost, each with at most `budget` tokens.

    1. The number of bins is that of :func:`bins_within`.
    2. If the bins that this function finds have about equal costs, they are the result.
    3. Otherwise each item goes to the cheapest bin with room, by descending cost. If an item finds no room,
       all items are assigned by descending length. If an item finds no room again, the bins of step 1 stay.
    4. The heaviest bin moves or swaps items with a light bin, within the budget, while this lowers its cost.

    The result is deterministic.

    Args:
        lengths: (n,) int64 ≥ 0 on the CPU, tokens.
        budget: largest number of tokens per bin, ≥ 1. A longer item gets a bin of its own.
        multiple_of: the number of bins is a multiple of this, such as the number of ranks, ≥ 1.
        costs: (n,) int64 or float64 ≥ 0 on the CPU, any unit; None: the lengths.

    Returns:
        (n,) int64, the bin of each item, 0 … B − 1. With n < B each item has a bin of its own, and the last
        bins are empty. Otherwise no bin is empty.

    Raises:
        BatchError: a tensor has another shape, dtype or device, or a value that is negative or not finite.
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
    bins, bin_of_rest = _few_bins(tokens, budget, alone, multiple_of)
    if len(rest) <= bins:
        return torch.arange(len(lengths))
    if not _is_level(bin_of_rest, prices, bins):
        bin_of_rest = _level_one_by_one(bin_of_rest, tokens, prices, bins, budget)
    bin_of = torch.empty_like(lengths)
    bin_of[over], bin_of[rest] = torch.arange(alone), bin_of_rest + alone
    return bin_of


def bins_within(lengths: Tensor, budget: int, *, multiple_of: int = 1) -> int:
    """The number of bins that :func:`balance_within` uses.

    First fit needs at least as many bins, in the order given or by descending length. So the number before
    rounding is at most 11/9 · OPT + 6/9, with OPT the fewest bins possible
    (doi:10.1007/978-3-540-74450-4_1).

    Args:
        lengths: (n,) int64 ≥ 0 on the CPU, tokens.
        budget: largest number of tokens per bin, ≥ 1.
        multiple_of: the number of bins is a multiple of this, ≥ 1.

    Example:
        >>> bins_within(torch.tensor([6, 5, 4, 3, 2, 11]), 10)
        3
    """
    over = lengths > budget
    alone = int(over.sum())
    return alone + _few_bins(lengths[~over], budget, alone, multiple_of)[0]


def _few_bins(length: Tensor, budget: int, alone: int, multiple_of: int) -> tuple[int, Tensor]:
    """The number of bins for m items within the budget, and (m,) int64, the bin of each item.

    A bin is empty only if there are fewer items than bins. The number of bins plus `alone` is a multiple of
    `multiple_of`. First fit finds the number for up to FEW items, and if swaps exceed the budget.
    """

    def rounded(bins: int) -> int:
        return -(-(alone + bins) // multiple_of) * multiple_of - alone

    half = int((length > budget // 2).sum())  # no two of these fit into one bin
    least = rounded(max(-(-int(length.sum()) // budget), half, min(1, len(length))))
    if len(length) > max(FEW, least):
        bin_of = _assign_within(length, least, budget)
        if _heaviest(bin_of, length) <= budget:
            return least, bin_of
    items = length.tolist()
    packed = first_fit(stable_order(-length).tolist(), items, budget)
    if rounded(len(packed)) > least:
        packed = min(packed, first_fit(range(len(items)), items, budget), key=len)
    bins = rounded(len(packed))
    if len(items) <= bins:
        return bins, torch.arange(len(items))
    one_more_for_empty(packed, items, bins)
    return bins, _numbered(packed, len(items))


def _heaviest(bin_of: Tensor, costs: Tensor) -> float:
    """The cost of the heaviest bin."""
    return float(torch.bincount(bin_of, costs.double()).amax())


def _is_level(bin_of: Tensor, costs: Tensor, bins: int) -> bool:
    """Whether the heaviest bin is close to the mean or, for many items, could not be improved by a swap."""
    mean, heaviest = float(costs.double().sum()) / bins, _heaviest(bin_of, costs)
    if heaviest <= mean * (1 + CLOSE):
        return True
    if len(costs) <= FEW:
        return False
    differences = costs.unique().diff()
    return len(differences) > 0 and heaviest < mean + float(differences.amin())


def _assign_within(costs: Tensor, bins: int, most: float) -> Tensor:
    """(n,) the bin of each item, in bins of equal counts. If possible, no bin costs more than `most`.

    Assigning by cost gives bins that are level from the start, but with few different swaps to choose from.
    If this misses the goal, the order given is tried, because it offers more different swaps.
    """
    mean = float(costs.double().sum()) / bins
    goal = min(max(mean * (1 + CLOSE), math.ceil(mean)), most)
    by_cost = _assign_and_swap(costs, bins, stable_order(-costs), goal, PARTNERS)
    if _heaviest(by_cost, costs) <= goal:
        return by_cost
    as_given = _assign_and_swap(costs, bins, torch.arange(len(costs)), goal, PARTNERS)
    return min(by_cost, as_given, key=lambda bin_of: _heaviest(bin_of, costs))


def _assign_and_swap(
    costs: Tensor, bins: int, order: Tensor, goal: float | None = None, partners: int = 1
) -> Tensor:
    """(n,) the bin of each item, in bins of equal counts: assign in snake order, then swap."""
    per_bin = -(-len(costs) // bins)
    cost = torch.cat([costs.to(torch.float64), torch.zeros(1, dtype=torch.float64)])
    assigned = torch.full((per_bin, bins), len(costs))  # an empty seat has item number n, of cost 0
    assigned.view(-1)[: len(costs)] = order
    assigned[1::2] = assigned[1::2].flip(1)
    seats = assigned.t().contiguous()
    swap_until_close(seats, cost, goal, partners)
    bin_of = torch.empty_like(cost, dtype=torch.int64)
    bin_of[seats.view(-1)] = torch.arange(bins).repeat_interleave(per_bin)
    return bin_of[:-1]


def swap_until_close(seats: Tensor, cost: Tensor, goal: float | None = None, partners: int = 1) -> None:
    """Swap items between bins, in place, until all are within the goal or the heaviest cannot improve.

    A round pairs the bins above the goal, heaviest first, with the lightest bins, lightest first. Each pair
    swaps the items x and y whose cost difference is nearest to half the difference of the two bins.

    Args:
        seats: (B, C) int64, contiguous: the item numbers of each bin. An empty seat has number n, and stays.
        cost: (n + 1,) float64 ≥ 0, the cost of each item; the last is 0.
        goal: largest accepted cost of a bin; None: mean · (1 + 5e-4).
        partners: light bins that the heaviest tries before the search ends, ≥ 1.

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
    value.masked_fill_(seats == len(cost) - 1, -torch.inf)  # an empty seat is then never swapped
    step, tried = max(1, per_bin // COMPARED), 0
    for number in range(ROUNDS):
        loads, ranked = load.sort(stable=True)
        pairs = min(bins // 2, bins - int(torch.searchsorted(loads, goal, right=True)))
        if pairs == 0:
            return
        pairs = min(pairs, bins - pairs - tried)  # so that no bin is in two pairs
        light, heavy = ranked[tried : tried + pairs], ranked[bins - pairs :].flip(0)
        half = (loads[bins - pairs :].flip(0) - loads[tried : tried + pairs]) / 2
        offset = number % step
        a = value[:, offset::step].index_select(0, heavy)
        b, place = value[:, offset::step].index_select(0, light).sort(1)
        wanted = a - half.unsqueeze(1)
        nearest = torch.searchsorted((b[:, 1:] + b[:, :-1]) / 2, wanted)  # by the midpoints between values
        miss = (b.gather(1, nearest) - wanted).abs_().nan_to_num_(torch.inf, torch.inf)  # NaN: empty seats
        miss, x = miss.min(1, keepdim=True)
        y = nearest.gather(1, x)
        # The swap moves more than 0 and less than the gap, so both bins end below the heavier one.
        helped = (miss.squeeze(1) < half).nonzero().squeeze(1)
        if len(helped) == 0 or helped[0] != 0:  # pair 0 has the heaviest bin
            if step > 1:
                step = 1  # no swap among the sampled items helped the heaviest bin, so compare all items
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
    """Put each item into the first bin that has room, or into a new one; O(n log B).

    The bins are the leaves of a binary tree. Each node stores the largest room of the bins below it. A bin
    that is not open yet has room for the complete budget.

    >>> first_fit([0, 1, 2, 3], [6, 5, 4, 3], 10)
    [[0, 2], [1, 3]]
    """
    # Two neighbouring bins together hold more than the budget, which limits the number of bins.
    most = min(len(order), 2 * sum(length[item] for item in order) // budget + 1)
    leaves = 1 << max(0, most - 1).bit_length()
    room = [budget] * (2 * leaves)
    bins: Bins = []
    for item in order:
        needs, node = length[item], 1
        while node < leaves:
            node *= 2  # the left half first, because the first bin with room is wanted
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
            if room[node] == most_room:  # then nothing above changes
                break
            room[node] = most_room
    return bins


def lightest_first(
    order: Sequence[int], length: Sequence[int], cost: Sequence[float], count: int, budget: int
) -> Bins | None:
    """Put each item into the cheapest of `count` bins that has room; None if an item finds no room.

    A bin without room is set aside until an item fits again. Unless lengths descend, a bin may be set aside
    many times. So the function also returns None after too many of these moves.

    >>> lightest_first([0, 1, 2], [6, 5, 4], [6, 5, 4], 2, 10)
    [[0], [1, 2]]
    """
    bins: Bins = [[] for _ in range(count)]
    room = [budget] * count
    # (cost, items, number): of bins with equal cost, the one with fewer items is taken.
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


def _level_one_by_one(bin_of: Tensor, length: Tensor, cost: Tensor, bins: int, budget: int) -> Tensor:
    """(m,) the bin of each item: even out the costs of the bins, item by item.

    Args:
        bin_of: (m,) int64, bins that keep the budget; used if no others are found.
        length: (m,) int64, at most the budget.
        cost: (m,), the cost of each item.
        bins: fewer than items.
        budget: largest number of tokens per bin.
    """
    lengths, costs = length.tolist(), cost.tolist()
    longest_first = stable_order(-length).tolist()
    for order in (sorted(longest_first, key=costs.__getitem__, reverse=True), longest_first):
        packed = lightest_first(order, lengths, costs, bins, budget)
        if packed is not None:
            break
    else:
        packed = [[] for _ in range(bins)]
        for item, number in enumerate(bin_of.tolist()):
            packed[number].append(item)
    even_out(packed, lengths, costs, budget, CLOSE)
    return _numbered(packed, len(costs))


def _numbered(bins: Bins, items: int) -> Tensor:
    """(m,) int64, the bin of each item."""
    bin_of = torch.empty(items, dtype=torch.int64)
    for number, members in enumerate(bins):
        bin_of[members] = number
    return bin_of


def one_more_for_empty(bins: Bins, cost: Sequence[float], count: int) -> None:
    """Add bins up to `count`, in place. Each gets the costliest item of the heaviest bin of several items."""
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
    """Move or swap items between the heaviest bin and light bins, in place, while this lowers its cost.

    Ends when max/mean − 1 ≤ `close`, at the latest after 16 exchanges per bin.
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
    """The two items whose swap brings the costs of two bins closest. None as the second item means a move.

    For each heavy item, only its two nearest partners by cost are tried. Returns None if none of them fits
    the budget and brings the costs closer.
    """
    partners = [None, *bins[light]]  # to move the only item of a bin never brings the costs closer
    costs = [0 if item is None else cost[item] for item in partners]  # ascending: `even_out` sorts bins
    best, smallest = None, gap
    for x in bins[heavy]:
        # A partner of this cost would make both bins equal; the nearest ones are on its two sides.
        at = bisect_left(costs, cost[x] - gap / 2)
        for near in (at - 1, at):
            if 0 <= near < len(partners):
                y = partners[near]
                miss = abs(2 * (cost[x] - costs[near]) - gap)
                # The cheaper item may be the longer one, so the budget of both bins is checked.
                longer = length[x] - (0 if y is None else length[y])
                if miss < smallest and -room[heavy] <= longer <= room[light]:
                    best, smallest = (x, y), miss
    return best

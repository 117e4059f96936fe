"""Items to bins that hold no more than a budget, as lists of item numbers in plain Python.

Which bin an item fits depends on all items before it, so nothing here gains from tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace, nsmallest

Bins = list[list[int]]
PARTNERS = 8  # light bins that the heaviest tries before it gives up


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

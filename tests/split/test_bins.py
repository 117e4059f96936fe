"""Bins are those of plain loops, and as even as those of Karmarkar and Karp."""

from __future__ import annotations

import math
import re
from itertools import product
from random import Random

import pytest
import torch
from first_fits import plain_first_fit
from karmarkar_karp import imbalance, largest_differencing, lengths_of

from headrace.transforms import BatchError
from headrace.transforms.split.bins import (
    balance_evenly,
    balance_within,
    bins_within,
    even_out,
    lightest_first,
    swap_until_close,
)


def column(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def sums(held, values):
    return [sum(values[item] for item in items) for items in held]


def items_of(bin_of, bins):
    """The items of each bin, ascending."""
    return [[item for item, number in enumerate(bin_of.tolist()) if number == each] for each in range(bins)]


def drawn(random, count, giants):
    """Different numbers with exact sums, so that no two swaps are equally good. Giants outweigh a bin."""
    if not giants:
        return random.sample(range(2**16, 2**22), count)
    return [int(2 ** (20 * random.random())) * 2**10 + number for number in range(count)]


# -- bins of equal counts ---------------------------------------------------------------------------------


def in_snake_order(order, bins):
    held = [[] for _ in range(bins)]
    for place, item in enumerate(order):
        row, seat = divmod(place, bins)
        held[bins - 1 - seat if row % 2 else seat].append(item)
    return held


def swap_by_loops(held, cost, goal, partners=1):
    """The rounds of swaps. Each item of a heavy bin is compared with each item of a light bin."""
    bins, step, tried = len(held), max(1, max(map(len, held)) // 64), 0
    for number in range(256):
        load = sums(held, cost)
        ranked = sorted(range(bins), key=load.__getitem__)
        pairs = min(bins // 2, sum(each > goal for each in load))
        if pairs == 0:
            break
        swaps = []
        for pair in range(min(pairs, bins - pairs - tried)):
            heavy, light = ranked[-1 - pair], ranked[tried + pair]
            half = (load[heavy] - load[light]) / 2
            misses = [
                (abs(cost[held[heavy][x]] - cost[held[light][y]] - half), x, y)
                for x in range(number % step, len(held[heavy]), step)
                for y in range(number % step, len(held[light]), step)
            ]
            miss, x, y = min(misses, default=(half, 0, 0))
            swaps.append((heavy, x, light, y) if miss < half else None)
        if swaps[0] is not None:
            tried = 0
        elif step > 1:  # of the items compared so far, none helps the heaviest bin
            step = 1
            continue
        elif (tried := tried + 1) == min(partners, bins // 2):
            break
        for heavy, x, light, y in filter(None, swaps):
            held[heavy][x], held[light][y] = held[light][y], held[heavy][x]


SIZES = [(0, 3), (2, 3), (3, 3), (7, 1), (9, 3), (23, 5), (40, 4), (97, 12), (150, 2), (261, 2)]


@pytest.mark.parametrize("giants", [False, True])
def test_bins_of_equal_counts_are_those_of_loops(giants):
    for count, bins in SIZES:
        costs = drawn(Random(count), count, giants)
        held = in_snake_order(sorted(range(count), key=lambda item: -costs[item]), bins)
        swap_by_loops(held, costs, sum(costs) / bins * (1 + 5e-4))
        for dtype in (torch.int64, torch.float64):
            found = balance_evenly(column(costs, dtype), bins)
            assert items_of(found, bins) == [sorted(items) for items in held], (count, bins)


@pytest.mark.parametrize("partners", [1, 2, 3, 8])
def test_the_heaviest_bin_tries_as_many_light_bins_as_allowed(partners):
    """The largest accepted cost is one that a bin has, or below the mean, which no swap reaches."""
    for seed, bins in product(range(6), (1, 2, 5, 8)):
        random = Random(seed)
        count = random.randint(2 * bins, 4 * bins)
        costs = drawn(random, count, seed % 2)
        held = in_snake_order(random.sample(range(count), count), bins)
        goal = sorted(sums(held, costs))[bins // 2] if seed < 3 else 0.0
        most = max(map(len, held))
        seats = column([[*items, *[count] * (most - len(items))] for items in held])
        swap_until_close(seats, column([*costs, 0], torch.float64), goal, partners)
        swap_by_loops(held, costs, goal, partners)
        assert [[item for item in items if item < count] for items in seats.tolist()] == held, (seed, bins)


def test_a_search_ends_after_256_rounds():
    """Each round swaps an item of cost 1 with an item of cost 0. 599 such swaps would be possible."""
    cost = column([5000, *[1] * 599, 600, 600, *[0] * 598, 0], torch.float64)
    seats = torch.arange(1200).view(2, 600)
    swap_until_close(seats, cost)
    assert cost[seats].sum(1).tolist() == [5000 + 599 - 256, 1200 + 256]


@pytest.mark.slow
def test_bins_of_equal_counts_are_as_even_as_karmarkar_and_karp():
    for kind, bins, large in product(("lognormal", "bimodal", "uniform"), (2, 8, 64), (False, True)):
        costs = lengths_of(kind, 8192 if large else 32 * bins, bins)
        ours = imbalance(costs, balance_evenly(costs, bins), bins)
        oracle = column(largest_differencing(costs.tolist(), bins, equal_count=True))
        assert ours <= 1e-3
        assert ours <= imbalance(costs, oracle, bins) + 1e-3


# -- bins under a budget ----------------------------------------------------------------------------------


def first_fit_by_loops(order, length, budget):
    held = []
    for item in order:
        room = (items for items in held if sums([items], length)[0] + length[item] <= budget)
        items = next(room, None)
        if items is None:
            held.append(items := [])
        items.append(item)
    return held


def lightest_by_loops(order, length, cost, bins, budget):
    """The cheapest bin with room takes the item: of equally cheap ones, that with the fewest items."""
    held = [[] for _ in range(bins)]
    for item in order:
        room = [items for items in held if sums([items], length)[0] + length[item] <= budget]
        if not room:
            return None
        min(room, key=lambda items: (sums([items], cost), len(items))).append(item)
    return held


def even_out_by_loops(held, length, cost, budget, close):
    """Exchange an item of the heaviest bin for an item of a light bin, or for nothing (None)."""
    cost, length = {None: 0} | dict(enumerate(cost)), {None: 0} | dict(enumerate(length))
    for _ in range(16 * len(held)):
        load, used = sums(held, cost), sums(held, length)
        heavy = load.index(max(load))
        if load[heavy] <= sum(load) / len(load) * (1 + close):
            return
        for light in sorted(range(len(held)), key=load.__getitem__)[:8]:
            gap, best = load[heavy] - load[light], []
            others = [*held[light], None]
            for x in sorted(held[heavy], key=cost.get):
                wanted = cost[x] - gap / 2
                below = [y for y in others if cost[y] < wanted]
                above = [y for y in others if cost[y] >= wanted]
                nearest = [max(below, key=cost.get)] if below else []
                nearest += [min(above, key=cost.get)] if above else []
                best += [
                    (abs(2 * (cost[x] - cost[y]) - gap), x, y)
                    for y in nearest
                    if used[light] + length[x] - length[y] <= budget
                    if used[heavy] - length[x] + length[y] <= budget
                ]
            miss, x, y = min(best, key=lambda each: each[0], default=(gap, None, None))
            if miss < gap:
                break
        else:
            return
        held[heavy].remove(x)
        held[light].append(x)
        if y is not None:
            held[light].remove(y)
            held[heavy].append(y)


def within_by_loops(length, budget, multiple, cost):
    """The bins of `balance_within`: their number, and then their items, step by step."""
    rest, over = (
        [item for item, each in enumerate(length) if (each > budget) == long] for long in (False, True)
    )
    own, price = [length[item] for item in rest], [cost[item] for item in rest]
    # 1. First fit, by descending length or as given, or fewer bins that swaps find for many items.
    least = max(math.ceil(sum(own) / budget), sum(2 * each > budget for each in own), min(1, len(own)))
    least += -(least + len(over)) % multiple
    held = None
    if len(own) > 256:
        orders = sorted(range(len(own)), key=lambda item: -own[item]), range(len(own))
        mean = sum(own) / least
        goal, tries = min(max(mean * (1 + 5e-4), math.ceil(mean)), budget), []
        for order in orders:
            tries.append(in_snake_order(order, least))
            swap_by_loops(tries[-1], own, goal, 8)
            if max(sums(tries[-1], own)) <= goal:
                break
        held = min(tries, key=lambda each: max(sums(each, own)))
    if held is None or max(sums(held, own)) > budget:
        by_length = sorted(range(len(own)), key=lambda item: -own[item])
        held = [first_fit_by_loops(order, own, budget) for order in (by_length, range(len(own)))]
        held = min(held, key=len)
        count = len(held) + -(len(held) + len(over)) % multiple
        if count >= len(own):
            return [[item] for item in range(len(length))]
        while len(held) < count:
            items = max((items for items in held if len(items) > 1), key=lambda items: sums([items], own))
            held.append([items.pop(items.index(max(items, key=own.__getitem__)))])
    # 2. Bins with about equal costs stay. Of many items, so do bins that no swap can improve.
    mean, most = sum(price) / len(held), max(sums(held, price))
    apart = [b - a for a, b in zip(sorted({*price}), sorted({*price})[1:], strict=False)]
    if most > mean * (1 + 5e-4) and (len(own) <= 256 or most >= mean + min(apart, default=0)):
        # 3. Each item goes to the cheapest bin with room. 4. The heaviest bin exchanges items.
        by_length = sorted(range(len(own)), key=lambda item: -own[item])
        for order in (sorted(by_length, key=lambda item: -price[item]), by_length):
            if (found := lightest_by_loops(order, own, price, len(held), budget)) is not None:
                held = found
                break
        even_out_by_loops(held, own, price, budget, 5e-4)
    return [*([item] for item in over), *(sorted(rest[item] for item in items) for items in held)]


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("giants", [False, True])
def test_bins_within_a_budget_are_those_of_loops(giants, priced):
    for seed in range(60):
        random = Random(seed)
        length = drawn(random, random.randint(0, 24), giants)
        cost = drawn(random, len(length), random.random() < 0.5) if priced else length
        budget = int(max(length, default=1) * random.choice((0.3, 0.8, 1, 1.5, 3)))
        multiple = random.randint(1, 4)
        expected = within_by_loops(length, budget, multiple, cost)
        found = balance_within(
            column(length), budget, multiple_of=multiple, costs=column(cost) if priced else None
        )
        assert items_of(found, len(expected)) == expected, seed


@pytest.mark.parametrize(
    ("kind", "bins", "multiple"),
    [("level", 12, 1), ("giants", 9, 4), ("two", 40, 1), ("alike", 30, 3), ("long", 257, 1), ("none", 1, 2)],
)
def test_many_items_are_in_the_bins_of_loops(kind, bins, multiple):
    """Up to 256 items are packed one by one. More items are swapped, if this keeps the budget."""
    for count in (256, 257):
        random = Random(count)
        length = {
            "level": drawn(random, count, False),
            "giants": drawn(random, count, True),
            "two": [(3, 5)[random.random() < 0.3] * 2**17 + number for number in range(count)],
            "alike": [7] * count,
            "long": [random.randint(60, 100) for _ in range(count)],
            "none": [0] * count,
        }[kind]
        budget = max(math.ceil(sum(length) / bins), 1)
        expected = within_by_loops(length, budget, multiple, length)
        found = balance_within(column(length), budget, multiple_of=multiple)
        assert items_of(found, len(expected)) == expected, count
        assert bins_within(column(length), budget, multiple_of=multiple) == len(expected)


def test_first_fit_in_the_given_order_counts_where_it_needs_fewer_bins_than_decreasing():
    """6 + 2 + 2 and 3 + 5 + 2 fill two bins of 10. Longest first, 6 + 3 and 5 + 2 + 2 leave a 2 over."""
    given = [6, 2, 3, 5, 2, 2]
    assert len(plain_first_fit(sorted(given, reverse=True), 10)) == 3
    assert bins_within(column(given), 10) == 2


@pytest.mark.parametrize("falling", [True, False])
def test_many_items_need_the_fewest_bins_possible_where_first_fit_needs_more(falling):
    """4 + 3 + 3 = 10 fills a bin. First fit puts two long items or three short items together."""
    lengths = sorted([4] * 200 + [3] * 400, reverse=falling)
    assert len(plain_first_fit(lengths, 10)) > 200
    assert bins_within(column(lengths), 10) == 200
    assert sums(items_of(balance_within(column(lengths), 10), 200), lengths) == [10] * 200


@pytest.mark.parametrize(("pairs", "found"), [(13, True), (14, False)])
def test_bins_are_set_aside_as_often_as_two_times_the_items_and_the_bins(pairs, found):
    """A long item sets six bins with room for 2 aside. After it, a short item brings them back.

    With 13 pairs, 6 · 13 = 2 · (7 + 2 · 13 − 1 + 7).
    """
    length = [*[98] * 6, 0, *[3, 0] * (pairs - 1), 3]
    cost = [*[1] * 6, 100, *[0] * (2 * pairs - 1)]
    held = lightest_first(range(len(length)), length, cost, 7, 100)
    assert (held is not None) == found
    assert held == (lightest_by_loops(range(len(length)), length, cost, 7, 100) if found else None)


def test_bins_that_are_close_enough_stay_as_they_are():
    """The costs are 11 and 9, so the heavier bin is 10 % above the mean. One swap would make them equal."""
    for close, stays in ((0.1, True), (0.09, False)):
        bins = [[0, 1], [2, 3]]
        even_out(bins, [1] * 4, [6, 5, 5, 4], 9, close)
        assert ({*bins[0]} == {0, 1}) == stays


def test_a_balance_ends_after_16_exchanges_per_bin():
    """Each exchange moves one of 200 equal items to the other bin."""
    bins = [[*range(200)], [200]]
    even_out(bins, [1] * 201, [1] * 201, 300, 0.0)
    assert [*map(len, bins)] == [200 - 32, 1 + 32]


ASKED = "costs must be (n,) torch.int64 or torch.float64 on the CPU; got shape"
FINITE = "costs must be finite and at least 0; got"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance_evenly(column([1]), 0), "bins must be an integer ≥ 1; got 0"),
        (lambda: balance_within(column([1]), 0), "budget must be an integer ≥ 1; got 0"),
        (lambda: balance_within(column([1]), 1, multiple_of=0), "multiple_of must be an integer ≥ 1; got 0"),
        (lambda: balance_evenly(column([3, -1, 0, -2]), 2), f"{FINITE} -1 at 1, -2 at 3"),
        (
            lambda: balance_evenly(column([math.nan, 2, math.inf], torch.float64), 2),
            f"{FINITE} nan at 0, inf at 2",
        ),
        (lambda: balance_evenly(column([[1]]), 2), f"{ASKED} (1, 1), torch.int64 on cpu"),
        (lambda: balance_evenly(column([1, 2], torch.int32), 2), f"{ASKED} (2,), torch.int32 on cpu"),
        (lambda: balance_evenly(column([1]).to("meta"), 2), f"{ASKED} (1,), torch.int64 on meta"),
        (
            lambda: balance_within(column([1.0], torch.float64), 2),
            "lengths must be (n,) torch.int64 on the CPU; got shape (1,), torch.float64 on cpu",
        ),
        (lambda: balance_within(column([1]), 2, costs=column([-1])), f"{FINITE} -1 at 0"),
        (
            lambda: balance_within(column([1]), 2, costs=column([])),
            "every item needs a cost; got 0 for 1 lengths",
        ),
    ],
)
def test_invalid_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$") as caught:
        call()
    assert isinstance(caught.value, BatchError) == ("integer ≥ 1" not in message)

"""Bins keep the budget and the number of items, and are as even as those of Karmarkar and Karp."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from first_fits import plain_first_fit
from hypothesis import given
from hypothesis import strategies as st
from karmarkar_karp import imbalance, largest_differencing, lengths_of

from headrace.transforms import BatchError
from headrace.transforms.split.bins import (
    balance_evenly,
    balance_within,
    bins_within,
    even_out,
    first_fit,
    lightest_first,
    one_more_for_empty,
)

COSTS = st.one_of(
    st.lists(st.integers(0, 2**62), max_size=60),
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.just(0), max_size=20),
)
LENGTHS = st.lists(st.integers(0, 30), max_size=60)


def column(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def loads(costs, found, bins):
    total = [0] * bins
    for cost, number in zip(costs, found.tolist(), strict=True):
        total[number] += cost
    return total


@given(COSTS, st.integers(1, 20))
def test_numbers_of_items_per_bin_differ_by_at_most_one(costs, bins):
    found = balance_evenly(column(costs), bins)
    assert found.shape == (len(costs),)
    assert found.dtype is torch.int64
    counts = torch.bincount(found, minlength=bins)
    assert len(counts) == bins
    assert counts.max() - counts.min() <= 1
    assert torch.equal(counts.sort(descending=True).values, counts) or len(costs) >= bins


@given(COSTS, st.integers(1, 20))
def test_swaps_never_make_the_heaviest_bin_heavier(costs, bins):
    assigned = [0] * bins
    for place, cost in enumerate(sorted(costs, reverse=True)):
        turn, seat = divmod(place, bins)
        assigned[bins - 1 - seat if turn % 2 else seat] += cost
    limit = max(assigned) * (1 + 1e-12)  # float64 sums are rounded
    assert max(loads(costs, balance_evenly(column(costs), bins), bins)) <= limit


@given(LENGTHS, st.integers(1, 40), st.integers(1, 5), st.data())
def test_balance_within_keeps_the_budget_and_the_number_of_bins(lengths, budget, multiple, data):
    size = len(lengths)
    costs = data.draw(
        st.one_of(st.none(), st.lists(st.integers(0, 2**62), min_size=size, max_size=size)), label="costs"
    )
    found = balance_within(
        column(lengths), budget, multiple_of=multiple, costs=None if costs is None else column(costs)
    )
    assert found.shape == (size,)
    bins = bins_within(column(lengths), budget, multiple_of=multiple)
    counts = torch.bincount(found, minlength=bins).tolist()
    assert len(counts) == bins
    if size < bins:
        assert counts == [1] * size + [0] * (bins - size)
    else:
        assert min(counts, default=1) >= 1
    for number, used in enumerate(loads(lengths, found, bins)):
        assert used <= budget or counts[number] == 1


@given(
    st.integers(1, 400).flatmap(
        lambda longest: (
            st.lists(st.integers(longest // 2, longest), max_size=80) | st.lists(st.integers(0, longest))
        )
    ),
    st.integers(1, 2000),
    st.integers(1, 5),
)
def test_first_fit_never_needs_fewer_bins_than_bins_within(lengths, budget, multiple):
    for order in (lengths, sorted(lengths, reverse=True)):
        needed = math.ceil(len(plain_first_fit(order, budget)) / multiple) * multiple
        assert bins_within(column(lengths), budget, multiple_of=multiple) <= needed


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
    assert loads(lengths, balance_within(column(lengths), 10), 200) == [10] * 200


@pytest.mark.parametrize("falling", [True, False])
def test_many_items_of_three_lengths_need_the_fewest_bins_possible_in_any_order(falling):
    """Some bins have four items and others five. First fit needs at least one bin more."""
    lengths = sorted([16] * 121 + [13] * 119 + [4] * 111, reverse=falling)
    least = math.ceil(sum(lengths) / 53)
    assert len(plain_first_fit(lengths, 53)) > least
    assert bins_within(column(lengths), 53) == least


def lightest_by_loops(lengths, costs, budget, count):
    """The largest cost if each item goes into the cheapest bin with room, or None if one finds no room.

    Items are in descending order of their cost or, if one finds no room, of their length.
    """
    by_length = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    for order in (sorted(by_length, key=lambda item: -costs[item]), by_length):
        room, load, items = [budget] * count, [0] * count, [0] * count
        for item in order:
            free = [number for number in range(count) if room[number] >= lengths[item]]
            if not free:
                break
            number = min(free, key=lambda each: (load[each], items[each]))
            room[number] -= lengths[item]
            load[number] += costs[item]
            items[number] += 1
        else:
            return max(load)
    return None


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=16),
    st.integers(12, 20),
    st.integers(1, 3),
)
def test_the_heaviest_bin_within_a_budget_is_no_heavier_than_by_loops(items, budget, multiple):
    lengths, costs = map(list, zip(*items, strict=True))
    found = balance_within(column(lengths), budget, multiple_of=multiple, costs=column(costs)).tolist()
    bins = [[item for item, at in enumerate(found) if at == number] for number in range(max(found) + 1)]
    heaviest = max(sum(costs[item] for item in each) for each in bins)
    if len(bins) < len(items):  # otherwise each item has a bin of its own
        limit = lightest_by_loops(lengths, costs, budget, len(bins))
        assert limit is None or heaviest <= limit


@given(LENGTHS, st.integers(1, 40))
def test_the_number_of_bins_is_within_its_bounds(lengths, budget):
    lengths = [length for length in lengths if length <= budget]
    bins = int(balance_within(column(lengths), budget).max()) + 1 if lengths else 0
    at_least = math.ceil(sum(lengths) / budget)
    halves = sum(length > budget / 2 for length in lengths)
    assert bins >= max(at_least, halves, min(1, len(lengths)))
    # The optimum is unknown. But any two neighbouring bins exceed the budget, which bounds their number.
    assert bins <= max(1, 2 * sum(lengths) / budget + 1) or not lengths


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(30, 60))
def test_first_fit_takes_the_first_bin_with_capacity(lengths, budget):
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        for items in bins:
            if sum(lengths[i] for i in items) + length <= budget:
                items.append(item)
                break
        else:
            bins.append([item])
    assert first_fit(range(len(lengths)), lengths, budget) == bins


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9).map(lambda cost: cost * 2.0**-60)), max_size=30),
    st.integers(1, 9),
    st.integers(30, 40),
)
def test_an_item_goes_into_the_cheapest_bin_with_room_for_it(items, count, budget):
    """Of equally cheap bins, the bin with the fewest items takes the item. The longest items come first."""
    items = sorted(items, reverse=True)
    bins: list[list[tuple[int, int]]] | None = [[] for _ in range(count)]
    for length, cost in items:
        room = [each for each in bins if sum(other for other, _ in each) + length <= budget]
        if not room:
            bins = None
            break
        min(room, key=lambda each: (sum(other for _, other in each), len(each))).append((length, cost))
    found = lightest_first(range(len(items)), *zip(*items, strict=True) if items else ((), ()), count, budget)
    assert (None if found is None else [[items[at] for at in each] for each in found]) == bins


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_each_further_bin_gets_the_costliest_item_of_the_heaviest_bin_of_several_items(held, data):
    count = data.draw(st.integers(len(held), sum(map(len, held))), label="count")
    cost = [each for items in held for each in items]
    numbers = iter(range(len(cost)))
    bins = [[next(numbers) for _ in items] for items in held]
    one_more_for_empty(bins, cost, count)
    while len(held) < count:
        heaviest = max((items for items in held if len(items) > 1), key=sum)
        costliest = max(heaviest)
        heaviest.remove(costliest)
        held.append([costliest])
    loads = [sum(cost[item] for item in items) for items in bins]
    assert loads == [sum(items) for items in held]


@pytest.mark.slow
def test_bins_of_equal_counts_are_as_even_as_karmarkar_and_karp():
    for kind, bins, large in product(("lognormal", "bimodal", "uniform"), (2, 8, 64), (False, True)):
        costs = lengths_of(kind, 8192 if large else 32 * bins, bins)
        ours = imbalance(costs, balance_evenly(costs, bins), bins)
        oracle = column(largest_differencing(costs.tolist(), bins, equal_count=True))
        assert ours <= 1e-3
        assert ours <= imbalance(costs, oracle, bins) + 1e-3


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=24))
def test_balancing_keeps_budget_and_items_and_empties_no_bin(items):
    length, cost, place = zip(*items, strict=True)
    bins = [[item for item, at in enumerate(place) if at == number] for number in sorted(set(place))]
    budget = max(sum(length[item] for item in members) for members in bins)
    before = max(sum(cost[item] for item in members) for members in bins)
    even_out(bins, length, cost, budget, 1e-4)
    assert sorted(item for members in bins for item in members) == list(range(len(items)))
    assert all(bins)
    assert max(sum(length[item] for item in members) for members in bins) <= budget
    assert max(sum(cost[item] for item in members) for members in bins) <= before


def test_bins_that_are_close_enough_stay_as_they_are():
    """The costs are 11 and 9, so the heavier bin is 10 % above the mean. One swap would make them equal."""
    for close, stays in ((0.1, True), (0.09, False)):
        bins = [[0, 1], [2, 3]]
        even_out(bins, [1] * 4, [6, 5, 5, 4], 9, close)
        assert ({*bins[0]} == {0, 1}) == stays


FEW = st.lists(st.integers(1, 30), min_size=6, max_size=9)


@given(FEW, FEW)
def test_bins_that_one_swap_makes_equal_are_equal_after_one_swap(left, right):
    """Two bins are made equal by one more item; then their first items are swapped."""
    gap = sum(left) - sum(right)
    left, right = [*left, max(-gap, 0)], [*right, max(gap, 0)]
    cost, start = [*left, *right], len(left)
    bins = [[start, *range(1, start)], [0, *range(start + 1, len(cost))]]
    before = [{*items} for items in bins]
    even_out(bins, [1] * len(cost), cost, 100, 0.0)
    assert sum(cost[item] for item in bins[0]) == sum(left)
    assert len({*bins[0]} ^ before[0]) <= 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance_evenly(column([1]), 0), "bins must be an integer ≥ 1; got 0"),
        (lambda: balance_within(column([1]), 0), "budget must be an integer ≥ 1; got 0"),
        (lambda: balance_within(column([1]), 1, multiple_of=0), "multiple_of must be an integer ≥ 1; got 0"),
        (lambda: balance_evenly(column([3, -1]), 2), "costs must be finite and at least 0; got -1 at 1"),
        (lambda: balance_evenly(column([math.nan], torch.float64), 2), "got nan at 0"),
        (lambda: balance_evenly(column([[1]]), 2), r"costs must be \(n,\).*got shape \(1, 1\)"),
        (
            lambda: balance_within(column([1.0], torch.float64), 2),
            "lengths must be .* torch.int64 on the CPU",
        ),
        (lambda: balance_within(column([1]), 2, costs=column([])), "every item needs a cost; got 0 for 1"),
    ],
)
def test_invalid_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, BatchError) or "integer ≥ 1" in message

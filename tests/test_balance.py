"""Bins that cost the same: what always holds, and how even they are next to Karmarkar and Karp's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from karmarkar_karp import imbalance, largest_differencing, lengths_of

from headrace.transforms import BatchError
from headrace.transforms.split.bins import (
    balance_evenly,
    balance_within,
    even_out,
    first_fit,
    lightest_first,
    one_more_for_empty,
)

KINDS = ("lognormal", "bimodal", "uniform")
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


def plain_first_fit_decreasing(lengths, budget):
    """The number of bins, one look at a time."""
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        for number, used in enumerate(bins):
            if used + length <= budget:
                bins[number] += length
                break
        else:
            bins.append(length if length <= budget else budget + 1)
    return len(bins)


@given(COSTS, st.integers(1, 20))
def test_counts_differ_by_at_most_one(costs, bins):
    found = balance_evenly(column(costs), bins)
    assert found.shape == (len(costs),)
    assert found.dtype is torch.int64
    counts = torch.bincount(found, minlength=bins)
    assert len(counts) == bins
    assert counts.max() - counts.min() <= 1
    assert torch.equal(counts.sort(descending=True).values, counts) or len(costs) >= bins


@given(COSTS, st.integers(1, 20))
def test_swaps_never_make_the_heaviest_bin_heavier_than_dealing(costs, bins):
    dealt = [0] * bins
    for place, cost in enumerate(sorted(costs, reverse=True)):
        turn, seat = divmod(place, bins)
        dealt[bins - 1 - seat if turn % 2 else seat] += cost
    limit = max(dealt) * (1 + 1e-12)  # sums in float64
    assert max(loads(costs, balance_evenly(column(costs), bins), bins)) <= limit


@given(st.lists(st.floats(0, 1e300, allow_subnormal=False), max_size=40), st.integers(1, 9))
def test_floats_are_costs_too(costs, bins):
    counts = torch.bincount(balance_evenly(column(costs, torch.float64), bins), minlength=bins)
    assert counts.max() - counts.min() <= 1


def test_the_example_by_hand():
    # Snake order makes 10, 6 | 9, 8 of these, 16 and 17, and no swap gains less than 1.
    found = balance_evenly(column([10, 9, 8, 6]), 2)
    assert sorted(loads([10, 9, 8, 6], found, 2)) == [16, 17]
    # 9, 5, 4, 1 | 8, 7, 3, 2 make 19 and 20, and 39 is odd.
    found = balance_evenly(column([9, 8, 7, 5, 4, 3, 2, 1]), 2)
    assert sorted(loads([9, 8, 7, 5, 4, 3, 2, 1], found, 2)) == [19, 20]
    # Snake order makes 20, 4, 3 | 6, 5, 1 of these, 27 and 12; trading 4 for 1 leaves the 20 with the least.
    found = balance_evenly(column([20, 6, 5, 4, 3, 1]), 2)
    assert sorted(loads([20, 6, 5, 4, 3, 1], found, 2)) == [15, 24]


@given(LENGTHS, st.integers(1, 40), st.integers(1, 5), st.data())
def test_within_keeps_every_promise(lengths, budget, multiple, data):
    size = len(lengths)
    costs = data.draw(
        st.one_of(st.none(), st.lists(st.integers(0, 2**62), min_size=size, max_size=size)), label="costs"
    )
    found = balance_within(
        column(lengths), budget, multiple_of=multiple, costs=None if costs is None else column(costs)
    )
    assert found.shape == (size,)
    needed = plain_first_fit_decreasing(lengths, budget)
    bins = math.ceil(needed / multiple) * multiple
    counts = torch.bincount(found, minlength=bins).tolist()
    assert len(counts) == bins
    if size < bins:
        assert counts == [1] * size + [0] * (bins - size)
    else:
        assert min(counts, default=1) >= 1
    for number, used in enumerate(loads(lengths, found, bins)):
        assert used <= budget or counts[number] == 1


@given(LENGTHS, st.integers(1, 40))
def test_first_fit_decreasing_is_within_its_bound(lengths, budget):
    lengths = [length for length in lengths if length <= budget]
    bins = int(balance_within(column(lengths), budget).max()) + 1 if lengths else 0
    at_least = math.ceil(sum(lengths) / budget)
    halves = sum(length > budget / 2 for length in lengths)
    assert bins >= max(at_least, halves, min(1, len(lengths)))
    # The optimum is not known; a packing with no two neighbours that fit in one is within twice the sum.
    assert bins <= max(1, 2 * sum(lengths) / budget + 1) or not lengths


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(30, 60))
def test_first_fit_takes_the_first_bin_with_room(lengths, budget):
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        for items in bins:
            if sum(lengths[i] for i in items) + length <= budget:
                items.append(item)
                break
        else:
            bins.append([item])
    assert first_fit(range(len(lengths)), lengths, budget) == bins


@given(COSTS, st.integers(1, 9), st.integers(1, 2**62))
def test_the_same_input_gives_the_same_bins(costs, bins, budget):
    values = column(costs)
    before = values.clone()
    assert torch.equal(balance_evenly(values, bins), balance_evenly(values, bins))
    assert torch.equal(balance_within(values, budget), balance_within(values, budget))
    assert torch.equal(values, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bins", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_equal_counts_are_as_even_as_karmarkar_and_karp(kind, bins, seed):
    for count in (32 * bins, 8192):
        costs = lengths_of(kind, count, seed)
        ours = imbalance(costs, balance_evenly(costs, bins), bins)
        oracle = column(largest_differencing(costs.tolist(), bins, equal_count=True))
        assert ours <= 1e-3
        assert ours <= imbalance(costs, oracle, bins) + 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bins", [2, 4, 8, 16, 64])
def test_counts_that_do_not_divide_are_as_even(kind, bins):
    for count in (33 * bins - 1, 4001):
        costs = lengths_of(kind, count, seed=7)
        assert imbalance(costs, balance_evenly(costs, bins), bins) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bins", [2, 4, 8, 16, 64])
def test_under_a_budget_bins_are_as_even_as_karmarkar_and_karp(kind, bins):
    for count in (32 * bins, 8192):
        lengths = lengths_of(kind, count, seed=bins)
        budget = int(lengths.sum() / bins * (1 + 1 / 64))  # so full that the longest barely have a choice
        found = balance_within(lengths, budget)
        used = int(found.max()) + 1
        assert used <= bins
        oracle = column(largest_differencing(lengths.tolist(), used, equal_count=False))
        ours = imbalance(lengths, found, used)
        assert ours <= 1e-3
        assert ours <= imbalance(lengths, oracle, used) + 1e-3


def test_one_giant_is_the_heaviest_bin_whatever_the_rest():
    # 10⁶ among 255 ones in 8 bins: the giant's bin weighs 10⁶ + 31 in every answer.
    costs = column([1] * 100 + [10**6] + [1] * 155)
    assert max(loads(costs.tolist(), balance_evenly(costs, 8), 8)) == 10**6 + 31
    # By cost alone it is alone: 255 ones go to the seven other bins.
    found = balance_within(costs, 10**6 + 10, multiple_of=8)
    assert sorted(loads(costs.tolist(), found, 8))[-2:] == [37, 10**6]


def test_a_cost_of_its_own_is_balanced_where_the_budget_leaves_room():
    lengths = lengths_of("uniform", 512)
    squares = lengths**2
    found = balance_within(lengths, int(lengths.sum() / 8 * 1.1), costs=squares, multiple_of=8)
    assert imbalance(squares, found, 8) <= 1e-3


def test_a_budget_that_is_used_up_to_the_last_token_is_kept():
    lengths = column([6, 4, 7, 3, 5, 5, 8, 2, 9, 1])
    assert loads(lengths.tolist(), balance_within(lengths, 10), 5) == [10] * 5


def test_too_long_an_item_is_alone():
    found = balance_within(column([3, 50, 0, 3, 60]), 10).tolist()
    assert found.count(found[1]) == found.count(found[4]) == 1
    assert max(found) == 2


def test_lightest_first_gives_up_where_an_item_fits_nowhere():
    assert lightest_first([0, 1, 2], [6, 6, 6], [6, 6, 6], 2, 10) is None


def test_a_bin_without_room_comes_back_for_a_shorter_item():
    # The 6 costs least but cannot take the second 5; the 4 fits it again.
    assert lightest_first([0, 1, 2, 3], [6, 5, 5, 4], [1, 9, 1, 1], 2, 10) == [[0, 3], [1, 2]]


def test_bins_are_opened_with_the_costliest_items():
    bins = [[0, 1, 2]]
    one_more_for_empty(bins, [3, 2, 1], 3)
    assert bins == [[2], [0], [1]]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=24))
def test_evening_out_keeps_budget_and_items_and_empties_no_bin(items):
    length, cost, place = zip(*items, strict=True)
    bins = [[item for item, at in enumerate(place) if at == number] for number in sorted(set(place))]
    budget = max(sum(length[item] for item in members) for members in bins)
    before = max(sum(cost[item] for item in members) for members in bins)
    even_out(bins, length, cost, budget, 1e-4)
    assert sorted(item for members in bins for item in members) == list(range(len(items)))
    assert all(bins)
    assert max(sum(length[item] for item in members) for members in bins) <= budget
    assert max(sum(cost[item] for item in members) for members in bins) <= before


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
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value, BatchError) or "integer ≥ 1" in message

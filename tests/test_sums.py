"""Sums without an order: the same bits for every order of the terms, near the sum of exact rationals."""

from __future__ import annotations

import sys
from fractions import Fraction

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.transforms.sums import _nearest, _slices, divide, exact_sum, power_of_two, sum_in_any_order

NUMBERS = st.one_of(
    st.floats(-1e6, 1e6),
    st.sampled_from([0.0, 1e-30, 1e300, -1e300, 5e-324, 0.1, 1 / 3]),
    st.sampled_from([2.0**53, 1.0, -1.0, 2.0**-53, 2.0**-54, -(2.0**-106)]),  # halfway between two floats
    st.floats(allow_nan=False, allow_infinity=False, width=32),
)


def summed(values: list[float], largest: float) -> float:
    column = torch.tensor(values, dtype=torch.float64)
    peak = torch.tensor(largest, dtype=torch.float64)
    return float(sum_in_any_order(column, torch.sum, peak=lambda: peak, terms=torch.tensor(len(values))))


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.randoms())
def test_another_order_has_the_same_bits(values, random):
    largest = max(map(abs, values))
    before = summed(values, largest)
    random.shuffle(values)
    assert summed(values, largest) == before


@example([8.016162683725481e-65, -48577.0, -999999.5090225445])  # between two floats but for the first
@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_it_is_the_float_nearest_to_the_true_sum_and_what_that_lacks(values):
    column = torch.tensor(values, dtype=torch.float64)
    high, low = exact_sum(
        column, torch.sum, peak=lambda: column.abs().amax(), terms=torch.tensor(len(values))
    )
    true = sum(map(Fraction, values))
    assert float(high) == float(true)
    lacks = true - Fraction(float(high))
    assert abs(Fraction(float(low)) - lacks) <= abs(lacks) / 2**50


@given(st.lists(st.tuples(st.integers(0, 3), NUMBERS), min_size=1, max_size=40), st.integers(0, 3))
def test_what_else_is_summed_changes_no_bit_of_a_sum(pairs, group):
    """Where a bound is shared with sums of huge numbers, slices are coarser, and nothing is lost."""
    mine = [pair for pair in pairs if pair[0] == group]

    def sums(some: list[tuple[int, float]]) -> torch.Tensor:
        label = torch.tensor([label for label, _ in some])
        values = torch.tensor([value for _, value in some], dtype=torch.float64)
        return exact_sum(
            values,
            lambda part: torch.zeros(4, dtype=torch.float64).scatter_add_(0, label, part),
            peak=lambda: values.abs().amax(),
            terms=torch.tensor(len(some)),
        ).high[group]

    if mine:
        assert float(sums(pairs)) == float(sums(mine))


@given(st.floats(-1e100, 1e100), st.integers(1, 2000))
def test_the_mean_of_equal_numbers_is_that_number_to_the_last_bit(value, count):
    column, number = torch.full((count,), value, dtype=torch.float64), torch.tensor(count)
    mean = divide(exact_sum(column, torch.sum, peak=lambda: column[0].abs(), terms=number), number)
    assert bool(((column - mean.high) - mean.low == 0).all())


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.floats(1, 3))
def test_in_three_slices_it_is_the_sum_to_a_part_in_2_52_and_2_80_of_the_largest(values, slack):
    largest = max(map(abs, values))
    true = sum(map(Fraction, values))
    bound = abs(true) / 2**52 + Fraction(largest) * len(values) / 2**80 + Fraction(5e-324)
    column, number = torch.tensor(values, dtype=torch.float64), torch.tensor(len(values))
    peak = torch.tensor(min(largest * slack, 1e300), dtype=torch.float64)
    found = _nearest([part.sum() for part in _slices(column, peak, number)]).high
    assert abs(Fraction(float(found)) - true) <= bound


@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_the_power_of_two_is_the_largest_at_or_below(value):
    found = float(power_of_two(torch.tensor(value, dtype=torch.float64)))
    if value < sys.float_info.min:
        assert found == 0.0
    else:
        assert found <= value < 2 * found or found == value

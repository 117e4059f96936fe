"""Sums without an order: the same bits for every order of the terms, near the sum of exact rationals."""

from __future__ import annotations

import sys
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms.sums import power_of_two, sum_in_any_order

NUMBERS = st.one_of(
    st.floats(-1e6, 1e6),
    st.sampled_from([0.0, 1e-30, 1e300, -1e300, 5e-324, 0.1, 1 / 3]),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
)


def summed(values: list[float], largest: float) -> float:
    column = torch.tensor(values, dtype=torch.float64)
    peak = torch.tensor(largest, dtype=torch.float64)
    return float(sum_in_any_order(column, torch.sum, peak=peak, terms=torch.tensor(len(values))))


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.randoms())
def test_another_order_has_the_same_bits(values, random):
    largest = max(map(abs, values))
    before = summed(values, largest)
    random.shuffle(values)
    assert summed(values, largest) == before


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.floats(1, 3))
def test_it_is_the_sum_to_a_part_in_2_52_and_2_80_of_the_largest(values, slack):
    largest = max(map(abs, values))
    true = sum(map(Fraction, values))
    bound = abs(true) / 2**52 + Fraction(largest) * len(values) / 2**80 + Fraction(5e-324)
    assert abs(Fraction(summed(values, min(largest * slack, 1e300))) - true) <= bound


@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_the_power_of_two_is_the_largest_at_or_below(value):
    found = float(power_of_two(torch.tensor(value, dtype=torch.float64)))
    if value < sys.float_info.min:
        assert found == 0.0
    else:
        assert found <= value < 2 * found or found == value

"""Sums that do not depend on the order of their terms, to the last bit.

A float64 sum rounds after every term, so that other orders, other layouts or other numbers of ranks end in
other bits, and a GPU, which adds by id in no order at all, in other bits each time. Here terms are cut into
slices, each of so few bits that adding it up never rounds. What is exact has no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .ids import reduce_by, sum_by

EXPONENT = 0x7FF0000000000000  # the bits of a positive float64 that are its power of two
SLICES = 3  # where nobody may look whether anything is left


class ExactSum(NamedTuple):
    """A sum of which nothing is lost."""

    high: Tensor
    """float64: the nearest to it."""
    low: Tensor
    """float64: what that lacks, to a part in 2^50."""


def exact_sum(
    values: Tensor, add: Callable[[Tensor], Tensor], *, peak: Callable[[], Tensor], terms: Tensor
) -> ExactSum:
    """Add up float64 numbers; the same numbers in another order, or among others, give the same bits.

    With m the power of two at or below the largest magnitude and n that below the number of terms, the first
    slice of a term is its nearest multiple of ``m n 2^-49``: error-free splitting, as by Rump, Ogita and
    Oishi (doi:10.1137/050645671). What is left is sliced again: on the CPU as long as anything is, which
    mostly means twice; elsewhere three times, without a device read, so that of a thousand terms each loses
    what is below 2^-130 of the largest.

    Args:
        values: float64, finite, and so is twelve times their number times the largest.
        add: the plain sum of some of them, by group say.
        peak: at least the magnitude of each term of a sum, ≥ 0; broadcasts against `values`. Only asked where
            nobody may look.
        terms: how many terms of a sum are not 0, at least; broadcasts against `values`.

    Example:
        >>> values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
        >>> bounds = {"peak": values.amax, "terms": torch.tensor(3.0)}
        >>> sums = [exact_sum(v, torch.sum, **bounds).high for v in (values, values.flip(0))]
        >>> bool(sums[0] == sums[1]), bool(values.sum() == values.flip(0).sum())
        (True, False)
    """
    if values.device.type == "cpu":  # one bound for all sums: the slices are others, and their sum is not
        cut = _slices_until_nothing_is_left(values, int(terms.amax()))
    else:
        cut = _slices(values, peak(), terms)
    return _nearest([add(part) for part in cut])


def sum_in_any_order(
    values: Tensor, add: Callable[[Tensor], Tensor], *, peak: Callable[[], Tensor], terms: Tensor
) -> Tensor:
    """:func:`exact_sum`, rounded once."""
    return exact_sum(values, add, peak=peak, terms=terms).high


def sum_by_in_any_order(first: Tensor, values: Tensor) -> Tensor:
    """(N,) per row, the exact sum of `values` (N,), float64, over the rows of its id, rounded once.

    Args:
        first: (N,) int64, the first row of each row's id.
        values: finite, as for :func:`exact_sum`.

    Example:
        >>> first, values = torch.tensor([0, 1, 0]), torch.tensor([0.5, 8.0, 1.0], dtype=torch.float64)
        >>> sum_by_in_any_order(first, values).tolist()
        [1.5, 8.0, 1.5]
    """
    return sum_in_any_order(
        values,
        lambda part: sum_by(first, part),
        peak=lambda: reduce_by(first, values.abs(), "amax"),
        terms=sum_by(first, torch.ones_like(first)),
    )


def _slices_until_nothing_is_left(values: Tensor, terms: int) -> Iterator[Tensor]:
    number, peak = 2.0 ** (max(terms, 1).bit_length() - 1), largest(values)
    rest, part = values, torch.empty_like(values)  # two buffers: an allocation costs more than a pass
    while peak > 0:  # not so where it is NaN
        large = 12 * 2.0 ** (math.frexp(peak)[1] - 1) * number
        torch.add(rest, large, out=part).sub_(large)  # no room for smaller bits, and back
        yield part
        rest = values - part if rest is values else rest.sub_(part)
        peak = largest(rest)
    if rest is values or peak != 0:
        yield rest


def _slices(values: Tensor, peak: Tensor, terms: Tensor) -> Iterator[Tensor]:
    number = power_of_two(terms.to(values.dtype))
    large, rest = power_of_two(peak) * (12 * number), values
    for _ in range(SLICES):
        first = (rest + large).sub_(large)
        yield first
        rest, large = rest - first, large * (number * 2.0**-51)


def _nearest(parts: Sequence[Tensor]) -> ExactSum:
    """The sum of a few parts, each much smaller than the one before, as two numbers."""
    if len(parts) == 1:
        return ExactSum(parts[0], torch.zeros_like(parts[0]))
    if len(parts) == 2:
        return ExactSum(*two_sum(*parts))
    for _ in parts:
        parts = _moved_up(parts)
    high, low, rest, *_ = parts
    # Between two floats, what is left says to which: Python's `math.fsum` does the same.
    next_one = high + 2 * low
    beyond = (next_one - high == 2 * low) & (low * rest.sign() > 0)
    return ExactSum(torch.where(beyond, next_one, high), torch.where(beyond, -low, low))


def _moved_up(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same sum, each part taking from those below what it has bits for; repeated, none overlap."""
    *above, last = parts
    moved: list[Tensor] = []
    for part in reversed(above):
        last, error = two_sum(part, last)
        moved.append(error)
    return [last, *reversed(moved)]


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b rounded, and what that lacks, exactly (Knuth, The Art of Computer Programming, 4.2.2).

    Example:
        >>> [float(x) for x in two_sum(*torch.tensor([1.0, 1e-20], dtype=torch.float64))]
        [1.0, 1e-20]
    """
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def divide(total: ExactSum, by: Tensor) -> ExactSum:
    """A sum divided by counts, nothing lost either: where all n terms are x, exactly x and 0.

    Example:
        >>> x, three = torch.tensor(0.1).double(), torch.tensor(3)
        >>> tenth = divide(exact_sum(x.expand(3), torch.sum, peak=lambda: x, terms=three), three)
        >>> bool(tenth.high == x), float(tenth.low)
        (True, 0.0)
    """
    high = total.high / by
    product, error = two_product(high, by.to(high.dtype))
    return ExactSum(high, ((total.high - product) - error + total.low) / by)


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a · b rounded, and what that lacks, exactly (Dekker, doi:10.1007/BF01397083)."""
    product = a * b
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _upper_half(a: Tensor) -> Tensor:
    """The upper 26 bits."""
    wide = a * (2.0**27 + 1)
    return wide - (wide - a)


def largest(values: Tensor) -> float:
    """The largest magnitude; NaN where there is one. Reads."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))  # where one is NaN, both are


def power_of_two(values: Tensor) -> Tensor:
    """The largest at or below each float64 ≥ 0; 0 for 0, and for numbers too small to have 53 bits.

    Example:
        >>> power_of_two(torch.tensor([5.0, 0.3, 0.0], dtype=torch.float64)).tolist()
        [4.0, 0.25, 0.0]
    """
    return (values.view(torch.int64) & EXPONENT).view(torch.float64)

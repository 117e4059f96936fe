"""Sums that do not depend on the order of their terms, to the last bit.

A float64 sum rounds after every term, so that other orders, other layouts or other numbers of ranks end in
other bits, and a GPU, which adds by id in no order at all, in other bits each time. Here terms are cut into
two slices, each of so few bits that adding it up never rounds. What is exact has no order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EXPONENT = 0x7FF0000000000000  # the bits of a positive float64 that are its power of two


def sum_in_any_order(
    values: Tensor, add: Callable[[Tensor], Tensor], *, peak: Tensor, terms: Tensor
) -> Tensor:
    """Add up float64 numbers; the same numbers in another order give the same bits. No device read.

    With m the power of two at or below the largest magnitude and n that below the number of terms, the first
    slice of a term is its nearest multiple of ``m n 2^-49``, and the second the nearest multiple of
    ``m n² 2^-100`` to what is left: error-free splitting, as by Rump, Ogita and Oishi
    (doi:10.1137/050645671). The rest is dropped: of a thousand terms each less than 2^-80 of the largest.

    Args:
        values: float64, finite, and so is twelve times their number times the largest.
        add: the plain sum of some of them, by group say; broadcasts against `values`.
        peak: at least the magnitude of each term of a sum, ≥ 0; broadcasts against `values`.
        terms: how many terms of a sum are not 0, at least; broadcasts against `values`.

    Returns:
        What `add` returns, float64.

    Example:
        >>> values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
        >>> bounds = {"peak": values.amax(), "terms": torch.tensor(3.0)}
        >>> sums = [sum_in_any_order(v, torch.sum, **bounds) for v in (values, values.flip(0))]
        >>> bool(sums[0] == sums[1]), bool(values.sum() == values.flip(0).sum())
        (True, False)
    """
    number = power_of_two(terms.to(values.dtype))
    large = power_of_two(peak) * (12 * number)
    first = (values + large).sub_(large)  # no room for smaller bits, and back
    rest = values - first
    large = large * (number * 2.0**-51)
    second = rest.add_(large).sub_(large)
    return add(first) + add(second)


def power_of_two(values: Tensor) -> Tensor:
    """The largest at or below each float64 ≥ 0; 0 for 0, and for numbers too small to have 53 bits.

    Example:
        >>> power_of_two(torch.tensor([5.0, 0.3, 0.0], dtype=torch.float64)).tolist()
        [4.0, 0.25, 0.0]
    """
    return (values.view(torch.int64) & EXPONENT).view(torch.float64)

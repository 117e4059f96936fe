"""Sums that do not depend on the order of their terms, to the last bit.

A float64 sum rounds after every term, so that other orders, other layouts or other numbers of ranks end in
other bits, and a GPU, which adds by id in no order at all, in other bits each time. Here terms are cut into
two slices, each of so few bits that adding it up never rounds. What is exact has no order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MANTISSA = 52  # stored bits of a float64
BIAS = 1023  # of its exponent


def sum_in_any_order(
    values: Tensor, add: Callable[[Tensor], Tensor], *, peak: Tensor, terms: Tensor
) -> Tensor:
    """Add up float64 numbers; the same numbers in another order give the same bits. No device read.

    With m a power of two above every magnitude and n one above the number of terms, the first slice of a
    term is its nearest multiple of ``m n 2^-51``, and the second the nearest multiple of ``m n² 2^-103`` to
    what is left (the error-free splitting of Rump, Ogita and Oishi, doi:10.1137/050645671). What is then left
    is dropped: for a thousand terms less than 2^-84 of the largest.

    Args:
        values: float64, finite, and so are n times their largest.
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
    spread = torch.frexp(terms.to(values.dtype)).exponent
    coarse = torch.frexp(peak).exponent + spread + 1
    first = _round_to(values, coarse)
    second = _round_to(values - first, coarse + spread - MANTISSA)
    return add(first) + add(second)


def _round_to(values: Tensor, exponent: Tensor) -> Tensor:
    """Multiples of 2^(exponent − 52), for magnitudes up to half of 2^exponent.

    Adding 1.5 · 2^exponent leaves no room for smaller bits, and taking it off again brings back the rest.
    """
    bits = (exponent.clamp(1 - BIAS, BIAS).long() + BIAS << MANTISSA) | 1 << MANTISSA - 1
    large = bits.view(torch.float64)
    return (values + large).sub_(large)

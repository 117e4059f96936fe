"""First fit as a plain loop. `balance_within` may not need more bins than first fit."""

from __future__ import annotations

from collections.abc import Sequence


def plain_first_fit(lengths: Sequence[int], budget: int) -> list[int]:
    """Put each item, in the given order, into the first bin with room. Items over the budget are alone.

    Returns:
        The sum of each bin.
    """
    bins: list[int] = []
    for length in lengths:
        for number, used in enumerate(bins):
            if used + length <= budget:
                bins[number] += length
                break
        else:
            bins.append(length)
    return bins

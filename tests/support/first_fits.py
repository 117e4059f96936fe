"""First fit, one look at a time: what a budget takes at least as few bins as."""

from __future__ import annotations

from collections.abc import Sequence


def plain_first_fit(lengths: Sequence[int], budget: int) -> list[int]:
    """Items in the order given, each to the first bin that has room; one over the budget is alone.

    Returns:
        What each bin holds.
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

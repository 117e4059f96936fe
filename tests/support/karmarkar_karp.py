"""Largest differencing, by which most trainers balance k bins, and lengths for tests."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor


def largest_differencing(costs: Sequence[float], bins: int, *, equal_count: bool) -> list[int]:
    """The bin of each item, by Karmarkar and Karp's method (1982) for `bins` bins.

    A partial solution is `bins` sets of items. The two partial solutions with the widest gap between their
    heaviest and lightest set are merged, heaviest set to lightest, until one is left. With `equal_count` the
    first ones are `bins` neighbours in order of cost, so that every set has one item and counts stay equal;
    otherwise each item is alone with empty sets.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__)
    if equal_count:
        if len(costs) % bins:
            raise ValueError(f"{len(costs)} items do not fill {bins} bins evenly")
        rows = [order[start : start + bins] for start in range(0, len(order), bins)]
    else:
        rows = [[item] for item in order]
    partials = []
    for number, row in enumerate(rows):
        sets = [(costs[item], [item]) for item in reversed(row)] + [(0, [])] * (bins - len(row))
        partials.append((sets[-1][0] - sets[0][0], number, sets))
    heapq.heapify(partials)
    while len(partials) > 1:
        _, number, wide = heapq.heappop(partials)
        _, _, other = partials[0]
        merged = [(a + b, [*x, *y]) for (a, x), (b, y) in zip(wide, reversed(other), strict=True)]
        merged.sort(key=_load, reverse=True)
        heapq.heapreplace(partials, (merged[-1][0] - merged[0][0], number, merged))
    found = [0] * len(costs)
    for _, _, sets in partials:
        for bin_number, (_, items) in enumerate(sets):
            for item in items:
                found[item] = bin_number
    return found


def _load(part: tuple[float, list[int]]) -> float:
    return part[0]


def lengths_of(kind: str, count: int, seed: int = 0) -> Tensor:
    """(count,) int64 tokens: lognormal with the median 1,100, uniform up to 16,384, or 30% long."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    chance = torch.rand(count, generator=generator)
    lengths = {
        "lognormal": (7 + 0.8 * normal).exp().clamp(max=32_768),
        "uniform": 1 + 16_383 * chance,
        "bimodal": torch.where(chance < 0.3, 12_000 + 1_500 * normal, 800 + 150 * normal),
    }
    return lengths[kind].clamp(min=1).long()


def imbalance(costs: Tensor, found: Tensor, bins: int) -> float:
    """The greatest cost of a bin, divided by the mean cost, minus 1."""
    load = torch.zeros(bins, dtype=torch.float64).index_add_(0, found, costs.double())
    return float(load.max() / load.mean()) - 1

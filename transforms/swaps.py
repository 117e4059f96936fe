"""Swaps that even out bins of equal count, all pairs of bins at once."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 5e-4  # of the mean; a step does not feel less
LOOKED_AT = 64  # items of a bin that are compared in a round: 64² differences are as good as all
ROUNDS = 256  # no batch that was seen needs a tenth; a bin that one giant fills could use thousands


def swap_until_close(seats: Tensor, cost: Tensor) -> None:
    """Swap items between rows, in place, until max/mean − 1 ≤ 5e-4 or the heaviest gains nothing.

    In a round each row above the mean, the heaviest first, meets one from the other end. Of all their
    differences x − y it makes the swap that is nearest to half of what their costs differ by.

    Args:
        seats: (B, C) int64, contiguous, item numbers; n stands for an empty seat, which stays where it is.
        cost: (n + 1,) float64 ≥ 0, the last one 0.

    Example:
        >>> seats = torch.tensor([[0, 1], [2, 3]])
        >>> swap_until_close(seats, torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).double())
        >>> seats.tolist()
        [[2, 1], [0, 3]]
    """
    bins, per_bin = seats.shape
    value = cost[seats]
    load = value.sum(1)
    goal = float(load.mean()) * (1 + CLOSE)
    value.masked_fill_(seats == len(cost) - 1, -torch.inf)  # no difference to it is of use: it stays
    step = max(1, per_bin // LOOKED_AT)
    for number in range(ROUNDS):
        loads, ranked = load.sort(stable=True)
        pairs = min(bins // 2, bins - int(torch.searchsorted(loads, goal, right=True)))
        if pairs == 0 or per_bin < 2:
            return
        light, heavy = ranked[:pairs], ranked[bins - pairs :].flip(0)
        half = (loads[bins - pairs :].flip(0) - loads[:pairs]) / 2
        offset = number % step
        a = value[:, offset::step].index_select(0, heavy)
        b, place = value[:, offset::step].index_select(0, light).sort(1)
        wanted = a - half.unsqueeze(1)
        nearest = torch.searchsorted((b[:, 1:] + b[:, :-1]) / 2, wanted)  # between two lies their middle
        miss = (b.gather(1, nearest) - wanted).abs_().nan_to_num_(torch.inf, torch.inf)  # two empty seats
        miss, x = miss.min(1, keepdim=True)
        y = nearest.gather(1, x)
        helped = (miss.squeeze(1) < half).nonzero().squeeze(1)
        if len(helped) == 0 or helped[0] != 0:
            if step == 1:
                return
            step = 1  # the heaviest bin found nothing among some, so all are looked at
            continue
        x_seat = heavy * per_bin + x.squeeze(1) * step + offset
        y_seat = light * per_bin + place.gather(1, y).squeeze(1) * step + offset
        here, there = x_seat[helped], y_seat[helped]
        gain = (a.gather(1, x) - b.gather(1, y)).squeeze(1)[helped]
        load.index_add_(0, heavy[helped], gain, alpha=-1).index_add_(0, light[helped], gain)
        to, source = torch.cat([here, there]), torch.cat([there, here])
        for table in (value.view(-1), seats.view(-1)):
            table[to] = table[source]

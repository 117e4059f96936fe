"""A seeded order of the rows, cut into optimiser steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from headrace.transforms.errors import BatchError
from headrace.transforms.ids import Ids, as_ids
from headrace.transforms.options import at_least, one_of, takes_options
from headrace.transforms.rows import Rows

Remainder = Literal["raise", "drop", "uneven", "pad", "carry"]
TOGETHER = "rows without an id would be kept together"


class Cut(NamedTuple):
    """Which row is trained in which minibatch. On the CPU."""

    order: Tensor
    """(M,) int64, row numbers in training order."""
    sizes: list[int]
    """Rows of each minibatch; they add up to M."""
    left: Tensor
    """(N − M,) int64, rows in no minibatch."""


@takes_options
def shuffle_split(
    rows: int,
    unit_id: Tensor | Sequence[int] | None = None,
    *,
    minibatches: int | None = None,
    minibatch_size: int | None = None,
    remainder: Remainder = "raise",
    shuffle: bool = True,
    generator: torch.Generator | None = None,
) -> Cut:
    """Put rows into a random order and cut it, keeping the rows of a unit together.

    A unit is a row, or all rows that share a `unit_id`, which stay in row order. With U units, K
    minibatches get ⌊U/K⌋ or ⌈U/K⌉ units each; minibatches of n units are U/n many. Orders are drawn on the
    CPU, so that they are the same on every device; `unit_id` is read from where it is.

    Args:
        rows: N.
        unit_id: (N,) integers ≥ 0, which rows stay together; None: each row is a unit.
        minibatches: K ≥ 1; give this or `minibatch_size`.
        minibatch_size: n ≥ 1 units.
        remainder: what happens to units over, when U is no multiple of K or n: ``raise``; leave out the last
            of the order, to ``drop`` or to ``carry`` them; ``uneven`` minibatches, which differ by one unit
            (K given) or end in a short one; ``pad`` is uneven here, rows are filled up when they
            are assigned.
        shuffle: False keeps the order of first rows.
        generator: source of the order, on the CPU.

    Raises:
        BatchError: there is a remainder, under ``raise``, or nothing but that, under ``drop``; a unit_id is
            missing or negative.

    Example:
        >>> shuffle_split(5, minibatches=2, remainder="uneven", shuffle=False).sizes
        [3, 2]
    """
    check_split(minibatches, minibatch_size, remainder)
    units = None
    if unit_id is not None:
        table = Rows.of(unit=as_ids(unit_id, "unit_id").cpu())
        if len(table) != rows:
            raise BatchError(f"every row needs a unit_id; got {len(table)} for {rows} rows")
        units = table.ids("unit", checked=False)
        table.require_set(units, "unit_id", TOGETHER)
    return cut_order(rows, units, minibatches, minibatch_size, remainder, shuffle, generator)


def cut_order(
    rows: int,
    units: Ids | None,
    minibatches: int | None,
    minibatch_size: int | None,
    remainder: Remainder,
    shuffle: bool,
    generator: torch.Generator | None,
) -> Cut:
    """:func:`shuffle_split` where options and ids are known to be good."""
    if rows == 0:
        nothing = torch.empty(0, dtype=torch.int64)
        return Cut(nothing, [], nothing)
    drawn = torch.randperm(rows, generator=generator) if shuffle else torch.arange(rows)
    if units is None:  # the permutation is as good as its inverse
        order, bounds = drawn, _bounds(rows, minibatches, minibatch_size, remainder)
    elif units.n == rows:  # each row takes the place that it has drawn
        order = torch.empty_like(drawn).scatter_(0, drawn, torch.arange(rows))
        bounds = _bounds(rows, minibatches, minibatch_size, remainder)
    else:  # the rows of a unit take what its first row has drawn, and a stable sort puts them together
        ordered, order = drawn.index_select(0, units.spread(units.first)).sort(stable=True)
        starts = (ordered[1:] != ordered[:-1]).nonzero().flatten() + 1
        edges = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), rows)])
        bounds = edges[_bounds(len(starts) + 1, minibatches, minibatch_size, remainder)].tolist()
    sizes, stop = [b - a for a, b in pairwise(bounds)], bounds[-1]
    return Cut(order if stop == rows else order[:stop], sizes, order[stop:])


def _bounds(units: int, minibatches: int | None, size: int | None, remainder: str) -> list[int]:
    """The unit numbers at which minibatches begin, and the end of the last."""
    over = units % (minibatches or size or 1)
    if over and remainder == "raise":
        wanted = f"{minibatches} minibatches" if minibatches else f"minibatches of {size}"
        raise BatchError(
            f"{units} units do not make {wanted}: {over} over. Set remainder='uneven' to train them in "
            "minibatches of different size, 'carry' to keep them for the next batch, or 'drop'"
        )
    if remainder == "drop" and over == units:
        wanted = f"{minibatches} minibatches of a unit" if minibatches else f"a minibatch of {size}"
        raise BatchError(
            f"{units} units do not make {wanted}, and remainder='drop' would leave them all out, so that no "
            "step is left. Give the split more units, ask for fewer, or set remainder='carry' or 'uneven'"
        )
    if remainder in ("drop", "carry"):
        units -= over
    if minibatches is not None:
        count = min(minibatches, units)  # none is empty
        small, larger = divmod(units, count) if count else (0, 0)
        return [i * small + min(i, larger) for i in range(count + 1)]
    return [*range(0, units, size or 1), units]


def check_split(minibatches: int | None, minibatch_size: int | None, remainder: str) -> None:
    """Check options.

    Raises:
        ValueError: not one of the two ways to cut, or an option that is none.
    """
    if (minibatches is None) == (minibatch_size is None):
        raise ValueError(
            f"give one of minibatches and minibatch_size; got {minibatches=} and {minibatch_size=}"
        )
    at_least("minibatches", minibatches, 1)
    at_least("minibatch_size", minibatch_size, 1)
    one_of("remainder", remainder, get_args(Remainder))


def stream_seed(name: str, seed: int, number: int) -> int:
    """The seed of the `number`-th draw of the stream `name` under `seed`, 63 bits.

    A hash, so that neighbours and namesakes get unrelated streams, and so that the low half differs: torch's
    CPU generator looks at no more than 32 bits of a seed.

    Example:
        >>> stream_seed("split", 0, 0) % 2**32 != stream_seed("split", 0, 1) % 2**32
        True
    """
    digest = hashlib.blake2b(f"{name}/{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

"""Draw a seeded permutation of the rows, and cut it into minibatches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headrace.transforms.table import BatchError, Ids, Rows, as_ids
from headrace.transforms.table.options import at_least, takes_options

Remainder = Literal["raise", "drop", "uneven", "pad", "carry"]
TOGETHER = "rows without an id would be treated as one unit"


class Cut(NamedTuple):
    """The rows of each minibatch, in training order. On the CPU."""

    order: Tensor
    """(M,) int64, row numbers in training order."""
    sizes: list[int]
    """Number of rows of each minibatch; the sum is M."""
    left: Tensor
    """(N − M,) int64, leftover rows, which are in no minibatch."""


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
    """Shuffle the units of a batch and cut them into minibatches.

    A unit is a row, or all rows with the same `unit_id`. The rows of a unit stay together, in row order.
    With U units, each of K minibatches gets ⌊U/K⌋ or ⌈U/K⌉ units. With `minibatch_size` n each gets n units.
    Permutations are drawn on the CPU, so they are the same on every device.

    Args:
        rows: N, number of rows.
        unit_id: (N,) integers ≥ 0 on any device; None: each row is a unit.
        minibatches: K ≥ 1; give this or `minibatch_size`.
        minibatch_size: n ≥ 1 units.
        remainder: for leftover units, when U is not a multiple of K or n. ``raise`` an error. ``drop`` and
            ``carry`` put the last units of the permutation into `left`. ``uneven``: sizes differ by one unit
            (`minibatches`), or the last minibatch is smaller (`minibatch_size`). ``pad`` cuts like
            ``uneven``; :class:`ShuffleSplit` pads later.
        shuffle: False keeps the units in the order of their first rows.
        generator: generator of the permutation, on the CPU.

    Raises:
        BatchError: there are leftover units under ``raise``; ``drop`` would drop all units; or a unit_id is
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
    carried: int = 0,
) -> Cut:
    """:func:`shuffle_split` without checks of options and ids.

    The last `carried` rows are of earlier batches, the oldest first. Their units are the first of the
    permutation, in this order, so that no unit is left over again and again.
    """
    if rows == 0:
        nothing = torch.empty(0, dtype=torch.int64)
        return Cut(nothing, [], nothing)
    came = rows - carried
    drawn = torch.randperm(came, generator=generator) if shuffle else torch.arange(came)
    if carried and units is None:
        drawn = torch.cat([torch.arange(came, rows), drawn])
    elif carried:
        drawn = torch.cat([drawn + carried, torch.arange(carried)])
    if units is None:  # a permutation and its inverse are equally random
        order, bounds = drawn, _bounds(rows, minibatches, minibatch_size, remainder)
    elif units.n == rows:  # each row goes to its position, as the sort below would put it
        order = torch.empty_like(drawn).scatter_(0, drawn, torch.arange(rows))
        bounds = _bounds(rows, minibatches, minibatch_size, remainder)
    else:  # all rows of a unit get the position of its first row; a stable sort puts them together
        ordered, order = drawn.index_select(0, units.spread(units.first)).sort(stable=True)
        # Minibatches are cut by units; `edges` are the rows at which units begin.
        starts = (ordered[1:] != ordered[:-1]).nonzero().flatten() + 1
        edges = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), rows)])
        bounds = edges[_bounds(len(starts) + 1, minibatches, minibatch_size, remainder)].tolist()
    sizes, stop = [b - a for a, b in pairwise(bounds)], bounds[-1]
    return Cut(order if stop == rows else order[:stop], sizes, order[stop:])


def _bounds(units: int, minibatches: int | None, size: int | None, remainder: str) -> list[int]:
    """The unit numbers at which minibatches begin, and the end of the last."""
    leftover = units % (minibatches or size or 1)
    if leftover and remainder == "raise":
        wanted = f"{minibatches} equal minibatches" if minibatches else f"minibatches of {size} units"
        raise BatchError(
            f"{units} units cannot be cut into {wanted}: {leftover} left over. Set {{remainder=uneven}} to "
            "train them in minibatches of different sizes, 'drop', or 'carry' to keep them for the next "
            "batch, which must have other ids"
        )
    if remainder == "drop" and leftover == units:
        wanted = f"{minibatches} minibatches" if minibatches else f"a minibatch of {size} units"
        raise BatchError(
            f"{units} units are too few for {wanted}, and remainder='drop' would drop all of them: no "
            "optimiser step is left. Give the split more units, make minibatches smaller, or set "
            "{remainder=uneven}, or 'carry' if ids are unique over batches"
        )
    if remainder in ("drop", "carry"):
        units -= leftover
    if minibatches is not None:
        count = min(minibatches, units)  # so that no minibatch is empty
        small, larger = divmod(units, count) if count else (0, 0)
        return [i * small + min(i, larger) for i in range(count + 1)]
    return [*range(0, units, size or 1), units]


def check_split(minibatches: int | None, minibatch_size: int | None, remainder: str) -> None:
    """Check the options of a cut.

    Raises:
        ValueError: both or none of `minibatches` and `minibatch_size` are given, or a value is invalid.
    """
    if (minibatches is None) == (minibatch_size is None):
        raise ValueError(
            f"give exactly one of minibatches and minibatch_size; got {minibatches=} and {minibatch_size=}"
        )
    at_least("minibatches", minibatches, 1)
    at_least("minibatch_size", minibatch_size, 1)


def stream_seed(name: str, seed: int, number: int) -> int:
    """The 63-bit seed with index `number` in the random stream `name` under `seed`.

    The seed is a hash, so seeds of neighbouring numbers are unrelated, also in their low 32 bits. torch's CPU
    generator uses only these.

    Example:
        >>> stream_seed("split", 0, 0) % 2**32 != stream_seed("split", 0, 1) % 2**32
        True
    """
    digest = hashlib.blake2b(f"{name}/{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

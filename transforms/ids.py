"""Arithmetic per id: which rows share one, and sums over those that do.

Ids are labels: any order, any gaps, never used to index. What stands for an id here is the **first row**
that carries it: ``first = first_row(ids)`` is an (N,) index, ``first[i] == i`` where a row is the first of
its id, and a sum per id lives in an (N,) buffer at those rows. No shape depends on the data but in the CPU's
own way to find first rows, so the CUDA route and a compiled one need no device read.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import BatchError, listing, who_stamps
from .once import once


def number_labels(labels: Sequence[str]) -> Tensor:
    """Numbers for labels such as UUIDs: equal ones for equal labels, in every batch, process and run.

    The number is a hash, the first 62 bits of BLAKE2b over the label in UTF-8.

    Args:
        labels: N strings, none of them empty.

    Returns:
        (N,) int64 ≥ 0.

    Raises:
        BatchError: a label is empty or no string (the rows are named), or two labels have the same number.

    Example:
        >>> number_labels(["7f3a", "90cc", "7f3a"]).tolist()
        [433565767902309504, 4497001111266328251, 433565767902309504]
    """
    odd = [f"{label!r:.60} at row {row}" for row, label in enumerate(labels) if not isinstance(label, str)]
    if odd:
        raise BatchError(f"labels are one string a row; found {listing(odd)}")
    empty = [str(row) for row, label in enumerate(labels) if not label]
    if empty:
        raise BatchError(f"every row needs a label; found empty ones at rows {listing(empty)}")
    numbers = {label: _hashed(label) for label in dict.fromkeys(labels)}
    taken: dict[int, str] = {}
    for label, number in numbers.items():
        if taken.setdefault(number, label) != label:
            raise BatchError(f"the labels {taken[number]!r} and {label!r} have the same number: rename one")
    return torch.tensor([numbers[label] for label in labels], dtype=torch.int64)


def _hashed(label: str) -> int:
    digest = blake2b(label.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def as_ids(
    ids: Tensor | Sequence[int | str | None], name: str, *, device: torch.device | None = None
) -> Tensor:
    """Check ids and bring them to (N,) int64; labels by :func:`number_labels`.

    Args:
        ids: (N,) or (N, 1) integers, as a tensor or a Python sequence; or a sequence of N strings.
        name: what the message calls them.
        device: where a Python sequence goes; a tensor must be there already.

    Raises:
        BatchError: a None (the rows are named), another shape, or numbers that are not integers.
    """
    if not isinstance(ids, Tensor):
        missing = [row for row, value in enumerate(ids) if value is None]
        if missing:
            raise BatchError(
                f"every row needs a {name}; None at rows {listing(map(str, missing))} of {len(ids)}"
                + who_stamps(name)
            )
        if any(isinstance(value, str) for value in ids):
            try:
                return number_labels(ids).to(device)  # type: ignore[arg-type]  # which it looks at
            except BatchError as err:
                raise BatchError(f"{name}: {err}") from err
        try:
            ids = torch.tensor(ids, dtype=torch.int64 if len(ids) == 0 else None, device=device)
        except (TypeError, ValueError, RuntimeError) as err:
            raise BatchError(f"{name} must be integers, at most 63 bits, or strings: {err}") from err
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise BatchError(f"{name} must be integers, got {ids.dtype}")
    if ids.ndim == 0 or ids.numel() != ids.shape[0]:
        raise BatchError(f"{name} must be one id a row, (N,) or (N, 1); got shape {tuple(ids.shape)}")
    return (ids if ids.ndim == 1 else ids.reshape(-1)).to(torch.int64)


def first_row(ids: Tensor) -> Tensor:
    """For each row, the first row with the same id.

    Args:
        ids: (N,) int64, on any device.

    Returns:
        (N,) int64.

    Example:
        >>> first_row(torch.tensor([7, 3, 7, 3, 9])).tolist()
        [0, 1, 0, 1, 4]
    """
    if len(ids) == 0:
        return ids.new_empty(0)
    return once(_first_row_by_looking if ids.device.type == "cpu" else first_row_by_sorting, ids)


def first_row_of_pairs(first: Tensor, ids: Tensor) -> Tensor:
    """For each row, the first row with the same pair of `first`, itself a first row, and id.

    Example:
        >>> first_row_of_pairs(torch.tensor([0, 0, 2, 0]), torch.tensor([7, 8, 7, 7])).tolist()
        [0, 1, 2, 0]
    """
    return first_row(first * len(first) + first_row(ids))


def first_row_by_sorting(ids: Tensor) -> Tensor:
    """:func:`first_row` with shapes that do not depend on the data: one stable sort, no device read."""
    position = torch.arange(len(ids), device=ids.device)
    ordered, order = ids.sort(stable=True)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    start_of_run = torch.where(starts, position, 0).cummax(0).values
    return torch.empty_like(order).scatter_(0, order, order.index_select(0, start_of_run))


def _first_row_by_looking(ids: Tensor) -> Tensor:
    # Runs of ascending ids are what collectors write; then a table over the span; `unique` last.
    run_ids, run, counts = torch.unique_consecutive(ids, return_inverse=True, return_counts=True)
    if everywhere(run_ids[1:] > run_ids[:-1]):
        return (counts.cumsum(0) - counts).index_select(0, run)
    low, high = (int(x) for x in torch.aminmax(ids))
    span = high - low + 1
    if span <= 8 * len(ids):
        slot = ids - low
    else:
        found, slot = torch.unique(ids, return_inverse=True)
        span = len(found)
    rows = torch.arange(len(ids))
    table = torch.full((span,), len(ids)).scatter_reduce_(0, slot, rows, "amin")
    return table.index_select(0, slot)


def everywhere(flags: Tensor) -> bool:
    """Whether all of (N,) bool are True. Reads; on the CPU at a fifth of the cost of ``flags.all()``."""
    return len(flags) == 0 or bool(flags.view(torch.uint8).amin())


def lowest(ids: Tensor) -> int:
    """The smallest of (N,) int64, N ≥ 1. Reads; on the CPU at half the cost of ``ids.amin()``."""
    return int(torch.aminmax(ids)[0])


def is_first(first: Tensor) -> Tensor:
    """(N,) bool: True on the first row of each id."""
    return first == torch.arange(len(first), device=first.device)


def number_of(first: Tensor) -> Tensor:
    """(N,) int64: 0, 1, … by first appearance, the number of each row's id."""
    return (is_first(first).long().cumsum(0) - 1).index_select(0, first)


def sum_by(first: Tensor, values: Tensor) -> Tensor:
    """Per row, the sum of `values` (N,) over the rows of its id."""
    return torch.zeros_like(values).index_add_(0, first, values).index_select(0, first)


def reduce_by(first: Tensor, values: Tensor, how: str) -> Tensor:
    """Per row, the ``"amin"`` or ``"amax"`` of `values` (N,) over the rows of its id."""
    buffer = values.clone()  # each first row starts from its own value; the other slots are never read
    return buffer.scatter_reduce_(0, first, values, how).index_select(0, first)


def any_by(first: Tensor, flags: Tensor) -> Tensor:
    """Per row, whether any row of its id has the flag; (N,) bool."""
    return reduce_by(first, flags.to(torch.uint8), "amax").to(torch.bool)


def last_row(first: Tensor) -> Tensor:
    """For each row, the last row of its id."""
    return reduce_by(first, torch.arange(len(first), device=first.device), "amax")


class Places(NamedTuple):
    """Where rows stand among those of their id."""

    first: Tensor
    """(N,) int64, the first row of each row's id, as it was given."""
    place: Tensor
    """(N,) int64, from 0."""
    tied: Tensor
    """(N,) bool: an earlier row of the id has the same turn."""


def places_by_turn(first: Tensor, turn: Tensor | None = None) -> Places:
    """Order the rows of each id by a column, or as they come. No device read.

    Args:
        first: (N,) int64, of :func:`first_row`.
        turn: (N,) int64; None: the order of the rows.

    Example:
        >>> places_by_turn(torch.tensor([0, 1, 0, 0]), torch.tensor([5, 0, 3, 4])).place.tolist()
        [2, 0, 0, 1]
    """
    position = torch.arange(len(first), device=first.device)
    order = position if turn is None else turn.sort(stable=True).indices
    order = order[first[order].sort(stable=True).indices]
    begins = torch.ones_like(order, dtype=torch.bool)
    begins[1:] = first[order[1:]] != first[order[:-1]]
    place = position - torch.where(begins, position, 0).cummax(0).values
    tied = torch.zeros_like(begins)
    if turn is not None:
        tied[1:] = ~begins[1:] & (turn[order[1:]] == turn[order[:-1]])
    by_row = torch.empty_like(place)
    return Places(first, by_row.scatter_(0, order, place), torch.empty_like(tied).scatter_(0, order, tied))

"""Per-token columns as wide as one another: padded on the left, or moved to the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.transforms.errors import BatchError, listing


def pad_left(rows: Sequence[Tensor], value: float | None = None) -> Tensor:
    """(N, T, ...) of N tensors (T_i, ...): each at the end of its row, behind its padding.

    Args:
        rows: of one dtype.
        value: what padding is. None: False, 0, or in a column of floats NaN.

    Example:
        >>> pad_left([torch.tensor([7]), torch.tensor([8, 9])]).tolist()
        [[0, 7], [8, 9]]
    """
    check_dtype(rows)
    value = no_token(rows[0]) if value is None else value
    return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side="left")


def check_dtype(rows: Sequence[Tensor]) -> None:
    """Refuse ragged rows of several dtypes, some of which torch would cast when it joins them."""
    if len(dtypes := {row.dtype for row in rows}) > 1:
        raise BatchError(f"a per-token column has one dtype; found {listing(sorted(map(str, dtypes)))}")


def no_token(column: Tensor) -> float:
    """What stands in a column where there is no token: False, 0, or NaN among floats."""
    return float("nan") if column.is_floating_point() else 0


def last_entries(lengths: Sequence[int], like: Tensor) -> Tensor:
    """(N, T) bool: the last entries of each row, as many as `lengths` says, which are not copied to a device.

    Args:
        lengths: N numbers.
        like: (N, T, ...), whose rows they are.

    Example:
        >>> last_entries([1, 2], torch.zeros(2, 3)).int().tolist()
        [[0, 0, 1], [0, 1, 1]]
    """
    places = torch.arange(like.shape[1], 0, -1, device=like.device)
    rows = {length: places <= length for length in set(lengths)}
    return torch.stack([rows[length] for length in lengths])


def entries_behind(attention: Tensor) -> Tensor:
    """(N,) int64: the entries behind the last real token of each row.

    Args:
        attention: (N, T) bool, True at real tokens.

    Example:
        >>> entries_behind(torch.tensor([[False, True, False, False], [True, False, True, True]])).tolist()
        [2, 0]
    """
    return (attention.flip(1).long().cumsum(1) == 0).sum(1)


def turn_right(column: Tensor, by: Tensor) -> Tensor:
    """Move each row by some places to the right; what falls off comes in again on the left.

    Args:
        column: (N, T, ...).
        by: (N,) int64.

    Example:
        >>> turn_right(torch.tensor([[0, 5, 6, 0, 0]]), torch.tensor([2])).tolist()
        [[0, 0, 0, 5, 6]]
    """
    rows, width = column.shape[:2]
    places = (torch.arange(width, device=by.device) - by[:, None]) % max(width, 1)
    return column[torch.arange(rows, device=by.device)[:, None], places]


def fit_width(column: Tensor, width: int, value: float | None = None) -> Tensor:
    """Give rows one width, on the left: more padding, or less.

    Args:
        column: (N, T, ...).
        width: entries of a row that comes out; what is cut off was padding.
        value: what padding is. None: as :func:`pad_left`.

    Example:
        >>> fit_width(torch.tensor([[0, 7]]), 3).tolist(), fit_width(torch.tensor([[0, 7]]), 1).tolist()
        ([[0, 0, 7]], [[7]])
    """
    rows, there = column.shape[:2]
    if there >= width:
        return column[:, there - width :]
    padding = column.new_full(
        (rows, width - there, *column.shape[2:]), no_token(column) if value is None else value
    )
    return torch.cat([padding, column], 1)

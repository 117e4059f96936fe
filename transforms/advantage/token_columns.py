"""Columns with a number per token, of dense rows or of ragged ones, as one table and back; whose they are."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.transforms.distributed import Population, population_of, present_ranks
from headrace.transforms.errors import BatchError
from headrace.transforms.rewards import Missing
from headrace.transforms.schema import COUNTED, has_key, require


def read_tokens(batch: TensorDictBase, key: NestedKey, *, fill: float, reader: str, option: str) -> Tensor:
    """Read one number a token: (N, T) or (N, T, 1) comes back as (N, T), ragged rows filled up at their end.

    Raises:
        MissingKeyError: the column is not there.
        BatchError: it has another shape.
    """
    if isinstance(batch, LazyStackedTensorDict) and has_key(batch, key):
        rows = [row.unsqueeze(0) for row in batch.get(key, as_list=True)]
        return pad_sequence(
            [_flat(row, key, reader, option)[0] for row in rows], batch_first=True, padding_value=fill
        )
    return _flat(require(batch, key, reader=reader, option=option), key, reader, option)


def _flat(column: Tensor, key: NestedKey, reader: str, option: str) -> Tensor:
    if isinstance(column, Tensor) and column.ndim == 3 and column.shape[-1] == 1:
        column = column.squeeze(-1)
    if not isinstance(column, Tensor) or column.ndim != 2:
        found = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        raise BatchError(f"{reader} needs one number a token, (N, T), in {key!r} ({option}); found {found}")
    return column.detach()


def whole_numbers(column: Tensor, key: NestedKey, option: str) -> Tensor:
    """The column as int64.

    Raises:
        BatchError: its numbers are no integers.
    """
    if column.is_floating_point() or column.is_complex() or column.dtype is torch.bool:
        raise BatchError(f"{key!r} ({option}) holds integers; found {column.dtype}")
    return column.long()


def same_width(turn: Tensor, other: Tensor, names: str) -> None:
    """Check that two columns have as many tokens a row.

    Raises:
        BatchError: they have not.
    """
    if turn.shape[1] != other.shape[1]:
        raise BatchError(
            f"{names} must have one number for each token of a row; found {turn.shape[1]} and "
            f"{other.shape[1]} tokens"
        )


def write_tokens(batch: TensorDictBase, key: NestedKey, values: Tensor, like: NestedKey) -> None:
    """Write (N, T) as (N, T, 1), to ragged rows as many as they have tokens in the column `like`."""
    if not isinstance(batch, LazyStackedTensorDict):
        batch.set(key, values.unsqueeze(-1))
        return
    for row, own in zip(batch.tensordicts, values, strict=True):
        row.set(key, own[: len(row.get(like))].unsqueeze(-1))


def widest(width: int) -> int:
    """The largest of what ranks that share the batch say, by an exchange; alone, what this process says."""
    ranks = present_ranks()
    return width if ranks is None else max(ranks.gather_objects(width))


def widened(table: Tensor, width: int, fill: float) -> Tensor:
    """(N, K) → (N, `width`), filled up at the end."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=fill)


def population_with_reward(batch: TensorDictBase, reward: Tensor | None, missing: Missing) -> Population:
    """The rows that are in the statistics, under ``skip`` without those whose (N,) reward is NaN."""
    if missing == "raise" or reward is None:
        return population_of(batch)
    known = ~reward.isnan()
    return Population(known & batch.get(COUNTED, known), present_ranks())

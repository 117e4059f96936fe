"""Columns with a number per token: checks of them, one width on all ranks, and whose rows count."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.distributed import Population, population_of, present_ranks
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import first_row, places_by_turn
from headrace.transforms.rewards import Missing
from headrace.transforms.schema import COUNTED


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


def widest(width: int) -> int:
    """The largest of what ranks that share the batch say, by an exchange; alone, what this process says."""
    ranks = present_ranks()
    return width if ranks is None else max(ranks.gather_objects(width))


def widened(table: Tensor, width: int, fill: float) -> Tensor:
    """(N, K) → (N, `width`), filled up at the end."""
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=fill)


def places_of_all(batch: TensorDictBase, rollouts: Tensor, turn: Tensor | None) -> Tensor:
    """(N,) int64: where each row stands among its rollout's, with those that are out of the statistics."""
    people = population_of(batch, every=True)
    everyone = people.take({} if turn is None else {"turn": turn}, {"rollouts": rollouts})
    return people.put_back(places_by_turn(first_row(everyone["rollouts"]), everyone.get("turn")).place)


def population_with_reward(batch: TensorDictBase, reward: Tensor | None, missing: Missing) -> Population:
    """The rows that are in the statistics, under ``skip`` without those whose (N,) reward is NaN."""
    if missing == "raise" or reward is None:
        return population_of(batch)
    known = ~reward.isnan()
    return Population(known & batch.get(COUNTED, known), present_ranks())

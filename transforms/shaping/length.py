"""Rewards shaped by how long a rollout is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import first_row, sum_by
from headrace.transforms.options import nested_key

from .reward_shaping import RewardShaping


def overlong_punishment(length: Tensor, *, max_length: int, cache: int) -> Tensor:
    """The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).

    ::

        0                          L ≤ L_max − L_cache
        (L_max − L_cache − L)/L_cache    up to L_max
        −1                         beyond

    Args:
        length: (N,) tokens.
        max_length: L_max, tokens.
        cache: L_cache, tokens, in (0, L_max].

    Returns:
        (N,) float in [−1, 0], to be added to the reward.

    Example:
        >>> overlong_punishment(torch.tensor([8, 10, 12]), max_length=10, cache=4).tolist()
        [-0.5, -1.0, -1.0]
    """
    over = length - (max_length - cache)
    return -(over.clamp(0, cache) / cache).to(torch.get_default_dtype())


def length_penalty(length: Tensor, *, coefficient: float, free: int = 0) -> Tensor:
    """A penalty that grows linearly: ``−c · max(L − free, 0)``.

    Args:
        length: (N,) tokens.
        coefficient: c, reward per token, ≥ 0.
        free: tokens that cost nothing.

    Returns:
        (N,) float ≤ 0, to be added to the reward.

    Example:
        >>> length_penalty(torch.tensor([4, 10]), coefficient=0.5, free=3).tolist()
        [-0.5, -3.5]
    """
    return -coefficient * (length - free).clamp_min(0).to(torch.get_default_dtype())


class LengthShaping(RewardShaping):
    """Shaping by a rollout's tokens, over all its segments, those that a filter silenced included."""

    def __init__(self, loss_mask_key: NestedKey, rollout_key: NestedKey | None, *others: NestedKey):
        self.loss_mask_key, self.rollout_key = nested_key(loss_mask_key), nested_key(rollout_key)
        super().__init__([self.loss_mask_key, self.rollout_key, *others])

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """Every row has a rollout."""
        return [set_rule(self.ids(batch, "rollout"), "rollout_id", "their lengths would be added up")]

    def rollout_lengths(self, batch: TensorDictBase) -> Tensor:
        """(N,) int64, over all rows of each row's rollout."""
        if self.rollout_key is None:
            return self.lengths(batch)
        people = population_of(batch, every=True)
        everyone = people.take({"lengths": self.lengths(batch)}, {"rollouts": self.ids(batch, "rollout")})
        return people.put_back(sum_by(first_row(everyone["rollouts"]), everyone["lengths"]))


class OverlongPunishment(LengthShaping):
    """Add :func:`overlong_punishment` of the rollout's tokens to its reward.

    Reads `loss_mask_key`, ``("headrace", "length")`` if there, `rollout_key`; reads and writes
    ``("headrace", "reward")``.

    Args:
        max_length: L_max, tokens in the loss over all segments of a rollout.
        cache: L_cache, tokens, in (0, L_max].
        weight: factor of the punishment, in units of the reward.
        loss_mask_key: (N, T) bool.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.

    Example:
        >>> OverlongPunishment(max_length=10, cache=4)
        OverlongPunishment(max_length=10, cache=4)
    """

    within_groups = True

    def __init__(
        self,
        *,
        max_length: int,
        cache: int,
        weight: float = 1.0,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        rollout_key: NestedKey | None = "rollout_id",
    ):
        super().__init__(loss_mask_key, rollout_key)
        if not 0 < cache <= max_length:
            raise ValueError(f"cache must be in (0, max_length]; got {cache} and {max_length}")
        self.max_length, self.cache, self.weight = max_length, cache, weight

    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,)."""
        lengths = self.rollout_lengths(batch)
        return reward + self.weight * overlong_punishment(
            lengths, max_length=self.max_length, cache=self.cache
        )


class LengthPenalty(LengthShaping):
    """Add :func:`length_penalty` of the rollout's tokens to its reward.

    Reads `loss_mask_key`, ``("headrace", "length")`` if there, `rollout_key`; reads and writes
    ``("headrace", "reward")``.

    Args:
        coefficient: reward per token, ≥ 0.
        free: tokens that cost nothing.
        loss_mask_key: (N, T) bool.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.

    Example:
        >>> LengthPenalty(coefficient=0.01)
        LengthPenalty(coefficient=0.01)
    """

    within_groups = True

    def __init__(
        self,
        *,
        coefficient: float,
        free: int = 0,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        rollout_key: NestedKey | None = "rollout_id",
    ):
        super().__init__(loss_mask_key, rollout_key)
        if coefficient < 0 or free < 0:
            raise ValueError(f"coefficient and free must be ≥ 0; got {coefficient} and {free}")
        self.coefficient, self.free = coefficient, free

    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,)."""
        return reward + length_penalty(
            self.rollout_lengths(batch), coefficient=self.coefficient, free=self.free
        )

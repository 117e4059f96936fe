"""Answers with two rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .small_task import Course, Prompt, SmallTask


class SeveralRewards(SmallTask):
    """One action of three, each with two rewards, (N, 2); what it is worth is their weighted sum.

    θ₀ and θ₁ are the logits of the second and third action, that of the first is 0.

    Args:
        theta: θ₀ and θ₁.
        rewards: of each action.

    Example:
        >>> SeveralRewards().columns, SeveralRewards().outcomes(2)
        (2, 9)
    """

    def __init__(
        self,
        *,
        theta: Sequence[float] = (0.5, -0.4),
        rewards: Sequence[Sequence[float]] = ((0.0, 0.0), (1.0, 0.0), (0.2, 1.0)),
    ):
        super().__init__(theta=theta)
        self.rewards = [tuple(each) for each in rewards]
        self._check_lengths(rewards=(self.rewards, len(self.theta) + 1))

    def log_policy(self, theta: Tensor) -> Tensor:
        """One decision among three actions."""
        return torch.cat([theta.new_zeros(1), theta]).log_softmax(0)[None]

    def prompts(self) -> Sequence[Prompt]:
        """One prompt with three courses."""
        return [
            Prompt(1.0, tuple(Course((((0, action),),), worth) for action, worth in enumerate(self.rewards)))
        ]

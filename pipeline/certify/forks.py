"""Rollouts that fork: two share their first action and go on by themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

from .small_task import Course, Family, Prompt, SmallTask


class Forks(SmallTask):
    """Two actions, of which the first is sampled once for two rollouts.

    θ₀ is the logit of the first action, θ₁ and θ₂ those of the second after the one and the other. Each
    rollout is a row with both its tokens, so that the shared one is in two rows.

    Args:
        theta: the three logits.
        rewards: of the four leaves, in order.

    Example:
        >>> Forks().outcomes(4)
        64
    """

    shared = 1

    def __init__(
        self,
        *,
        theta: Sequence[float] = (0.2, 0.5, -0.4),
        rewards: Sequence[float] = (0.0, 0.6, 0.3, 1.0),
    ):
        super().__init__(theta=theta)
        self.rewards = tuple(rewards)
        self._check_lengths(theta=(self.theta, 3), rewards=(self.rewards, 4))

    def prompts(self) -> Sequence[Prompt]:
        """One prompt with four leaves."""
        leaves = [((0, first), (1 + first, second)) for first in (0, 1) for second in (0, 1)]
        courses = (Course((leaf,), (reward,)) for leaf, reward in zip(leaves, self.rewards, strict=True))
        return [Prompt(1.0, tuple(courses))]

    def families(self, courses: Sequence[Course], probability: Sequence[float]) -> Sequence[Family]:
        """Pairs with one first action: P(first) · P(second | first) · P(other second | first)."""
        below = defaultdict(list)
        for number, course in enumerate(courses):
            below[course.actions[0]].append(number)
        return [
            Family((one, other), probability[one] * probability[other] / fsum(probability[n] for n in leaves))
            for leaves in below.values()
            for one in leaves
            for other in leaves
        ]

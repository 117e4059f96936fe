"""Rollouts of one segment and of several, which share a reward."""

from __future__ import annotations

from collections.abc import Sequence

from .small_task import Course, Prompt, SmallTask


class FanOut(SmallTask):
    """The policy answers, or hands on to a second segment, which answers wrong or right.

    θ₀ is the logit of handing on, θ₁ that of a right answer then. Rollouts that hand on are two rows with
    the same reward: whoever gives each row a vote counts them twice.

    Args:
        theta: θ₀ and θ₁.
        rewards: of answering at once, of a wrong and of a right answer in the second segment.

    Example:
        >>> [len(course.rows) for course in FanOut().prompts()[0].courses]
        [1, 2, 2]
    """

    def __init__(self, *, theta: Sequence[float] = (0.2, -0.3), rewards: Sequence[float] = (0.1, 0.0, 1.0)):
        super().__init__(theta=theta)
        self.rewards = tuple(rewards)
        self._check_lengths(theta=(self.theta, 2), rewards=(self.rewards, 3))

    def prompts(self) -> Sequence[Prompt]:
        """One prompt with three courses."""
        at_once, wrong, right = ((reward,) for reward in self.rewards)
        first = ((0, 1),)
        return [
            Prompt(
                1.0,
                (
                    Course((((0, 0),),), at_once),
                    Course((first, ((1, 0),)), wrong),
                    Course((first, ((1, 1),)), right),
                ),
            )
        ]

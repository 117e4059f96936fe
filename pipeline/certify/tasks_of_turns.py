"""Stop or go on: turns of unequal number, inside rows or as rows, and under a stale sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from .small_task import Course, Prompt, SmallTask


class StopOrContinue(SmallTask):
    """At each turn the policy stops or goes on; a turn taken pays, and so does where it ended.

    θ_k is the logit of going on at turn k; after the last turn there is no decision. One row a rollout, a
    token an action, with the turn of each and what it was paid for it (``turn_index``, ``turn_reward``).

    Args:
        theta: logits of going on, one a turn.
        turn: what each turn taken pays.
        ends: what ending after 0, 1, … turns pays, one more than turns.
        sampler: as for :class:`SmallTask`.
        teacher: likewise.
        reference: likewise.

    Example:
        >>> courses = StopOrContinue().prompts()[0].courses
        >>> [(course.actions, round(course.worth[0], 1)) for course in courses[:2]]
        [([(0, 0)], 0.0), ([(0, 1), (1, 0)], 0.8)]
    """

    def __init__(
        self,
        *,
        theta: Sequence[float] = (0.3, -0.2, 0.4),
        turn: float = 0.5,
        ends: Sequence[float] = (0.0, 0.3, 1.0, 0.2),
        sampler: Sequence[float] | None = None,
        teacher: Sequence[float] | None = None,
        reference: Sequence[float] | None = None,
    ):
        super().__init__(theta=theta, sampler=sampler, teacher=teacher, reference=reference)
        self.turn, self.ends = turn, tuple(ends)
        self._check_lengths(ends=(self.ends, len(self.theta) + 1))

    def prompts(self) -> Sequence[Prompt]:
        """One prompt, whose rollouts take 0, 1, … turns."""
        return [Prompt(1.0, tuple(self.course(turns) for turns in range(len(self.ends))))]

    def course(self, turns: int) -> Course:
        """That of a rollout that takes so many turns."""
        actions = [(turn, 1) for turn in range(turns)] + [(turns, 0)] * (turns < len(self.theta))
        rewards = [self.turn * action for _, action in actions]
        return Course(
            rows=(tuple(actions),),
            worth=(self.turn * turns + self.ends[turns],),
            turn_rewards=tuple(rewards),
        )


class TurnsAsRows(StopOrContinue):
    """The same with each turn a row, its own reward on it, and the state that it started from.

    Args:
        theta: as for :class:`StopOrContinue`.
        turn: likewise.
        ends: likewise.
    """

    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({"collapse.reward": "sum"})

    def __init__(
        self,
        *,
        theta: Sequence[float] = (0.3, -0.2, 0.4),
        turn: float = 0.5,
        ends: Sequence[float] = (0.0, 0.3, 1.0, 0.2),
    ):
        super().__init__(theta=theta, turn=turn, ends=ends)

    def course(self, turns: int) -> Course:
        """That of a rollout that takes so many turns."""
        inside = super().course(turns)
        rewards = list(inside.turn_rewards or ())
        rewards[-1] += self.ends[turns]
        return Course(
            rows=tuple((action,) for action in inside.actions),
            worth=inside.worth,
            paid=tuple((reward,) for reward in rewards),
            states=tuple(range(len(rewards))),
        )

"""Right or wrong in one turn: prompts of unequal difficulty, answers of unequal length, graders that fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.transforms.schema import Status

from .small_task import Course, Prompt, SmallTask

NEVER = -1e9  # a log-probability whose exponential is 0, as is its share of an entropy


class OneTurn(SmallTask):
    """Each prompt is answered wrong (action 0) or right (action 1), and that is all.

    θ_p is the logit of a right answer to prompt p. Answers may have further tokens, which follow by
    themselves: they count in every length and the policy has no choice in them. A rollout that failed has a
    reward of 0 in its row. Where it failed with an answer, it is worth what that would have been paid; where
    it failed before it had one, nothing.

    Args:
        theta: logits of a right answer, one a prompt.
        shares: how often each prompt is asked, adding up to 1; None: all as often.
        rewards: of a wrong and of a right answer.
        lengths: their tokens, ≥ 1.
        fails: how likely a rollout with a wrong, and with a right answer fails, in [0, 1).
        dies: how likely one fails before it has an answer, in [0, 1).
        sampler: as for :class:`SmallTask`.
        teacher: likewise.
        reference: likewise.

    Example:
        >>> [course.worth for course in OneTurn(theta=[0.0]).prompts()[0].courses]
        [(0.0,), (1.0,)]
    """

    def __init__(
        self,
        *,
        theta: Sequence[float],
        shares: Sequence[float] | None = None,
        rewards: Sequence[float] = (0.0, 1.0),
        lengths: Sequence[int] = (1, 1),
        fails: Sequence[float] = (0.0, 0.0),
        dies: float = 0.0,
        sampler: Sequence[float] | None = None,
        teacher: Sequence[float] | None = None,
        reference: Sequence[float] | None = None,
    ):
        super().__init__(theta=theta, sampler=sampler, teacher=teacher, reference=reference)
        self.shares = [1 / len(self.theta)] * len(self.theta) if shares is None else list(shares)
        self.rewards, self.lengths, self.fails = tuple(rewards), tuple(lengths), tuple(fails)
        self.dies = dies
        pairs = {name: (getattr(self, name), 2) for name in ("rewards", "lengths", "fails")}
        self._check_lengths(shares=(self.shares, len(self.theta)), **pairs)
        if abs(sum(self.shares) - 1) > 1e-9:
            raise ValueError(f"shares must add up to 1; got {self.shares}")
        chances = (*self.fails, dies)
        if min(self.lengths) < 1 or min(chances) < 0 or max(chances) >= 1:
            raise ValueError(
                f"lengths must be ≥ 1, fails and dies in [0, 1); got {self.lengths}, {self.fails} and {dies}"
            )

    def log_policy(self, theta: Tensor) -> Tensor:
        """One decision a prompt, and behind them that of tokens which follow by themselves."""
        return torch.cat([super().log_policy(theta), theta.new_tensor([[0.0, NEVER]])])

    def prompts(self) -> Sequence[Prompt]:
        """Each with a wrong and a right answer, graded or failed."""
        return [Prompt(share, self._courses(number)) for number, share in enumerate(self.shares)]

    def _courses(self, prompt: int) -> tuple[Course, ...]:
        died = Course(((),), (0.0,), chance=self.dies, status=Status.FAILED)
        found = [died] if self.dies else []
        for action, (reward, length, fails) in enumerate(
            zip(self.rewards, self.lengths, self.fails, strict=True)
        ):
            rows = (((prompt, action), *[(len(self.theta), 0)] * (length - 1)),)
            found.append(Course(rows, (reward,), chance=(1 - self.dies) * (1 - fails)))
            if fails:
                chance = (1 - self.dies) * fails
                found.append(Course(rows, (reward,), ((0.0,),), chance=chance, status=Status.FAILED))
        return tuple(found)


class FailingRollouts(OneTurn):
    """One turn, where some rollouts fail, and groups that lack one are dropped by the gate.

    Args:
        theta: as for :class:`OneTurn`.
        fails: likewise.
        dies: likewise.
    """

    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({"gate.on_incomplete": "drop"})

    def __init__(
        self,
        *,
        theta: Sequence[float] = (1.0, -1.0),
        fails: Sequence[float] = (0.0, 0.0),
        dies: float = 0.0,
    ):
        super().__init__(theta=theta, fails=fails, dies=dies)

"""Tasks of which everything is known: one turn, several rewards, fan-out, forks, and turns as rows or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.transforms.schema import Status

from .small_task import Family, Prompt, SmallTask, Trajectory

NEVER = -1e9  # a log-probability whose exponential is 0, as is its share of an entropy


class OneTurn(SmallTask):
    """Each prompt is answered wrong (action 0) or right (action 1), and that is all.

    θ_p is the logit of a right answer to prompt p. Answers may have further tokens, which follow by
    themselves: they count in every length and the policy has no choice in them. A rollout that failed has a
    reward of 0 in its row. Where it failed with an answer, its return is what that would have been paid;
    where it failed before it had one, nothing.

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
        >>> [trajectory.returns for trajectory in OneTurn(theta=[0.0]).prompts()[0].trajectories]
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
        prompts = []
        for number, share in enumerate(self.shares):
            trajectories = []
            if self.dies:
                trajectories.append(Trajectory(((),), (0.0,), chance=self.dies, status=Status.FAILED))
            for action, fails in enumerate(self.fails):
                follow = [(len(self.theta), 0)] * (self.lengths[action] - 1)
                rows, returns = (((number, action), *follow),), (self.rewards[action],)
                trajectories.append(Trajectory(rows, returns, chance=(1 - self.dies) * (1 - fails)))
                if fails:
                    chance = (1 - self.dies) * fails
                    trajectories.append(
                        Trajectory(rows, returns, ((0.0,),), chance=chance, status=Status.FAILED)
                    )
            prompts.append(Prompt(share, tuple(trajectories)))
        return prompts


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


class SeveralRewards(SmallTask):
    """One action of three, each with two rewards, (N, 2); its return is their weighted sum.

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
        """One prompt with three trajectories."""
        return [
            Prompt(
                1.0,
                tuple(Trajectory((((0, action),),), returns) for action, returns in enumerate(self.rewards)),
            )
        ]


class FanOut(SmallTask):
    """The policy answers, or hands on to a second segment, which answers wrong or right.

    θ₀ is the logit of handing on, θ₁ that of a right answer then. Rollouts that hand on are two rows with
    the same reward: whoever gives each row a vote counts them twice.

    Args:
        theta: θ₀ and θ₁.
        rewards: of answering at once, of a wrong and of a right answer in the second segment.

    Example:
        >>> [len(trajectory.rows) for trajectory in FanOut().prompts()[0].trajectories]
        [1, 2, 2]
    """

    def __init__(self, *, theta: Sequence[float] = (0.2, -0.3), rewards: Sequence[float] = (0.1, 0.0, 1.0)):
        super().__init__(theta=theta)
        self.rewards = tuple(rewards)
        self._check_lengths(theta=(self.theta, 2), rewards=(self.rewards, 3))

    def prompts(self) -> Sequence[Prompt]:
        """One prompt with three trajectories."""
        at_once, wrong, right = ((reward,) for reward in self.rewards)
        first = ((0, 1),)
        return [
            Prompt(
                1.0,
                (
                    Trajectory((((0, 0),),), at_once),
                    Trajectory((first, ((1, 0),)), wrong),
                    Trajectory((first, ((1, 1),)), right),
                ),
            )
        ]


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
        trajectories = (
            Trajectory((leaf,), (reward,)) for leaf, reward in zip(leaves, self.rewards, strict=True)
        )
        return [Prompt(1.0, tuple(trajectories))]

    def families(self, trajectories: Sequence[Trajectory], probability: Sequence[float]) -> Sequence[Family]:
        """Pairs with one first action: P(first) · P(second | first) · P(other second | first)."""
        below = defaultdict(list)
        for number, trajectory in enumerate(trajectories):
            below[trajectory.actions[0]].append(number)
        return [
            Family((one, other), probability[one] * probability[other] / fsum(probability[n] for n in leaves))
            for leaves in below.values()
            for one in leaves
            for other in leaves
        ]


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
        >>> trajectories = StopOrContinue().prompts()[0].trajectories
        >>> [(trajectory.actions, round(trajectory.returns[0], 1)) for trajectory in trajectories[:2]]
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
        return [Prompt(1.0, tuple(self.trajectory(turns) for turns in range(len(self.ends))))]

    def trajectory(self, turns: int) -> Trajectory:
        """That of a rollout that takes so many turns."""
        actions = [(turn, 1) for turn in range(turns)] + [(turns, 0)] * (turns < len(self.theta))
        rewards = [self.turn * action for _, action in actions]
        return Trajectory(
            rows=(tuple(actions),),
            returns=(self.turn * turns + self.ends[turns],),
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

    def trajectory(self, turns: int) -> Trajectory:
        """That of a rollout that takes so many turns."""
        inside = super().trajectory(turns)
        rewards = list(inside.turn_rewards or ())
        rewards[-1] += self.ends[turns]
        return Trajectory(
            rows=tuple((action,) for action in inside.actions),
            returns=inside.returns,
            paid=tuple((reward,) for reward in rewards),
            states=tuple(range(len(rewards))),
        )

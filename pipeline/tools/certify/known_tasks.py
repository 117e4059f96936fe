"""Define small tasks: one turn, several rewards, fan-out, forks, and turns inside rows or as rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.transforms.table.schema import Status

from .small_task import Family, Prompt, SmallTask, Trajectory

NEVER = torch.finfo(torch.float64).min  # its exponential is 0, and so is its entropy term


@dataclass(kw_only=True, eq=False)
class OneTurn(SmallTask):
    """Each rollout has one turn, with a wrong answer (action 0) or a right answer (action 1).

    θ_p is the logit of a right answer to prompt p. Answers may have further tokens with probability 1, which
    count in all lengths. The row of a failed rollout has the reward 0. If the rollout failed after its
    answer, its return is the reward of the answer. If it failed before, its return is 0.

    Args:
        theta: logits of a right answer, one for each prompt.
        shares: probabilities of the prompts, with sum 1; None: equal.
        rewards: rewards of a wrong and of a right answer.
        lengths: tokens of a wrong and of a right answer, ≥ 1.
        fails: probabilities that a rollout fails after a wrong and after a right answer, in [0, 1).
        dies: probability that a rollout fails before it has an answer, in [0, 1).

    Further options are those of :class:`SmallTask`.

    Example:
        >>> [trajectory.returns for trajectory in OneTurn(theta=[0.0]).prompts()[0].trajectories]
        [(0.0,), (1.0,)]
    """

    shares: Sequence[float] | None = None
    rewards: Sequence[float] = (0.0, 1.0)
    lengths: Sequence[int] = (1, 1)
    fails: Sequence[float] = (0.0, 0.0)
    dies: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = [1 / len(self.theta)] * len(self.theta) if self.shares is None else self.shares
        self.shares = shares
        self._check_lengths(shares=len(self.theta), rewards=2, lengths=2, fails=2)
        if abs(sum(shares) - 1) > 1e-9:
            raise ValueError(f"shares must have the sum 1; got {shares}")
        chances = (*self.fails, self.dies)
        if min(self.lengths) < 1 or min(chances) < 0 or max(chances) >= 1:
            raise ValueError(
                "lengths must be ≥ 1, fails and dies in [0, 1); got "
                f"{self.lengths}, {self.fails} and {self.dies}"
            )

    def log_policy(self, theta: Tensor) -> Tensor:
        """One decision for each prompt, and a last one for the tokens with probability 1."""
        return torch.cat([super().log_policy(theta), theta.new_tensor([[0.0, NEVER]])])

    def prompts(self) -> Sequence[Prompt]:
        """Prompts with a wrong and a right answer, each graded or failed."""
        prompts = []
        for number, share in enumerate(self.shares or ()):
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


@dataclass(kw_only=True, eq=False)
class FailingRollouts(OneTurn):
    """:class:`OneTurn` with failing rollouts. The gate drops incomplete groups."""

    theta: Sequence[float] = (1.0, -1.0)
    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({"gate.on_incomplete": "drop"})


@dataclass(kw_only=True, eq=False)
class SeveralRewards(SmallTask):
    """The policy chooses one of three actions. Each has two rewards, and the return is their weighted sum.

    θ₀ and θ₁ are the logits of the second and third action. The logit of the first action is 0.

    Args:
        theta: θ₀ and θ₁.
        rewards: the two rewards of each action.

    Example:
        >>> SeveralRewards().columns, SeveralRewards().outcomes(2)
        (2, 9)
    """

    theta: Sequence[float] = (0.5, -0.4)
    rewards: Sequence[Sequence[float]] = ((0.0, 0.0), (1.0, 0.0), (0.2, 1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_lengths(rewards=len(self.theta) + 1)

    def log_policy(self, theta: Tensor) -> Tensor:
        """One decision among three actions."""
        return torch.cat([theta.new_zeros(1), theta]).log_softmax(0)[None]

    def prompts(self) -> Sequence[Prompt]:
        """One prompt with three trajectories."""
        return [
            Prompt(
                1.0,
                tuple(Trajectory((((0, action),),), tuple(of)) for action, of in enumerate(self.rewards)),
            )
        ]


@dataclass(kw_only=True, eq=False)
class FanOut(SmallTask):
    """The policy answers at once, or in a second segment, where the answer is wrong or right.

    θ₀ is the logit of a second segment. θ₁ is the logit of a right answer in this segment. Rollouts with a
    second segment are two rows with equal rewards, so statistics over rows count them twice.

    Args:
        theta: θ₀ and θ₁.
        rewards: rewards of an answer at once, and of a wrong and a right answer in the second segment.

    Example:
        >>> [len(trajectory.rows) for trajectory in FanOut().prompts()[0].trajectories]
        [1, 2, 2]
    """

    theta: Sequence[float] = (0.2, -0.3)
    rewards: Sequence[float] = (0.1, 0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_lengths(theta=2, rewards=3)

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


@dataclass(kw_only=True, eq=False)
class Forks(SmallTask):
    """Each rollout has two actions. The first action is sampled once for two rollouts.

    θ₀ is the logit of the first action. θ₁ and θ₂ are the logits of the second action, after the first action
    0 and 1. Each rollout is one row with both tokens, so the shared token is in two rows.

    Args:
        theta: the three logits.
        rewards: rewards of the four leaves, in order.

    Example:
        >>> Forks().outcomes(4)
        64
    """

    shared: ClassVar[int] = 1
    theta: Sequence[float] = (0.2, 0.5, -0.4)
    rewards: Sequence[float] = (0.0, 0.6, 0.3, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_lengths(theta=3, rewards=4)

    def prompts(self) -> Sequence[Prompt]:
        """One prompt with four leaves."""
        leaves = [((0, first), (1 + first, second)) for first in (0, 1) for second in (0, 1)]
        trajectories = (
            Trajectory((leaf,), (reward,)) for leaf, reward in zip(leaves, self.rewards, strict=True)
        )
        return [Prompt(1.0, tuple(trajectories))]

    def families(self, trajectories: Sequence[Trajectory], probability: Sequence[float]) -> Sequence[Family]:
        """Pairs of leaves a and b with a common first action: P(first) · P(a | first) · P(b | first)."""
        below = defaultdict(list)
        for number, trajectory in enumerate(trajectories):
            below[trajectory.actions[0]].append(number)
        return [
            Family((a, b), probability[a] * probability[b] / fsum(probability[n] for n in leaves))
            for leaves in below.values()
            for a in leaves
            for b in leaves
        ]


@dataclass(kw_only=True, eq=False)
class StopOrContinue(SmallTask):
    """At each turn the policy stops or continues. Each turn and the end have a reward.

    θ_k is the logit of continuing at turn k. After the last turn there is no decision. A rollout is one row
    with a token for each action, and the columns ``turn_index`` and ``turn_reward``.

    Args:
        theta: logits of continuing, one for each turn.
        turn: reward of each turn.
        ends: rewards of ending after 0, 1, … turns: one number more than there are turns.

    Further options are those of :class:`SmallTask`.

    Example:
        >>> trajectories = StopOrContinue().prompts()[0].trajectories
        >>> [(trajectory.actions, round(trajectory.returns[0], 1)) for trajectory in trajectories[:2]]
        [([(0, 0)], 0.0), ([(0, 1), (1, 0)], 0.8)]
    """

    theta: Sequence[float] = (0.3, -0.2, 0.4)
    turn: float = 0.5
    ends: Sequence[float] = (0.0, 0.3, 1.0, 0.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_lengths(ends=len(self.theta) + 1)

    def prompts(self) -> Sequence[Prompt]:
        """One prompt, with a trajectory for each number of turns."""
        return [Prompt(1.0, tuple(self.trajectory(turns) for turns in range(len(self.ends))))]

    def trajectory(self, turns: int) -> Trajectory:
        """The trajectory with this number of turns."""
        actions = [(turn, 1) for turn in range(turns)] + [(turns, 0)] * (turns < len(self.theta))
        rewards = [self.turn * action for _, action in actions]
        return Trajectory(
            rows=(tuple(actions),),
            returns=(self.turn * turns + self.ends[turns],),
            turn_rewards=tuple(rewards),
        )


class TurnsAsRows(StopOrContinue):
    """:class:`StopOrContinue` with one row for each turn, with the turn's reward and state."""

    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({"collapse.reward": "sum"})

    def trajectory(self, turns: int) -> Trajectory:
        """The trajectory with this number of turns."""
        inside = super().trajectory(turns)
        rewards = list(inside.turn_rewards or ())
        rewards[-1] += self.ends[turns]
        return Trajectory(
            rows=tuple((action,) for action in inside.actions),
            returns=inside.returns,
            paid=tuple((reward,) for reward in rewards),
            states=tuple(range(len(rewards))),
        )

"""The base class of tasks that are so small that all outcomes of a group can be enumerated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headrace.pipeline.load import ConfigError
from headrace.transforms.table.schema import Status

ROUNDING = 1e-14
"""Gradients below this share of the greatest return, or of the mean absolute gradient, are set to 0."""

Action = tuple[int, int]
"""The number of a decision, and the action that was taken: one token."""


@dataclass(frozen=True)
class Trajectory:
    """One trajectory that a rollout can take, from its first action to its reward.

    Args:
        rows: the actions of each row (segment) of the rollout.
        returns: one number for each reward column. The objective is the mean of their weighted sum.
        paid: the value of the reward column in each row. None: `returns` in each row.
        turn_rewards: the reward of each action, for a rollout of one row. `returns` includes these rewards.
            The rest of `returns` is the outcome.
        states: the state from which each row starts; None: no states.
        chance: probability of the trajectory given its actions, if it depends on more than the policy.
        status: how the rollout ended.
    """

    rows: tuple[tuple[Action, ...], ...]
    returns: tuple[float, ...]
    paid: tuple[tuple[float, ...], ...] | None = None
    turn_rewards: tuple[float, ...] | None = None
    states: tuple[int, ...] | None = None
    chance: float = 1.0
    status: Status = Status.COMPLETED

    @property
    def actions(self) -> list[Action]:
        """The actions of all rows, in order."""
        return [action for row in self.rows for action in row]


class GroupSizeError(ValueError):
    """A task has no groups of this size."""


class Prompt(NamedTuple):
    """A prompt, its probability, and all trajectories of its rollouts."""

    probability: float
    trajectories: tuple[Trajectory, ...]


class Family(NamedTuple):
    """Rollouts that are sampled together: a single one, or several with a common beginning."""

    trajectories: tuple[int, ...]
    probability: float


@dataclass(kw_only=True, eq=False)
class SmallTask:
    """A task for which all outcomes of a group can be enumerated.

    A subclass implements `prompts`. Decision k is a choice between action 0 and action 1 with the logit θ_k,
    unless the subclass overrides `log_policy`.

    Args:
        theta: θ, the parameters of the training policy, π.
        sampler: parameters of the sampling policy, μ; None: θ.
        teacher: parameters of a teacher, whose log-probabilities become columns; None: no teacher.
        reference: parameters of a reference policy, in the same way.

    Attributes:
        settings: options of stages, as ``stage.option``, that recipes need for the task's rows. An option is
            set if the recipe has the stage and the option's default value, and no override sets the option.
        shared: number of first actions that rollouts of one family share.

    Example:
        >>> from headrace.pipeline.tools.certify import StopOrContinue
        >>> task = StopOrContinue()
        >>> len(task.prompts()[0].trajectories), task.outcomes(4)
        (4, 256)
    """

    theta: Sequence[float]
    sampler: Sequence[float] | None = None
    teacher: Sequence[float] | None = None
    reference: Sequence[float] | None = None
    settings: ClassVar[Mapping[str, Any]] = {}
    shared: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self.sampler = self.theta if self.sampler is None else self.sampler
        for name in ("sampler", "teacher", "reference"):
            if getattr(self, name) is not None:
                self._check_lengths(**{name: len(self.theta)})

    def _check_lengths(self, **lengths: int) -> None:
        """Check the lengths of options, given by name.

        Raises:
            ValueError: an option has another length.
        """
        for name, needed in lengths.items():
            if len(given := getattr(self, name)) != needed:
                raise ValueError(f"{name} must have {needed} entries; got {list(given)}")

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """The prompts. Their probabilities sum to 1, and so do those of the trajectories of each prompt."""

    def log_policy(self, theta: Tensor) -> Tensor:
        """The log-probability of each action.

        Args:
            theta: (P,) float64.

        Returns:
            (decisions, actions) float64.
        """
        return torch.stack([logsigmoid(-theta), logsigmoid(theta)], 1)

    def families(self, trajectories: Sequence[Trajectory], probability: Sequence[float]) -> Sequence[Family]:
        """The families of a prompt, all with the same number of rollouts. By default each has one rollout.

        Args:
            trajectories: trajectories of one prompt.
            probability: probability of each trajectory under the sampling policy.
        """
        return [Family((number,), each) for number, each in enumerate(probability)]

    # -- derived quantities -----------------------------------------------------------------------------

    @property
    def columns(self) -> int:
        """Number of rewards of a rollout."""
        return len(self.prompts()[0].trajectories[0].returns)

    def log_probs(self, theta: Sequence[float]) -> Tensor:
        """(decisions, actions) float64 log-probabilities of the policy with these parameters."""
        return self.log_policy(torch.tensor(list(theta), dtype=torch.float64))

    def score(self) -> Tensor:
        """(decisions · actions, P): ∇ log π of each action."""
        theta = torch.tensor(self.theta, dtype=torch.float64)
        return torch.autograd.functional.jacobian(self.log_policy, theta).reshape(-1, len(theta))

    def true_gradient(self, weights: Sequence[float] | None = None) -> Tensor:
        """(P,) the gradient of the mean return under the training policy::

            ∇J = ∇ Σ_prompts p Σ_trajectories π(trajectory) · return

        Args:
            weights: weights of several rewards; None: all 1.
        """
        theta = torch.tensor(self.theta, dtype=torch.float64, requires_grad=True)
        size = 0.0
        log_probs, total = self.log_policy(theta), torch.zeros((), dtype=torch.float64)
        for prompt in self.prompts():
            for trajectory in prompt.trajectories:
                taken = [log_probs[action] for action in trajectory.actions]
                of_actions = sum(taken, log_probs.new_zeros(())).exp()
                given = weights or [1.0] * len(trajectory.returns)
                returns = fsum(w * each for w, each in zip(given, trajectory.returns, strict=True))
                size = max(size, abs(returns))
                total = total + prompt.probability * trajectory.chance * returns * of_actions
        found = torch.autograd.grad(total, theta)[0]
        return torch.where(found.abs() > ROUNDING * size, found, 0.0)

    def sampled_families(self, prompt: Prompt) -> Sequence[Family]:
        """The families of a prompt with their probabilities under the sampling policy.

        Raises:
            ConfigError: the probabilities do not have the sum 1: a trajectory is missing, or listed twice.
        """
        log_probs = self.log_probs(self.sampler or self.theta).tolist()
        each = [
            trajectory.chance * exp(fsum(log_probs[d][a] for d, a in trajectory.actions))
            for trajectory in prompt.trajectories
        ]
        families = self.families(prompt.trajectories, each)
        total = fsum(family.probability for family in families)
        if abs(total - 1) > 1e-9:
            raise ConfigError(
                f"the trajectories of a prompt of {type(self).__name__} must have probabilities of sum 1; "
                f"found {total:.6g}: list each trajectory once"
            )
        return families

    def outcomes(self, group_size: int) -> int:
        """Count the outcomes of a group, over all prompts.

        Raises:
            GroupSizeError: the group size is not a multiple of the families' size.
            ConfigError: the probabilities of the prompts do not have the sum 1, or are negative.
        """
        total, prompts = 0, self.prompts()
        asked = fsum(prompt.probability for prompt in prompts)
        if abs(asked - 1) > 1e-9 or min(prompt.probability for prompt in prompts) < 0:
            raise ConfigError(
                f"the prompts of {type(self).__name__} must have probabilities ≥ 0 with the sum 1; "
                f"found {asked:.6g}"
            )
        for prompt in prompts:
            families = self.families(prompt.trajectories, [1.0] * len(prompt.trajectories))
            size = len(families[0].trajectories)
            if group_size < 1 or group_size % size:
                raise GroupSizeError(
                    f"{type(self).__name__} samples {size} rollouts at a time: the group size must be a "
                    f"multiple of {size}; got {group_size}"
                )
            total += len(families) ** (group_size // size)
        return total

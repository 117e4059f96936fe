"""What the exact expectation of a recipe's gradient says of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log10
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from headrace.pipeline.account_keys import weights_of_stages
from headrace.pipeline.load import ConfigError
from headrace.transforms.errors import BatchError

from .exact_gradient import all_outcomes, gradients_of, one_group_a_step
from .small_task import ROUNDING, GroupSizeError, SmallTask


@dataclass(frozen=True)
class Judgement:
    """A gradient's expectation beside the true gradient; what cannot be divided is None.

    Attributes:
        ratio: of each parameter, what is expected over what is true.
        relative_bias: ‖E g − ∇J‖ / ‖∇J‖.
        cosine: of the angle between the two.
        variance: trace of the covariance, for one group.
        scale: ⟨E g, ∇J⟩ / ⟨∇J, ∇J⟩, how long it is in the true direction.
    """

    ratio: tuple[float | None, ...]
    relative_bias: float | None
    cosine: float | None
    variance: float
    scale: float | None


@dataclass(frozen=True)
class Certificate:
    """What is known of one recipe on one task at one size of groups.

    Attributes:
        recipe: its name.
        task: its name.
        group_size: rollouts of a group.
        outcomes: of a group, all of which were gone through.
        advantage: of the advantage alone, each rollout 1/n.
        loss: of the loss with the recipe's own weights, one group a step; None where it writes no weights.
    """

    recipe: str
    task: str
    group_size: int
    outcomes: int
    advantage: Judgement
    loss: Judgement | None

    def plain(self) -> dict[str, Any]:
        """As ``certificate.json`` has it."""
        found = asdict(self)
        del found["advantage"]["scale"]
        return found


@dataclass(frozen=True)
class Refused:
    """A recipe that refuses a task's rows, as when they lack a column, and what it says of them."""

    recipe: str
    task: str
    group_size: int
    reason: str


def judge_gradient(probability: Tensor, gradient: Tensor, true: Tensor) -> Judgement:
    """What the expectation of a gradient is beside the true one.

    Args:
        probability: (outcomes,) float64, adding up to 1.
        gradient: (outcomes, P) float64, of each outcome.
        true: (P,) float64.

    Example:
        >>> import torch
        >>> half, one = torch.tensor([0.5, 0.5]), torch.tensor([2.0])
        >>> judge_gradient(half, torch.tensor([[0.0], [2.0]]), one)
        Judgement(ratio=(0.5,), relative_bias=0.5, cosine=1.0, variance=1.0, scale=0.5)
    """
    mean = probability @ gradient
    mean = torch.where(mean.abs() > ROUNDING * (probability @ gradient.abs()), mean, 0.0)
    variance = float(probability @ (gradient - mean).square().sum(1))
    return Judgement(
        ratio=tuple(_over(float(a), float(b)) for a, b in zip(mean, true, strict=True)),
        relative_bias=_over(float((mean - true).norm()), float(true.norm())),
        cosine=_over(float(mean @ true), float(mean.norm() * true.norm())),
        variance=variance,
        scale=_over(float(mean @ true), float(true @ true)),
    )


def _over(number: float, divisor: float) -> float | None:
    return None if divisor == 0 else number / divisor


def count_outcomes(task: SmallTask, task_name: str, group_size: int, most: int) -> int:
    """How many outcomes a group of a task has.

    Args:
        task: of which.
        task_name: its name.
        group_size: rollouts of a group.
        most: how many it may have.

    Raises:
        ConfigError: it has more.
        GroupSizeError: it has no groups of that size.
    """
    outcomes = task.outcomes(group_size)
    if outcomes > most:
        many = f"{outcomes:,}" if outcomes < 10**15 else f"more than 10^{int(log10(outcomes))}"
        raise ConfigError(
            f"a group of {group_size} of task {task_name!r} has {many} outcomes, and certify.most is "
            f"{most:,}: take smaller groups (certify.group_sizes), or raise it"
        )
    return outcomes


def certify_recipe(
    config: DictConfig,
    recipe: str,
    task: SmallTask,
    task_name: str,
    *,
    group_size: int = 4,
    words: Sequence[str] = (),
    most: int = 100_000,
) -> Certificate | Refused:
    """The certificate of one recipe on one task.

    Args:
        config: the recipe's composed ``pipeline`` node.
        recipe: its name.
        task: on which it is judged.
        task_name: its name.
        group_size: rollouts of a group.
        words: overrides of the command line, which no setting of the task changes.
        most: outcomes that are gone through at most.

    Returns:
        The certificate; where the recipe refuses the task's rows, as when they lack a column, or the task
        has no groups of that size, why.

    Raises:
        ConfigError: the task has more outcomes; a misspelt option.
    """
    try:
        outcomes = count_outcomes(task, task_name, group_size, most)
    except GroupSizeError as err:
        return Refused(recipe, task_name, group_size, str(err))
    pipeline = one_group_a_step(config, task, words)
    apart = any("turn_reward" in getattr(stage, "in_keys", ()) for stage in pipeline.stages.values())
    batch, probability = all_outcomes(task, group_size, turns_paid_apart=apart)
    true = task.true_gradient(weights_of_stages(pipeline.stages.values()))
    try:
        found = gradients_of(pipeline, batch, task.score(), outcomes, group_size)
    except BatchError as err:
        return Refused(recipe, task_name, group_size, str(err))
    return Certificate(
        recipe,
        task_name,
        group_size,
        outcomes,
        judge_gradient(probability, found.advantage, true),
        None if found.loss is None else judge_gradient(probability, found.loss, true),
    )

"""Certificates: the exact expectation of a recipe's gradient, compared with the true gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log10
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from headrace.pipeline.account_keys import weights_of_stages
from headrace.pipeline.error_overrides import text_with_overrides
from headrace.pipeline.load import ConfigError
from headrace.transforms.table import BatchError

from .exact_gradient import all_outcomes, gradients_of, one_group_a_step
from .small_task import ROUNDING, GroupSizeError, SmallTask


@dataclass(frozen=True)
class Judgement:
    """The expectation of a gradient, E g, compared with the true gradient ∇J.

    A quotient is None if its divisor is 0.

    Attributes:
        ratio: E g / ∇J, for each parameter.
        relative_bias: ‖E g − ∇J‖ / ‖∇J‖.
        cosine: cosine of the angle between E g and ∇J.
        variance: trace of the covariance of g, for one group.
        scale: ⟨E g, ∇J⟩ / ⟨∇J, ∇J⟩, the length of E g along ∇J, relative to ∇J.
    """

    ratio: tuple[float | None, ...]
    relative_bias: float | None
    cosine: float | None
    variance: float
    scale: float | None


@dataclass(frozen=True)
class Certificate:
    """The certificate of one recipe on one task with one group size.

    Attributes:
        recipe: name of the recipe.
        task: name of the task.
        group_size: rollouts of a group.
        outcomes: number of outcomes of a group. The recipe ran on all of them.
        advantage: the gradient of the advantage alone, with the weight 1/n for each of the n
            rollouts that may train.
        loss: the gradient with the recipe's loss weights, for one group in each step; None if the recipe
            writes no weights.
    """

    recipe: str
    task: str
    group_size: int
    outcomes: int
    advantage: Judgement
    loss: Judgement | None

    def plain(self) -> dict[str, Any]:
        """Return the data for ``certificate.json``."""
        found = asdict(self)
        del found["advantage"]["scale"]
        return found


@dataclass(frozen=True)
class Refused:
    """A recipe without a certificate on a task: the rows are refused, or the task has no such groups."""

    recipe: str
    task: str
    group_size: int
    reason: str


def judge_gradient(probability: Tensor, gradient: Tensor, true: Tensor) -> Judgement:
    """Compare the expectation of a gradient with the true gradient.

    Args:
        probability: (outcomes,) float64, the probability of each outcome; their sum is 1.
        gradient: (outcomes, P) float64, the gradient of each outcome.
        true: (P,) float64, the true gradient.

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
    """Count the outcomes of a group of a task.

    Args:
        task: the task.
        task_name: name of the task.
        group_size: rollouts of a group.
        most: greatest number of outcomes that is allowed.

    Raises:
        ConfigError: there are more than `most` outcomes, or probabilities of prompts do not have the sum 1.
        GroupSizeError: the task has no groups of that size.
    """
    outcomes = task.outcomes(group_size)
    if outcomes > most:
        many = f"{outcomes:,}" if outcomes < 10**15 else f"more than 10^{int(log10(outcomes))}"
        raise ConfigError(
            f"a group of {group_size} of task {task_name!r} has {many} outcomes, and certify.most is "
            f"{most:,}: set smaller certify.group_sizes, or a greater certify.most"
        )
    return outcomes


def certify_recipe(
    config: DictConfig,
    recipe: str,
    task: SmallTask,
    task_name: str,
    *,
    group_size: int = 4,
    overrides: Sequence[str] = (),
    most: int = 100_000,
) -> Certificate | Refused:
    """Compute the certificate of one recipe on one task.

    Args:
        config: the recipe's composed ``pipeline`` node.
        recipe: name of the recipe.
        task: the task.
        task_name: name of the task.
        group_size: rollouts of a group.
        overrides: command-line overrides. They take precedence over the task's settings.
        most: greatest number of outcomes.

    Returns:
        The certificate, or the reason why there is none: the recipe refuses the task's rows, or the task has
        no groups of that size.

    Raises:
        ConfigError: the task has more than `most` outcomes, or an option is unknown.
    """
    try:
        outcomes = count_outcomes(task, task_name, group_size, most)
    except GroupSizeError as err:
        return Refused(recipe, task_name, group_size, str(err))
    pipeline = one_group_a_step(config, task, overrides)
    apart = any("turn_reward" in getattr(stage, "in_keys", ()) for stage in pipeline.stages.values())
    votes = any(getattr(stage, "baseline_of", "") == "votes_only" for stage in pipeline.stages.values())
    batch, probability = all_outcomes(task, group_size, turns_paid_apart=apart, votes=votes)
    true = task.true_gradient(weights_of_stages(pipeline.stages.values()))
    try:
        found = gradients_of(pipeline, batch, task.score(), outcomes, group_size)
    except BatchError as err:
        return Refused(recipe, task_name, group_size, text_with_overrides(err))
    return Certificate(
        recipe,
        task_name,
        group_size,
        outcomes,
        judge_gradient(probability, found.advantage, true),
        None if found.loss is None else judge_gradient(probability, found.loss, true),
    )

"""Certificates: the exact bias and variance of a recipe's gradient, on tasks that can be enumerated."""

from .certificate import Certificate, Judgement, Refused, certify_recipe, count_outcomes, judge_gradient
from .known_tasks import FailingRollouts, FanOut, Forks, OneTurn, SeveralRewards, StopOrContinue, TurnsAsRows
from .small_task import Family, GroupSizeError, Prompt, SmallTask, Trajectory

__all__ = [
    "Certificate",
    "FailingRollouts",
    "Family",
    "FanOut",
    "Forks",
    "GroupSizeError",
    "Judgement",
    "OneTurn",
    "Prompt",
    "Refused",
    "SeveralRewards",
    "SmallTask",
    "StopOrContinue",
    "Trajectory",
    "TurnsAsRows",
    "certify_recipe",
    "count_outcomes",
    "judge_gradient",
]

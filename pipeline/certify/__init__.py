"""Certificates: the exact bias and variance of a recipe's gradient, on tasks that can be enumerated."""

from .certificate import Certificate, Judgement, Refused, certify_recipe, judge_gradient
from .small_task import Course, Family, Prompt, SmallTask
from .tasks_of_turns import StopOrContinue, TurnsAsRows

__all__ = [
    "Certificate",
    "Course",
    "Family",
    "Judgement",
    "Prompt",
    "Refused",
    "SmallTask",
    "StopOrContinue",
    "TurnsAsRows",
    "certify_recipe",
    "judge_gradient",
]

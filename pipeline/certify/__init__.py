"""Certificates: the exact bias and variance of a recipe's gradient, on tasks that can be enumerated."""

from .certificate import Certificate, Judgement, Refused, certify_recipe, count_outcomes, judge_gradient
from .fan_out import FanOut
from .forks import Forks
from .one_turn import FailingRollouts, OneTurn
from .several_rewards import SeveralRewards
from .small_task import Course, Family, GroupSizeError, Prompt, SmallTask
from .tasks_of_turns import StopOrContinue, TurnsAsRows

__all__ = [
    "Certificate",
    "Course",
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
    "TurnsAsRows",
    "certify_recipe",
    "count_outcomes",
    "judge_gradient",
]

"""Certificates: the exact bias and variance of a recipe's gradient, on tasks that can be enumerated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .certificate import Certificate, Judgement, Refused, certify_recipe, count_outcomes, judge_gradient
    from .certify_task import certify
    from .known_tasks import (
        FailingRollouts,
        FanOut,
        Forks,
        OneTurn,
        SeveralRewards,
        StopOrContinue,
        TurnsAsRows,
    )
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
    "certify",
    "certify_recipe",
    "count_outcomes",
    "judge_gradient",
]

__getattr__, __dir__ = lazy(__name__, __all__)

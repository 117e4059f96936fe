"""Criteria decide which rows stay. SampleFilter masks, excludes or drops the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .criteria import Criterion, Finite, Fresh, LengthWithin, NotTruncated, RewardsVary, RewardWithin
    from .group_criteria import BestOf, GroupMeanWithin
    from .stage import SampleFilter

__all__ = [
    "BestOf",
    "Criterion",
    "Finite",
    "Fresh",
    "GroupMeanWithin",
    "LengthWithin",
    "NotTruncated",
    "RewardWithin",
    "RewardsVary",
    "SampleFilter",
]

__getattr__, __dir__ = lazy(__name__, __all__)

"""Criteria decide which rows stay; what follows for the others is three different things."""

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

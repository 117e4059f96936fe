"""Criteria decide which rows stay. SampleFilter masks, excludes or drops the others."""

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

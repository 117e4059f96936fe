"""Criteria decide which rows stay; what follows for the others is three different things."""

from .criteria import Criterion, Finite, Fresh, LengthWithin, NotTruncated, RewardsVary, RewardWithin
from .stage import SampleFilter

__all__ = [
    "Criterion",
    "Finite",
    "Fresh",
    "LengthWithin",
    "NotTruncated",
    "RewardWithin",
    "RewardsVary",
    "SampleFilter",
]

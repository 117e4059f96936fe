"""Transforms between collection and loss: one concept a file, a function and a thin class in each."""

from .advantage import GroupRelativeAdvantage, group_relative_advantage
from .base import BatchTransform
from .collapse import Collapsed, FanOutCollapse, collapse_fan_out
from .completeness import CompletenessGate, IncompleteGroups, incomplete_groups
from .criteria import Criterion, Finite, Fresh, LengthWithin, NotTruncated, RewardsVary, RewardWithin
from .errors import BatchError, IncompleteGroupsError, MissingKeyError, ProcessedTwiceError
from .filter import SampleFilter
from .rows import take_rows
from .split import Plan, ShuffleSplit, shuffle_split, split_minibatches
from .status import Status

__all__ = [
    "BatchError",
    "BatchTransform",
    "Collapsed",
    "CompletenessGate",
    "Criterion",
    "FanOutCollapse",
    "Finite",
    "Fresh",
    "GroupRelativeAdvantage",
    "IncompleteGroups",
    "IncompleteGroupsError",
    "LengthWithin",
    "MissingKeyError",
    "NotTruncated",
    "Plan",
    "ProcessedTwiceError",
    "RewardWithin",
    "RewardsVary",
    "SampleFilter",
    "ShuffleSplit",
    "Status",
    "collapse_fan_out",
    "group_relative_advantage",
    "incomplete_groups",
    "shuffle_split",
    "split_minibatches",
    "take_rows",
]

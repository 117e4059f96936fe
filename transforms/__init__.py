"""Transforms between collection and loss: one concept a file, a function and a thin class in each."""

from .advantage import GroupRelativeAdvantage
from .base import BatchTransform
from .collapse import Collapsed, FanOutCollapse, collapse_fan_out
from .completeness import CompletenessGate, IncompleteGroups, incomplete_groups
from .criteria import Criterion, Finite, Fresh, LengthWithin, NotTruncated, RewardsVary, RewardWithin
from .errors import BatchError, IncompleteGroupsError, MissingKeyError, ProcessedTwiceError
from .filter import SampleFilter
from .relative import group_relative_advantage
from .rows import take_rows
from .shaping import LengthPenalty, OverlongPunishment, RewardScale, length_penalty, overlong_punishment
from .split import Plan, ShuffleSplit, shuffle_split, split_minibatches
from .states import RewardsToGo, StateAdvantage, state_groups
from .status import Status
from .turns import TurnDiscount, rewards_to_go, turns_to_go
from .whiten import BatchWhitening, whiten

__all__ = [
    "BatchError",
    "BatchTransform",
    "BatchWhitening",
    "Collapsed",
    "CompletenessGate",
    "Criterion",
    "FanOutCollapse",
    "Finite",
    "Fresh",
    "GroupRelativeAdvantage",
    "IncompleteGroups",
    "IncompleteGroupsError",
    "LengthPenalty",
    "LengthWithin",
    "MissingKeyError",
    "NotTruncated",
    "OverlongPunishment",
    "Plan",
    "ProcessedTwiceError",
    "RewardScale",
    "RewardWithin",
    "RewardsToGo",
    "RewardsVary",
    "SampleFilter",
    "ShuffleSplit",
    "StateAdvantage",
    "Status",
    "TurnDiscount",
    "collapse_fan_out",
    "group_relative_advantage",
    "incomplete_groups",
    "length_penalty",
    "overlong_punishment",
    "rewards_to_go",
    "shuffle_split",
    "split_minibatches",
    "state_groups",
    "take_rows",
    "turns_to_go",
    "whiten",
]

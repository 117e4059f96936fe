"""Transforms between collection and loss: one concept a file, a function and a thin class in each."""

from .advantage import GroupRelativeAdvantage
from .base import BatchTransform
from .collapse import Collapsed, FanOutCollapse, collapse_fan_out
from .completeness import CompletenessGate, IncompleteGroups, incomplete_groups
from .criteria import Criterion, Finite, Fresh, LengthWithin, NotTruncated, RewardsVary, RewardWithin
from .deal import deal
from .errors import BatchError, IncompleteGroupsError, MissingKeyError, ProcessedTwiceError
from .filter import SampleFilter
from .means import Weighed, loss_weight
from .pack import pack, unpack, unpack_tokens
from .parts import split_microbatches, split_minibatches
from .plan import Plan
from .relative import group_relative_advantage
from .rows import take_rows
from .shaping import LengthPenalty, OverlongPunishment, RewardScale, length_penalty, overlong_punishment
from .shuffle import ShuffleSplit
from .split import Cut, shuffle_split
from .states import RewardsToGo, StateAdvantage, state_groups
from .status import Status
from .turns import TurnDiscount, rewards_to_go, turns_to_go
from .weight import LossWeight
from .weighted import weighted_loss
from .whiten import BatchWhitening, whiten

__all__ = [
    "BatchError",
    "BatchTransform",
    "BatchWhitening",
    "Collapsed",
    "CompletenessGate",
    "Criterion",
    "Cut",
    "FanOutCollapse",
    "Finite",
    "Fresh",
    "GroupRelativeAdvantage",
    "IncompleteGroups",
    "IncompleteGroupsError",
    "LengthPenalty",
    "LengthWithin",
    "LossWeight",
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
    "Weighed",
    "collapse_fan_out",
    "deal",
    "group_relative_advantage",
    "incomplete_groups",
    "length_penalty",
    "loss_weight",
    "overlong_punishment",
    "pack",
    "rewards_to_go",
    "shuffle_split",
    "split_microbatches",
    "split_minibatches",
    "state_groups",
    "take_rows",
    "turns_to_go",
    "unpack",
    "unpack_tokens",
    "weighted_loss",
    "whiten",
]

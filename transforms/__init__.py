"""Transforms between collection and loss: a folder or file a stage, its function and its class together."""

from . import schema
from .advantage import (
    BatchWhitening,
    GroupRelativeAdvantage,
    RewardsToGo,
    StateAdvantage,
    TurnDiscount,
    group_relative_advantage,
    rewards_to_go,
    state_groups,
    turns_to_go,
    whiten,
)
from .base import BatchTransform, Outcome, read_numbers
from .checks import Rule, enforce
from .collapse import Collapsed, FanOutCollapse, collapse_fan_out
from .correction import Diverged, RolloutCorrection, TokenFilter, divergence, importance_weight
from .distributed import Population, population_of
from .errors import BatchError, IncompleteGroupsError, MissingKeyError, ProcessedTwiceError
from .filter import (
    Criterion,
    Finite,
    Fresh,
    LengthWithin,
    NotTruncated,
    RewardsVary,
    RewardWithin,
    SampleFilter,
)
from .gate import CompletenessGate, IncompleteGroups, incomplete_groups
from .ids import number_labels
from .loss_rows import DenseRows, ScoreRows, pack, unpack, unpack_tokens
from .rows import take_rows
from .schema import Status
from .shaping import LengthPenalty, OverlongPunishment, RewardScale, length_penalty, overlong_punishment
from .split import (
    Cut,
    Plan,
    ShuffleSplit,
    deal,
    shuffle_split,
    split_microbatches,
    split_minibatches,
)
from .stream import GroupAssembler, StalledError
from .weight import LossWeight, Weighed, loss_weight, weighted_loss

__all__ = [
    "BatchError",
    "BatchTransform",
    "BatchWhitening",
    "Collapsed",
    "CompletenessGate",
    "Criterion",
    "Cut",
    "DenseRows",
    "Diverged",
    "FanOutCollapse",
    "Finite",
    "Fresh",
    "GroupAssembler",
    "GroupRelativeAdvantage",
    "IncompleteGroups",
    "IncompleteGroupsError",
    "LengthPenalty",
    "LengthWithin",
    "LossWeight",
    "MissingKeyError",
    "NotTruncated",
    "Outcome",
    "OverlongPunishment",
    "Plan",
    "Population",
    "ProcessedTwiceError",
    "RewardScale",
    "RewardWithin",
    "RewardsToGo",
    "RewardsVary",
    "RolloutCorrection",
    "Rule",
    "SampleFilter",
    "ScoreRows",
    "ShuffleSplit",
    "StalledError",
    "StateAdvantage",
    "Status",
    "TokenFilter",
    "TurnDiscount",
    "Weighed",
    "collapse_fan_out",
    "deal",
    "divergence",
    "enforce",
    "group_relative_advantage",
    "importance_weight",
    "incomplete_groups",
    "length_penalty",
    "loss_weight",
    "number_labels",
    "overlong_punishment",
    "pack",
    "population_of",
    "read_numbers",
    "rewards_to_go",
    "schema",
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

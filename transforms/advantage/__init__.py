"""Advantages: rewards of rollouts compared with a baseline."""

from .by_prefix import TreeAdvantage, tree_advantage
from .by_token import TokenAdvantage, token_advantage
from .by_turn import TurnAdvantage, turn_advantage
from .factors import DifficultyWeight, SignFactors, difficulty_weight
from .group_relative import GroupRelativeAdvantage, group_relative_advantage
from .peers import CombineIds, combine_ids
from .running import RunningBaseline
from .states import StateAdvantage, state_groups
from .token_terms import (
    DirectedWeight,
    EntropyShare,
    LogRatio,
    StalenessWeight,
    TokenTerm,
    TopShare,
    directed_weight,
    share_at_place,
    staleness_weight,
    top_share,
)
from .turns import RewardsToGo, TurnDiscount, rewards_to_go, turns_to_go
from .whitening import BatchWhitening, whiten

__all__ = [
    "BatchWhitening",
    "CombineIds",
    "DifficultyWeight",
    "DirectedWeight",
    "EntropyShare",
    "GroupRelativeAdvantage",
    "LogRatio",
    "RewardsToGo",
    "RunningBaseline",
    "SignFactors",
    "StalenessWeight",
    "StateAdvantage",
    "TokenAdvantage",
    "TokenTerm",
    "TopShare",
    "TreeAdvantage",
    "TurnAdvantage",
    "TurnDiscount",
    "combine_ids",
    "difficulty_weight",
    "directed_weight",
    "group_relative_advantage",
    "rewards_to_go",
    "share_at_place",
    "staleness_weight",
    "state_groups",
    "token_advantage",
    "top_share",
    "tree_advantage",
    "turn_advantage",
    "turns_to_go",
    "whiten",
]

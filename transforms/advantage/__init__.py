"""What a rollout's reward is worth, measured against those of its group."""

from .by_prefix import tree_advantage
from .by_turn import turn_advantage
from .entropy_terms import EntropyShare, TopShare, share_at_place, top_share
from .factors import DifficultyWeight, SignFactors, difficulty_weight
from .group_relative import group_relative_advantage
from .peers import CombineIds, combine_ids
from .running import RunningBaseline
from .stage import GroupRelativeAdvantage
from .states import StateAdvantage, state_groups
from .token_advantage import TokenAdvantage, token_advantage
from .token_terms import (
    DirectedWeight,
    LogRatio,
    StalenessWeight,
    TokenTerm,
    directed_weight,
    staleness_weight,
)
from .tree_stage import TreeAdvantage
from .turn_stage import TurnAdvantage
from .turns import RewardsToGo, TurnDiscount, rewards_to_go, turns_to_go
from .whiten import BatchWhitening, whiten

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

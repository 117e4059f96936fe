"""What a rollout's reward is worth, measured against those of its group."""

from .entropy_terms import EntropyShare, TopShare, share_at_place, top_share
from .group_relative import group_relative_advantage
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
from .turns import RewardsToGo, TurnDiscount, rewards_to_go, turns_to_go
from .whiten import BatchWhitening, whiten

__all__ = [
    "BatchWhitening",
    "DirectedWeight",
    "EntropyShare",
    "GroupRelativeAdvantage",
    "LogRatio",
    "RewardsToGo",
    "StalenessWeight",
    "StateAdvantage",
    "TokenAdvantage",
    "TokenTerm",
    "TopShare",
    "TurnDiscount",
    "directed_weight",
    "group_relative_advantage",
    "rewards_to_go",
    "share_at_place",
    "staleness_weight",
    "state_groups",
    "token_advantage",
    "top_share",
    "turns_to_go",
    "whiten",
]

"""What a rollout's reward is worth, measured against those of its group."""

from .group_relative import group_relative_advantage
from .stage import GroupRelativeAdvantage
from .states import StateAdvantage, state_groups
from .turns import RewardsToGo, TurnDiscount, rewards_to_go, turns_to_go
from .whiten import BatchWhitening, whiten

__all__ = [
    "BatchWhitening",
    "GroupRelativeAdvantage",
    "RewardsToGo",
    "StateAdvantage",
    "TurnDiscount",
    "group_relative_advantage",
    "rewards_to_go",
    "state_groups",
    "turns_to_go",
    "whiten",
]

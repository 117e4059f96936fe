"""Advantages: rewards of rollouts compared with a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .baselines import Baseline, Grouped, Scale
    from .by_token import TokenAdvantage, token_advantage
    from .by_turn import TurnAdvantage, dtype_of_reward, turn_advantage
    from .factors import DifficultyWeight, SignFactors, difficulty_weight
    from .group_relative import GroupRelativeAdvantage, group_relative_advantage, require_fit
    from .peers import CombineIds, combine_ids
    from .running import RunningBaseline
    from .states import StateAdvantage, state_groups
    from .token_terms import (
        DirectedWeight,
        EntropyShare,
        LogRatio,
        OptimalTokenBaseline,
        StalenessWeight,
        TokenTerm,
        TopShare,
        directed_weight,
        optimal_token_baseline,
        share_at_place,
        staleness_weight,
        top_share,
    )
    from .turns import RewardsToGo, TurnDiscount, rewards_to_go, turns_to_go
    from .values import GAE, generalized_advantage
    from .whitening import BatchWhitening, whiten

__all__ = [
    "GAE",
    "Baseline",
    "BatchWhitening",
    "CombineIds",
    "DifficultyWeight",
    "DirectedWeight",
    "EntropyShare",
    "GroupRelativeAdvantage",
    "Grouped",
    "LogRatio",
    "OptimalTokenBaseline",
    "RewardsToGo",
    "RunningBaseline",
    "Scale",
    "SignFactors",
    "StalenessWeight",
    "StateAdvantage",
    "TokenAdvantage",
    "TokenTerm",
    "TopShare",
    "TurnAdvantage",
    "TurnDiscount",
    "combine_ids",
    "difficulty_weight",
    "directed_weight",
    "dtype_of_reward",
    "generalized_advantage",
    "group_relative_advantage",
    "optimal_token_baseline",
    "require_fit",
    "rewards_to_go",
    "share_at_place",
    "staleness_weight",
    "state_groups",
    "token_advantage",
    "top_share",
    "turn_advantage",
    "turns_to_go",
    "whiten",
]

__getattr__, __dir__ = lazy(__name__, __all__)

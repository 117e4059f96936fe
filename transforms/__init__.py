"""Transforms between collection and loss. Each stage is one file or folder, with its function and class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import hint, lazy

if TYPE_CHECKING:
    from .split.gather import split_microbatches, split_minibatches
    from .split.plan import Plan, assign_rows
    from .split.shuffle import Cut, shuffle_split
    from .split.stage import ShuffleSplit
    from .stages.advantage.by_token import TokenAdvantage, token_advantage
    from .stages.advantage.by_turn import TurnAdvantage, turn_advantage
    from .stages.advantage.factors import DifficultyWeight, SignFactors, difficulty_weight
    from .stages.advantage.group_relative import GroupRelativeAdvantage, group_relative_advantage
    from .stages.advantage.peers import CombineIds, combine_ids
    from .stages.advantage.running import RunningBaseline
    from .stages.advantage.states import StateAdvantage, state_groups
    from .stages.advantage.token_terms import (
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
    from .stages.advantage.turns import RewardsToGo, TurnDiscount, rewards_to_go, turns_to_go
    from .stages.advantage.values import GAE, generalized_advantage
    from .stages.advantage.whitening import BatchWhitening, whiten
    from .stages.by_column import ByColumn
    from .stages.collapse import Collapsed, FanOutCollapse, collapse_fan_out
    from .stages.correction.diverged import Diverged, divergence
    from .stages.correction.importance import importance_weight
    from .stages.correction.stage import RolloutCorrection
    from .stages.correction.token_filter import TokenFilter
    from .stages.filter.criteria import (
        Criterion,
        Finite,
        Fresh,
        LengthWithin,
        NotTruncated,
        RewardsVary,
        RewardWithin,
    )
    from .stages.filter.group_criteria import BestOf, GroupMeanWithin
    from .stages.filter.stage import SampleFilter
    from .stages.gate import CompletenessGate, IncompleteGroups, incomplete_groups
    from .stages.sequences.dense import DenseRows
    from .stages.sequences.merge import MergeTurns, merge_turns
    from .stages.sequences.packing import pack, unpack, unpack_tokens
    from .stages.sequences.score import ScoreRows
    from .stages.shaping import (
        LengthPenalty,
        OverlongPunishment,
        RelativeLength,
        RewardScale,
        RewardShaping,
        Rollouts,
        length_penalty,
        overlong_punishment,
        relative_length,
    )
    from .stages.weight.stage import LossWeight, Weighed, loss_weight, turn_weight, weighted_loss
    from .streams.assembler import GroupAssembler
    from .streams.limits import StalledError
    from .table import schema
    from .table.errors import (
        BatchError,
        IncompleteGroupsError,
        MissingKeyError,
        ProcessedTwiceError,
        StreamWarning,
    )
    from .table.ids import Ids
    from .table.labels import number_labels
    from .table.rows import Rows
    from .table.schema import Status
    from .table.stage import BatchTransform
    from .table.tensordicts import take_rows
    from .trees.by_prefix import TreeAdvantage, tree_advantage
    from .trees.prefix_tree import logits_of_tokens, tree_log_probs, tree_mask, tree_mask_mod
    from .trees.shared_once import TrainSharedOnce

__all__ = [
    "GAE",
    "BatchError",
    "BatchTransform",
    "BatchWhitening",
    "BestOf",
    "ByColumn",
    "Collapsed",
    "CombineIds",
    "CompletenessGate",
    "Criterion",
    "Cut",
    "DenseRows",
    "DifficultyWeight",
    "DirectedWeight",
    "Diverged",
    "EntropyShare",
    "FanOutCollapse",
    "Finite",
    "Fresh",
    "GroupAssembler",
    "GroupMeanWithin",
    "GroupRelativeAdvantage",
    "Ids",
    "IncompleteGroups",
    "IncompleteGroupsError",
    "LengthPenalty",
    "LengthWithin",
    "LogRatio",
    "LossWeight",
    "MergeTurns",
    "MissingKeyError",
    "NotTruncated",
    "OptimalTokenBaseline",
    "OverlongPunishment",
    "Plan",
    "ProcessedTwiceError",
    "RelativeLength",
    "RewardScale",
    "RewardShaping",
    "RewardWithin",
    "RewardsToGo",
    "RewardsVary",
    "RolloutCorrection",
    "Rollouts",
    "Rows",
    "RunningBaseline",
    "SampleFilter",
    "ScoreRows",
    "ShuffleSplit",
    "SignFactors",
    "StalenessWeight",
    "StalledError",
    "StateAdvantage",
    "Status",
    "StreamWarning",
    "TokenAdvantage",
    "TokenFilter",
    "TokenTerm",
    "TopShare",
    "TrainSharedOnce",
    "TreeAdvantage",
    "TurnAdvantage",
    "TurnDiscount",
    "Weighed",
    "assign_rows",
    "collapse_fan_out",
    "combine_ids",
    "difficulty_weight",
    "directed_weight",
    "divergence",
    "generalized_advantage",
    "group_relative_advantage",
    "importance_weight",
    "incomplete_groups",
    "length_penalty",
    "logits_of_tokens",
    "loss_weight",
    "merge_turns",
    "number_labels",
    "optimal_token_baseline",
    "overlong_punishment",
    "pack",
    "relative_length",
    "rewards_to_go",
    "schema",
    "share_at_place",
    "shuffle_split",
    "split_microbatches",
    "split_minibatches",
    "staleness_weight",
    "state_groups",
    "take_rows",
    "token_advantage",
    "top_share",
    "tree_advantage",
    "tree_log_probs",
    "tree_mask",
    "tree_mask_mod",
    "turn_advantage",
    "turn_weight",
    "turns_to_go",
    "unpack",
    "unpack_tokens",
    "weighted_loss",
    "whiten",
]

__getattr__, __dir__ = lazy(__name__, __all__, hint)

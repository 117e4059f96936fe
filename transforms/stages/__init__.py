"""The stages of a recipe: each is a module or a folder here, with its function and its class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .by_column import ByColumn
    from .collapse import Collapsed, FanOutCollapse, Reduction, collapse_fan_out
    from .gate import CompletenessGate, IncompleteGroups, OnIncomplete, incomplete_groups
    from .shaping import (
        LengthPenalty,
        OverlongPunishment,
        RelativeLength,
        RewardScale,
        length_penalty,
        overlong_punishment,
        relative_length,
    )
    from .weight import LossWeight, Mean, Weighed, loss_weight, turn_weight, weighted_loss

__all__ = [
    "ByColumn",
    "Collapsed",
    "CompletenessGate",
    "FanOutCollapse",
    "IncompleteGroups",
    "LengthPenalty",
    "LossWeight",
    "Mean",
    "OnIncomplete",
    "OverlongPunishment",
    "Reduction",
    "RelativeLength",
    "RewardScale",
    "Weighed",
    "collapse_fan_out",
    "incomplete_groups",
    "length_penalty",
    "loss_weight",
    "overlong_punishment",
    "relative_length",
    "turn_weight",
    "weighted_loss",
]

__getattr__, __dir__ = lazy(__name__, __all__)

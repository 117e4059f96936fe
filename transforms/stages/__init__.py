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

__all__ = [
    "ByColumn",
    "Collapsed",
    "CompletenessGate",
    "FanOutCollapse",
    "IncompleteGroups",
    "LengthPenalty",
    "OnIncomplete",
    "OverlongPunishment",
    "Reduction",
    "RelativeLength",
    "RewardScale",
    "collapse_fan_out",
    "incomplete_groups",
    "length_penalty",
    "overlong_punishment",
    "relative_length",
]

__getattr__, __dir__ = lazy(__name__, __all__)

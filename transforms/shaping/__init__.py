"""Rewards shaped before anything is measured against them."""

from .length import LengthPenalty, OverlongPunishment, length_penalty, overlong_punishment
from .relative_length import RelativeLength, relative_length
from .reward_shaping import RewardScale

__all__ = [
    "LengthPenalty",
    "OverlongPunishment",
    "RelativeLength",
    "RewardScale",
    "length_penalty",
    "overlong_punishment",
    "relative_length",
]

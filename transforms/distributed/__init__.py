"""Ranks that share a batch: they meet, exchange what statistics need, and refuse together."""

from .barrier import OtherRankError
from .decided import hand_out
from .process_group import DecideOn, RankOptions, SharedIds, check_one_way, resolve_group
from .ranks import Ranks, sharing, tell_apart

__all__ = [
    "DecideOn",
    "OtherRankError",
    "RankOptions",
    "Ranks",
    "SharedIds",
    "check_one_way",
    "hand_out",
    "resolve_group",
    "sharing",
    "tell_apart",
]

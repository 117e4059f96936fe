"""Ranks that share a batch: barriers, exchange of tables, and common errors."""

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

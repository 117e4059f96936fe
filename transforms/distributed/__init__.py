"""Ranks that share a batch: barriers, exchange of tables, and common errors."""

from .barrier import OtherRankError
from .process_group import RankOptions, SharedIds, check_one_way, resolve_group
from .ranks import Ranks, connect, tell_apart

__all__ = [
    "OtherRankError",
    "RankOptions",
    "Ranks",
    "SharedIds",
    "check_one_way",
    "connect",
    "resolve_group",
    "tell_apart",
]

"""Ranks that share a batch: they meet, exchange what statistics need, and refuse together."""

from .meeting import OtherRankError
from .process_group import SharedIds, check_one_way, check_sharing, resolve_group
from .ranks import Ranks, sharing, tell_apart

__all__ = [
    "OtherRankError",
    "Ranks",
    "SharedIds",
    "check_one_way",
    "check_sharing",
    "resolve_group",
    "sharing",
    "tell_apart",
]

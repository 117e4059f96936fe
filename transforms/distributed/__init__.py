"""Ranks that share a batch: they meet, exchange what statistics need, and refuse together."""

from .meeting import OtherRankError
from .population import Population, population_of
from .process_group import SharedIds, check_one_way, check_sharing, resolve_group
from .ranks import Ranks, present_ranks, sharing, tell_apart

__all__ = [
    "OtherRankError",
    "Population",
    "Ranks",
    "SharedIds",
    "check_one_way",
    "check_sharing",
    "population_of",
    "present_ranks",
    "resolve_group",
    "sharing",
    "tell_apart",
]

"""Ranks that share a batch: they meet, exchange what statistics need, and refuse together."""

from .meeting import OtherRankError
from .options import SharedIds, check_one_way, check_sharing, resolve_group
from .population import Population, population_of
from .ranks import Ranks, present_ranks, sharing

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
]

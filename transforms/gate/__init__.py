"""Only groups with all their rollouts pass."""

from .incomplete import IncompleteGroups, incomplete_groups
from .stage import CompletenessGate

__all__ = ["CompletenessGate", "IncompleteGroups", "incomplete_groups"]

"""Estimate the effect of other group sizes from the groups of a dump (``task=plan``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .group_sizes import tabulate_group_sizes

__all__ = ["tabulate_group_sizes"]

__getattr__, __dir__ = lazy(__name__, __all__)

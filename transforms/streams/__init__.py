"""Assemble whole groups from rollouts that arrive one by one, from many workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .arriving import columns_to_send, measures
    from .assembler import GroupAssembler
    from .limits import StalledError
    from .pieces import Kinds, RowPiece, check_kinds, gather, joined_plain, kinds_of, narrowed
    from .steps import Steps, waits_for
    from .stream import Intervals
    from .survival import Survivors, Tenth, bin_of

__all__ = [
    "GroupAssembler",
    "Intervals",
    "Kinds",
    "RowPiece",
    "StalledError",
    "Steps",
    "Survivors",
    "Tenth",
    "bin_of",
    "check_kinds",
    "columns_to_send",
    "gather",
    "joined_plain",
    "kinds_of",
    "measures",
    "narrowed",
    "waits_for",
]

__getattr__, __dir__ = lazy(__name__, __all__)

"""Read training rollouts that frameworks have dumped as batches for a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .batch import Draws, Sample, to_batch
    from .file_kinds import Format, Reading
    from .open import READERS, Source, open_dump
    from .record import SourceError
    from .regrading import Regraded, regrade

__all__ = [
    "READERS",
    "Draws",
    "Format",
    "Reading",
    "Regraded",
    "Sample",
    "Source",
    "SourceError",
    "open_dump",
    "regrade",
    "to_batch",
]

__getattr__, __dir__ = lazy(__name__, __all__)

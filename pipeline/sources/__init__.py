"""Training rollouts that frameworks have dumped, read as batches that a pipeline can process."""

from .batch import Sample, to_batch
from .file_kinds import Format, Reading
from .open import READERS, Source, open_source
from .record import SourceError
from .regrading import Regraded, regrade

__all__ = [
    "READERS",
    "Format",
    "Reading",
    "Regraded",
    "Sample",
    "Source",
    "SourceError",
    "open_source",
    "regrade",
    "to_batch",
]

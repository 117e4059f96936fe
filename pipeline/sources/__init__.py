"""Training rollouts that other frameworks have dumped, as batches: yesterday's rollouts through a recipe."""

from .batch import to_batch
from .malformed import SourceError
from .open import Source, open_source
from .reading import Reading
from .registry import READERS, Format
from .sample import Sample

__all__ = ["READERS", "Format", "Reading", "Sample", "Source", "SourceError", "open_source", "to_batch"]

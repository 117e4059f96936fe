"""The parts of the command around its tasks: help, listings, checks, and the table of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .job import TrainingInterrupted, train
    from .process import run_command

__all__ = ["TrainingInterrupted", "run_command", "train"]

__getattr__, __dir__ = lazy(__name__, __all__)

"""Cut a batch into optimiser steps and forward passes."""

from .gather import OptimiserSteps, split_microbatches, split_minibatches
from .plan import Plan, assign_rows
from .shuffle import Cut, shuffle_split
from .stage import Permuted, ShuffleSplit

__all__ = [
    "Cut",
    "OptimiserSteps",
    "Permuted",
    "Plan",
    "ShuffleSplit",
    "assign_rows",
    "shuffle_split",
    "split_microbatches",
    "split_minibatches",
]

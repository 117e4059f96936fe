"""Cut a batch into optimiser steps and forward passes."""

from .gather import Progress, split_microbatches, split_minibatches
from .permuted import Permuted
from .plan import LINEAR, Plan, assign_rows
from .shuffle import Cut, shuffle_split, stream_seed
from .stage import ShuffleSplit

__all__ = [
    "LINEAR",
    "Cut",
    "Permuted",
    "Plan",
    "Progress",
    "ShuffleSplit",
    "assign_rows",
    "shuffle_split",
    "split_microbatches",
    "split_minibatches",
    "stream_seed",
]

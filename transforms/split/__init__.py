"""A batch becomes optimiser steps, and a step forward passes."""

from .gather import mark
from .microbatches import deal
from .minibatches import Cut, shuffle_split
from .plan import Plan
from .stage import ShuffleSplit
from .views import split_microbatches, split_minibatches

__all__ = [
    "Cut",
    "Plan",
    "ShuffleSplit",
    "deal",
    "mark",
    "shuffle_split",
    "split_microbatches",
    "split_minibatches",
]

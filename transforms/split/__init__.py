"""A batch becomes optimiser steps, and a step forward passes."""

from .gather import OptimiserSteps, split_microbatches, split_minibatches
from .plan import Plan, deal
from .shuffle import Cut, shuffle_split
from .stage import Drawn, ShuffleSplit

__all__ = [
    "Cut",
    "Drawn",
    "OptimiserSteps",
    "Plan",
    "ShuffleSplit",
    "deal",
    "shuffle_split",
    "split_microbatches",
    "split_minibatches",
]

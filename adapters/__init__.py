"""Recipes inside other trainers: a module for each, which puts a recipe where the trainer makes advantages.

A trainer that is an object gets one by :func:`attach`. One that takes an import path in its configuration is
given that of a function here, such as ``headrace.adapters.slime.post_process_rewards``; the recipe is then
that of the environment, see :func:`recipe_of_environment`. docs/coming-from/ has a page for each. A module
may import the package of its trainer; this one imports none of them.
"""

from .attaching import FewerRowsWarning, attach
from .environment import recipe_of_environment

__all__ = ["FewerRowsWarning", "attach", "recipe_of_environment"]

"""Recipes inside other trainers. In each module, a recipe computes the advantages of one trainer.

A trainer that is an object gets a recipe by :func:`attach`. A trainer that takes an import path in its
configuration gets the path of a function here, such as ``headrace.adapters.slime.post_process_rewards``. The
environment then names the recipe, see :func:`recipe_of_environment`. docs/coming-from/ has a page for each
trainer. A module may import the package of its trainer. ``headrace.adapters`` alone imports no trainer.
"""

from .attaching import FewerRowsWarning, attach
from .environment import recipe_of_environment

__all__ = ["FewerRowsWarning", "attach", "recipe_of_environment"]

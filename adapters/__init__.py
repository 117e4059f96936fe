"""Recipes inside other trainers. Each module replaces the advantages of one trainer by those of a recipe.

A trainer that is an object gets a recipe by :func:`attach`. A trainer that takes an import path in its
configuration gets the path of a function here, such as ``headrace.adapters.slime.post_process_rewards``. The
environment then names the recipe, see :func:`recipe_of_environment`. docs/coming-from/ has a page for each
trainer. A module may import the package of its trainer; this one imports none of them.
"""

from .attaching import FewerRowsWarning, attach
from .environment import recipe_of_environment

__all__ = ["FewerRowsWarning", "attach", "recipe_of_environment"]

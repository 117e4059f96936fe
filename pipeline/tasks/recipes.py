"""The recipes that a task goes through, as the command line names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omegaconf import DictConfig

from headrace.pipeline.composing import compose_config

STARTS = ("pipeline.", "hydra.searchpath=")


def recipe_nodes(names: Iterable[str], words: Sequence[str]) -> dict[str, DictConfig]:
    """The composed ``pipeline`` node of each recipe, by name.

    Args:
        names: of recipes.
        words: overrides of the command line; those of ``pipeline``, and where recipes are searched, apply to
            every recipe.

    Raises:
        ConfigError: an unknown recipe or option.

    Example:
        >>> nodes = recipe_nodes(["grpo", "rloo"], ["task=compare", "pipeline.stages.advantage.eps=0.5"])
        >>> [node.stages.advantage.eps for node in nodes.values()]
        [0.5, 0.5]
    """
    shared = [word for word in words if word.lstrip("+~").startswith(STARTS) or "@pipeline." in word]
    return {str(name): compose_config("load", f"pipeline={name}", *shared).pipeline for name in names}

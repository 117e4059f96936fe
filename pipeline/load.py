"""Pipelines composed of recipes and Hydra overrides."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .composing import ConfigError, compose_config, explain_composition, leave_out
from .nodes import build_node, check_stage
from .pipeline import Pipeline


def load_pipeline(*overrides: str) -> Pipeline:
    """Compose a pipeline from a recipe and Hydra overrides, as the command would.

    Args:
        overrides: ``"pipeline=grpo"`` names the recipe (the default), the others change it:
            ``"pipeline.stages.advantage.scale=none"``, ``"~pipeline.stages.filter"``,
            ``"+pipeline.stages.bonus={_target_: my.module.Bonus}"``, ``"pipeline.order=[...]"``,
            ``"hydra.searchpath=[pkg://my.conf]"``.

    Raises:
        ConfigError: an unknown recipe, stage or option.

    Example:
        >>> load_pipeline("pipeline=grpo", "pipeline.stages.advantage.scale=none").stages["advantage"].scale
        'none'
    """
    if bare := [word for word in overrides if "=" not in word and not word.startswith("~")]:
        raise ConfigError(f"an override is KEY=VALUE; got {bare[0]!r}. A recipe is pipeline={bare[0]}")
    return build_pipeline(compose_config("load", *map(leave_out, overrides)).pipeline)


def build_pipeline(config: DictConfig) -> Pipeline:
    """Instantiate a composed ``pipeline`` node.

    Raises:
        ConfigError: a stage without a ``_target_``, or an option that its class does not have.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as err:
        raise ConfigError(
            f"the pipeline's configuration does not resolve: {explain_composition(err)}"
        ) from err
    stages = plain.get("stages") or {} if isinstance(plain, dict) else {}
    if not isinstance(stages, dict):
        raise ConfigError(f"pipeline.stages must be names and nodes; got {stages!r}")
    for name, node in stages.items():
        if node is not None:
            check_stage(f"stage {name!r}", name, node, [other for other in stages if other != name])
    return build_node(config, "pipeline", plain)

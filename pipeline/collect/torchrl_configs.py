"""Register stages, criteria, terms and hooks with TorchRL's Hydra configurations."""

from __future__ import annotations

import inspect
from importlib import resources
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import MISSING

RECIPE = {"_target_": "headrace.pipeline.load_pipeline", "_args_": ["pipeline=grpo"]}
STAGES = {"_target_": "headrace.pipeline.Pipeline", "_convert_": "all", "stages": "${transform}"}


def register_configs() -> None:
    """Add every stage to the group ``transform`` of Hydra's ConfigStore, next to TorchRL's transforms.

    Call it after importing ``torchrl.trainers.algorithms.configs``, before ``hydra.main`` composes. A list
    such as ``transform=[gate,collapse,advantage]`` keeps its order. Each entry has its own package, so you
    can set ``transform.gate.group_size=8``. A transform of TorchRL in the list needs a package as well:
    ``+transform@transform.counter=step_counter``. ``+transform@mine=gate`` puts an entry anywhere else.

    It adds these groups:

    - ``transform``: the stages of ``conf/stage`` with their default options, and ``stamp_ids``,
      :class:`StampIds` for an environment.
    - ``transform/criterion``: the criteria of ``conf/criterion``, as in
      ``+transform/criterion@transform.filter.criterion=rewards_vary``.
    - ``transform/term``: the terms of ``conf/term``, for ``token_advantage``.
    - ``hook``: a :class:`PipelineHook` for the `hooks` of a trainer. ``recipe`` has a recipe, as in
      ``hook.pipeline._args_=['pipeline=dapo']``; ``stages`` has the stages that ``transform`` lists.

    Example:
        >>> register_configs()
        >>> {"gate.yaml", "advantage.yaml", "stamp_ids.yaml"} <= set(ConfigStore.instance().list("transform"))
        True
    """
    store = ConfigStore.instance().store
    for group in ("criterion", "term"):  # the prefix transform/ avoids the names of headrace's own groups
        for name, target in _listed(group).items():
            store(group=f"transform/{group}", name=name, node=config_of(target), provider="headrace")
    for name, target in {**_listed("stage"), "stamp_ids": "headrace.pipeline.StampIds"}.items():
        package = f"transform.{name}"  # otherwise Hydra would merge the entries of a list into one
        store(group="transform", name=name, node=config_of(target), package=package, provider="headrace")
    hook = config_of("headrace.pipeline.PipelineHook")
    for name, pipeline in (("recipe", RECIPE), ("stages", STAGES)):
        store(group="hook", name=name, node=hook | {"pipeline": pipeline}, provider="headrace")


def config_of(target: str) -> dict[str, Any]:
    """Make a config node for a class, with its default options.

    Example:
        >>> config_of("headrace.transforms.SampleFilter")["criterion"]
        '???'
    """
    options = inspect.signature(get_class(target)).parameters.values()
    defaults = {p.name: MISSING if p.default is p.empty else p.default for p in options}
    return {"_target_": target, "_convert_": "all", **defaults}


def _listed(group: str) -> dict[str, str]:
    """The class of each entry of a group of ``conf``."""
    files = resources.files("headrace.conf").joinpath(group).iterdir()
    found = {path.name.removesuffix(".yaml"): yaml.safe_load(path.read_text("utf-8")) for path in files}
    return {name: found[name]["_target_"] for name in sorted(found)}

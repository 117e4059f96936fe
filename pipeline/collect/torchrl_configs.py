"""Stages, criteria, terms and hooks as entries of TorchRL's Hydra configurations."""

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
    """Put every stage into the group ``transform`` of Hydra's ConfigStore, where TorchRL has its transforms.

    Call it where ``torchrl.trainers.algorithms.configs`` is imported, before ``hydra.main`` composes. A list
    choice keeps its order, ``transform=[gate,collapse,advantage]``, and each entry has a package of its own,
    ``transform.gate.group_size=8``; one of TorchRL's own in that list needs one too,
    ``+transform@transform.counter=step_counter``. ``+transform@mine=gate`` puts one anywhere else.

    ``transform``: the stages of ``conf/stage``, with their options at their defaults, and ``stamp_ids``,
    :class:`StampIds` for an environment.

    ``transform/criterion``: those of ``conf/criterion``, as in
    ``+transform/criterion@transform.filter.criterion=rewards_vary``; ``transform/term``: those of
    ``conf/term``, for ``token_advantage``.

    ``hook``: a :class:`PipelineHook` for the `hooks` of a trainer, ``recipe`` with a recipe,
    ``hook.pipeline._args_=['pipeline=dapo']``, or ``stages`` with the stages that ``transform`` lists.

    Example:
        >>> register_configs()
        >>> {"gate.yaml", "advantage.yaml", "stamp_ids.yaml"} <= set(ConfigStore.instance().list("transform"))
        True
    """
    store = ConfigStore.instance().store
    for group in ("criterion", "term"):  # without a path these are our own files
        for name, target in _listed(group).items():
            store(group=f"transform/{group}", name=name, node=config_of(target), provider="headrace")
    for name, target in {**_listed("stage"), "stamp_ids": "headrace.pipeline.StampIds"}.items():
        package = f"transform.{name}"  # else the entries of a list choice would be merged into one
        store(group="transform", name=name, node=config_of(target), package=package, provider="headrace")
    hook = config_of("headrace.pipeline.PipelineHook")
    for name, pipeline in (("recipe", RECIPE), ("stages", STAGES)):
        store(group="hook", name=name, node=hook | {"pipeline": pipeline}, provider="headrace")


def config_of(target: str) -> dict[str, Any]:
    """A node that makes an object of a class, with its options at their defaults.

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

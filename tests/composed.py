"""Pipelines and configurations from recipes; composing takes longer than most of what is tried with them."""

from __future__ import annotations

import copy
from functools import cache

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from headrace.pipeline import Pipeline, load_pipeline


def composed(*overrides: str) -> Pipeline:
    """``load_pipeline(*overrides)``, or a copy of what that returned before it ran anything."""
    return copy.deepcopy(_composed(*overrides))


@cache
def _composed(*overrides: str) -> Pipeline:
    return load_pipeline(*overrides)


def configure(name: str, *overrides: str) -> DictConfig:
    """What Hydra composes from ``conf/<name>.yaml``."""
    with initialize_config_module("headrace.conf", version_base="1.3"):
        return compose(name, list(overrides))

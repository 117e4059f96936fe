"""Pipelines and configurations from recipes; composing takes longer than most of what is tried with them."""

from __future__ import annotations

import copy
from functools import cache

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from headrace.pipeline import Pipeline, load_pipeline
from headrace.pipeline.run import LastRun


def composed(*overrides: str) -> Pipeline:
    """``load_pipeline(*overrides)``, or a new one like that."""
    pipeline = copy.deepcopy(_composed(*overrides))
    LastRun.__init__(pipeline)  # or it would say that it is a copy
    return pipeline


@cache
def _composed(*overrides: str) -> Pipeline:
    return load_pipeline(*overrides)


def configure(name: str, *overrides: str) -> DictConfig:
    """What Hydra composes from ``conf/<name>.yaml``."""
    return copy.deepcopy(_configured(name, *overrides))


@cache
def _configured(name: str, *overrides: str) -> DictConfig:
    with initialize_config_module("headrace.conf", version_base="1.3"):
        return compose(name, list(overrides))

"""Pipelines and configurations from recipes; composing takes longer than most of what is tried with them."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from kept import kept
from omegaconf import DictConfig

from headrace.pipeline import Pipeline, load_pipeline
from headrace.pipeline.run import LastRun


def composed(*overrides: str) -> Pipeline:
    """``load_pipeline(*overrides)``, or a new one like that."""
    pipeline = kept(repr(("load_pipeline", *overrides)), lambda: load_pipeline(*overrides))
    LastRun.__init__(pipeline)  # or it would say that it is a copy
    return pipeline


def configure(name: str, *overrides: str) -> DictConfig:
    """What Hydra composes from ``conf/<name>.yaml``; a test's own dump is set afterwards."""
    own = [word for word in overrides if word.startswith("source.path=/")]
    with initialize_config_module("headrace.conf", version_base="1.3"):
        config = compose(name, [word for word in overrides if word not in own])
    for word in own:
        config.source.path = word.partition("=")[2]
    return config

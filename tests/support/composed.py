"""Pipelines and configurations of recipes, composed once, because that takes longer than most tests."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_module
from kept import kept
from omegaconf import DictConfig

from headrace.pipeline import Pipeline, load_pipeline
from headrace.pipeline.run import LastRun


def composed(*overrides: str, **keywords: Any) -> Pipeline:
    """A new copy of the pipeline that ``load_pipeline`` has made once for all tests."""
    key = repr(("load_pipeline", *overrides, keywords))
    pipeline = kept(key, lambda: load_pipeline(*overrides, **keywords))
    LastRun.__init__(pipeline)  # a copied LastRun raises an error that it is a copy
    return pipeline


def configure(name: str, *overrides: str) -> DictConfig:
    """The configuration that Hydra composes from ``conf/<name>.yaml``. The test sets the dump afterwards."""
    own = [word for word in overrides if word.startswith("source.path=/")]
    with initialize_config_module("headrace.conf", version_base="1.3"):
        config = compose(name, [word for word in overrides if word not in own])
    for word in own:
        config.source.path = word.partition("=")[2]
    return config

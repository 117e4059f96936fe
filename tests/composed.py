"""Pipelines and configurations from recipes; composing takes longer than most of what is tried with them."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from headrace.pipeline import Pipeline, load_pipeline
from headrace.pipeline.run import LastRun

FOLDER = Path(os.environ["HEADRACE_COMPOSED"])  # of all processes of a run of pytest


def composed(*overrides: str) -> Pipeline:
    """``load_pipeline(*overrides)``, or a new one like that."""
    pipeline = copy.deepcopy(_kept(load_pipeline, *overrides))
    LastRun.__init__(pipeline)  # or it would say that it is a copy
    return pipeline


def configure(name: str, *overrides: str) -> DictConfig:
    """What Hydra composes from ``conf/<name>.yaml``."""
    return copy.deepcopy(_kept(_configured, name, *overrides))


def _configured(name: str, *overrides: str) -> DictConfig:
    with initialize_config_module("headrace.conf", version_base="1.3"):
        return compose(name, list(overrides))


@cache
def _kept(make: Callable[..., Any], *words: str) -> Any:
    file = FOLDER / sha256(repr((make.__name__, words)).encode()).hexdigest()
    if file.exists():
        return pickle.loads(file.read_bytes())
    made = make(*words)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_bytes(pickle.dumps(made))
    draft.rename(file)
    return made

"""The tasks of the command, and what it refuses in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from headrace.pipeline.composing import ConfigError
from headrace.pipeline.sources import SourceError
from headrace.pipeline.train import train
from headrace.transforms import BatchError

from .certify import certify
from .compare import compare
from .group_sizes import tabulate_group_sizes
from .replay import replay
from .settings import check_types

REFUSALS = (HydraException, OmegaConfBaseException, ConfigError, BatchError, SourceError, OSError)
TASKS = {"train": train, "replay": replay, "plan": tabulate_group_sizes}
OF_RECIPES = {"compare": compare, "certify": certify}


def perform(config: DictConfig, output: Path, overrides: Sequence[str]) -> float:
    """Perform the task of a composed configuration, and return its number.

    Args:
        config: as ``conf/config.yaml`` composes it.
        output: folder for what it writes.
        overrides: the words of the command line.

    Raises:
        ConfigError: a setting that is of another type than it must be.
    """
    check_types(config)
    if config.task in OF_RECIPES:
        return OF_RECIPES[config.task](config, output, list(overrides))
    return TASKS[config.task](config, output)

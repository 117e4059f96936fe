"""The tasks of the command, and what it refuses in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headrace.pipeline.composing import ConfigError
from headrace.pipeline.composing.compose import leaves
from headrace.pipeline.composing.nodes import as_typed, described, misfit
from headrace.pipeline.report import ReportFolder
from headrace.pipeline.sources import SourceError, open_source
from headrace.pipeline.train import train
from headrace.transforms import BatchError
from headrace.transforms.options import annotations_of

from .audit import audit
from .certify import certify
from .compare import compare
from .group_sizes import tabulate_group_sizes
from .measure_trainer import measure_trainer
from .replay import replay

REFUSALS = (HydraException, OmegaConfBaseException, ConfigError, BatchError, SourceError, OSError)
TASKS = {"train": train, "replay": replay, "plan": tabulate_group_sizes}
OF_RECIPES = {"compare": compare, "audit": audit, "certify": certify, "xray": measure_trainer}


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


TYPES: dict[str, Any] = {
    "task": str,
    "seed": int,
    "device": str,
    "threads": int | None,
    "group_size": int,
    "train.steps": int,
    "train.epochs": int,
    "train.max_grad_norm": float | None,
    "train.transform": str | None,  # or a node
    "report.html": bool,
    "report.solved": float,
    "report.parameters": float | None,
    "plan.group_sizes": list[int],
    "pipelines": list[str],
    "audit.strict": bool,
    "certify.group_sizes": int | list[int],
    "certify.only": str | list[str] | None,
    "certify.most": int,
    "xray.of": str,
    "xray.cuts": list[int],
    "xray.only": str | None,
    "xray.source": str | None,
    "xray.curve": bool,
    **{f"report.{name}": annotations_of(ReportFolder)[name] for name in ("steps", "dump", "every")},
    **{f"source.{name}": kind for name, kind in annotations_of(open_source).items() if name != "return"},
    "source.path": str | None,  # which the tasks ask for themselves
    "source.regrade": str | None,  # which names a callable; or a node
}


def check_types(config: DictConfig) -> None:
    """Check the type of every setting that no ``_target_`` takes.

    Raises:
        ConfigError: the first setting of another type, or one value where there are several settings.
    """
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for path, value in leaves(_settings(plain)).items():
        if any(known.startswith(f"{path}.") for known in TYPES) and value != {}:
            some = f"{path} has settings of its own, such as {path}.NAME=VALUE"
            raise ConfigError(f"{some}; got {as_typed(value)}")
        if above := next((known for known in TYPES if path.startswith(f"{known}.")), None):
            raise ConfigError(f"{above} must be {described(TYPES[above])}; got settings of its own, {path}")
        if wanted := misfit(value, TYPES.get(path, Any)):
            raise ConfigError(f"{path} must be {wanted}; got {as_typed(value)}")


def _settings(node: dict[str, Any]) -> dict[str, Any]:
    """Without the nodes that have a ``_target_``, whose values are checked when they are built."""
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in node.items()
        if not (isinstance(value, dict) and "_target_" in value)
    }

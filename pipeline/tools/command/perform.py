"""Run the task of a configuration, and check the types of its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from headrace.installed import MissingPackageError
from headrace.pipeline.composing.compose import ConfigError, leaves
from headrace.pipeline.composing.nodes import as_typed, misfit, words
from headrace.pipeline.tools.audit import audit_dump
from headrace.pipeline.tools.certify import certify
from headrace.pipeline.tools.dumps import TaskResult
from headrace.pipeline.tools.dumps.readers import SourceError, open_dump
from headrace.pipeline.tools.plan import tabulate_group_sizes
from headrace.pipeline.tools.replay import compare_recipes, replay_dump
from headrace.pipeline.tools.report import ReportFolder
from headrace.pipeline.tools.xray import measure_trainer
from headrace.pipeline.train import Packed
from headrace.transforms import BatchError
from headrace.transforms.table.annotations import annotations_of, described

from .job import train

REFUSALS = (
    HydraException,
    OmegaConfBaseException,
    ConfigError,
    BatchError,
    SourceError,
    OSError,
    MissingPackageError,
)
OF_DUMPS = {"replay": replay_dump, "plan": tabulate_group_sizes}
OF_RECIPES: dict[str, Callable[..., float | TaskResult]] = {
    "compare": compare_recipes,
    "audit": audit_dump,
    "certify": certify,
    "xray": measure_trainer,
}


def perform(
    config: DictConfig, output: Path, overrides: Sequence[str], console: Console | None = None
) -> float | TaskResult:
    """Run the task of a configuration, and return the number or the numbers that it computes.

    Args:
        config: the configuration, composed from ``conf/config.yaml``.
        output: folder for the files of the task.
        overrides: the overrides of the command line.
        console: where to print; None: standard output.

    Raises:
        ConfigError: a setting has a wrong type.
    """
    check_types(config)
    if config.task in OF_RECIPES:
        return OF_RECIPES[config.task](config, output, list(overrides), console)
    if config.task == "train":
        return train(config, output)
    return OF_DUMPS[config.task](config, output, console)


TYPES: dict[str, Any] = {
    "task": str,
    "seed": int,
    "device": str,
    "threads": int | None,
    "group_size": int,
    "train.steps": int,
    "train.epochs": int,
    "train.max_grad_norm": float | None,
    "train.transform": Packed | Callable | None,
    "report.html": bool,
    "report.solved": float,
    "report.parameters": float | None,
    "plan.group_sizes": list[int],
    "pipelines": list[str],
    "audit.strict": bool | list[str],
    "certify.group_sizes": int | list[int],
    "certify.only": str | list[str] | None,
    "certify.most": int,
    "xray.of": str,
    "xray.cuts": list[int],
    "xray.only": str | None,
    "xray.source": str | None,
    "xray.curve": bool,
    **{f"report.{name}": annotations_of(ReportFolder)[name] for name in ("steps", "dump", "every")},
    **{f"source.{name}": kind for name, kind in annotations_of(open_dump).items() if name != "return"},
    "source.path": str | None,  # the tasks check that there is a path
    "source.regrade": str | None,  # the name of a callable, or a node
}


def check_types(config: DictConfig) -> None:
    """Check the types of all settings outside nodes with a ``_target_``.

    Raises:
        ConfigError: a setting has a wrong type, or is a value where it must be a group of settings; the
            message names the first one.
    """
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for path, value in leaves(_settings(plain)).items():
        if any(known.startswith(f"{path}.") for known in TYPES) and value != {}:
            raise ConfigError(
                f"{path} is a group of settings; set one of them, as {path}.NAME=VALUE; got {as_typed(value)}"
            )
        if above := next((known for known in TYPES if path.startswith(f"{known}.")), None):
            whole = reduce(dict.__getitem__, above.split("."), plain)
            if not misfit(whole, TYPES[above]) and not misfit(value, str | list[str]):
                continue  # any column names may be set, such as source.columns.group
            needed = described(TYPES[above], words())
            raise ConfigError(f"{above} must be {needed}; got {as_typed(value)} for {path}")
        if wanted := misfit(value, TYPES.get(path, Any)):
            raise ConfigError(f"{path} must be {wanted}; got {as_typed(value)}")


def _settings(node: dict[str, Any]) -> dict[str, Any]:
    """Return settings without nodes with a ``_target_``, which are checked when they are built."""
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in node.items()
        if not (isinstance(value, dict) and "_target_" in value)
    }

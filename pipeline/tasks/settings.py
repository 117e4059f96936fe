"""The types of the settings that no ``_target_`` takes: those of the tasks, of sources and of reports."""

from __future__ import annotations

from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from headrace.pipeline.composing import ConfigError
from headrace.pipeline.hints import leaves
from headrace.pipeline.option_types import annotations_of, as_typed, described, misfit
from headrace.pipeline.sources import open_source

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
    "report.steps": int,
    "report.dump": Literal["parquet", "jsonl"] | None,
    "report.every": float | None,
    "report.solved": float,
    "report.parameters": float | None,
    "plan.group_sizes": list[int],
    "pipelines": list[str],
    "certify.group_sizes": int | list[int],
    "certify.only": str | list[str] | None,
    "certify.most": int,
    **{f"source.{name}": kind for name, kind in annotations_of(open_source).items() if name != "return"},
    "source.path": str | None,  # which the tasks ask for themselves
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

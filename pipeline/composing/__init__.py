"""Compose a configuration from overrides, and build objects from it. The names below need no torch."""

from .compose import (
    TASKS,
    ConfigError,
    compose_config,
    explain_composition,
    for_hydra,
    options_meant,
    recipes,
    refuse_parts_of_no_stage,
)

__all__ = [
    "TASKS",
    "ConfigError",
    "compose_config",
    "explain_composition",
    "for_hydra",
    "options_meant",
    "recipes",
    "refuse_parts_of_no_stage",
]

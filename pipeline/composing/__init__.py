"""How words become a configuration, and nodes of it objects; nothing listed here imports torch."""

from .compose import (
    TASKS,
    ConfigError,
    compose_config,
    explain_composition,
    options_meant,
    recipes,
    without_stage,
)

__all__ = [
    "TASKS",
    "ConfigError",
    "compose_config",
    "explain_composition",
    "options_meant",
    "recipes",
    "without_stage",
]

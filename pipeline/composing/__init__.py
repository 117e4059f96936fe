"""How words become a configuration, and nodes of it objects; nothing listed here imports torch."""

from .compose import TASKS, ConfigError, compose_config, explain_composition, leave_out, recipes

__all__ = ["TASKS", "ConfigError", "compose_config", "explain_composition", "leave_out", "recipes"]

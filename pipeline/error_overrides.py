"""Write errors for users of the command: options are overrides to type."""

from __future__ import annotations

from typing import Any

from headrace.transforms.table import BatchError, ErrorNames

__all__ = ["CommandNames", "text_with_overrides"]


class CommandNames(ErrorNames):
    """The names of options in errors, for users of the command: ``pipeline.stages.gate.group_size``."""

    def option(self, stage: str, name: str, value: str, *, other: bool) -> str:
        """The override to type."""
        if not stage:
            return super().option(stage, name, value, other=other)
        return f"pipeline.stages.{stage}.{name}{f'={value}' * bool(value)}"

    def say_infinite(self, **_: Any) -> str:
        """Say nothing, because no override adds a stage before the collapse."""
        return ""


def text_with_overrides(err: Exception) -> str:
    """The text of an error, with the options to set as overrides to type.

    Example:
        >>> error = BatchError("group {group} has 3 of 8: set {on_incomplete=drop}", group=7)
        >>> error.stage, error.made_by = "gate", "CompletenessGate()"
        >>> text_with_overrides(error)
        "stage 'gate', CompletenessGate(): group 7 has 3 of 8: set pipeline.stages.gate.on_incomplete=drop"
    """
    return err.said(CommandNames()) if isinstance(err, BatchError) else str(err)

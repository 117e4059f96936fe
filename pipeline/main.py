"""The command: ``headrace`` and ``python -m headrace.pipeline``."""

from __future__ import annotations


def main() -> None:
    """Run the command."""
    from .tools.command import run_command  # imported here, because a chain needs no command

    run_command()

"""Read dumps of rollouts, one step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .dump_steps import DumpSteps, StepsFailed
    from .paths import missing_path
    from .refused_steps import refused_report
    from .source import (
        import_callable,
        open_configured,
        overrides_by_recipe,
        print_files,
        recipe_nodes,
        said_of_overrides,
        sizes_of_groups,
        write_files,
    )
    from .task_result import TaskResult

__all__ = [
    "DumpSteps",
    "StepsFailed",
    "TaskResult",
    "import_callable",
    "missing_path",
    "open_configured",
    "overrides_by_recipe",
    "print_files",
    "recipe_nodes",
    "refused_report",
    "said_of_overrides",
    "sizes_of_groups",
    "write_files",
]

__getattr__, __dir__ = lazy(__name__, __all__)

"""A pipeline as text, and as a notebook shows it."""

from __future__ import annotations

from torch import nn

from .report.shown.notebook import stages_html


class StageListing:
    """Stages in order, each with its options that are not at their defaults."""

    stages: nn.ModuleDict
    order: list[str]

    def __repr__(self) -> str:
        lines = [f"  {i}. {name}: {self.stages[name]!r}" for i, name in enumerate(self.order, start=1)]
        return "\n".join(["Pipeline", *lines])

    def _repr_html_(self) -> str:
        return stages_html((name, repr(self.stages[name])) for name in self.order)

"""A pipeline as text, in a terminal, and in a notebook: its stages one below another."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from headrace.pipeline.printable import printable

from .notebook import stages_html


class StageListing:
    """Stages in order, each with its options that are not at their defaults."""

    stages: nn.ModuleDict
    order: list[str]

    def __repr__(self) -> str:
        lines = [f"  {i}. {name}: {self.stages[name]!r}" for i, name in enumerate(self.order, start=1)]
        return "\n".join(["Pipeline", *lines])

    def _repr_html_(self) -> str:
        return stages_html((name, repr(self.stages[name])) for name in self.order)


def show_pipeline(pipeline: StageListing) -> Group:
    """A pipeline as Rich prints it: options that do not fit go on below the stage that has them.

    Args:
        pipeline: of any stages; their text is not read as markup.

    Example:
        >>> from rich.console import Console
        >>> from headrace.pipeline import Pipeline
        >>> from headrace.transforms import ShuffleSplit
        >>> pipeline = Pipeline({"split": ShuffleSplit(minibatches=2, remainder="pad")})
        >>> Console(width=40).print(show_pipeline(pipeline))  # doctest: +NORMALIZE_WHITESPACE
        Pipeline
          1. split: ShuffleSplit(minibatches=2,
                    remainder='pad')
    """
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, name in enumerate(pipeline.order, start=1):
        table.add_row(Text(f"  {number}. {printable(name)}:"), Text(printable(repr(pipeline.stages[name]))))
    return Group(Text("Pipeline"), table)

"""A pipeline in a terminal, its stages one below another."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .pipeline import Pipeline
from .printable import printable


def show_pipeline(pipeline: Pipeline) -> Group:
    """A pipeline as Rich prints it: options that do not fit go on below the stage that has them.

    Args:
        pipeline: of any stages; their text is not read as markup.

    Example:
        >>> from rich.console import Console
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

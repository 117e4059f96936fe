"""Show a training with a progress bar, a table at the end, and a CSV file of the numbers of each step."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from headrace.pipeline.wording import printable, shown_count, shown_loss, shown_reason

from .over_steps import percent, totals_over
from .tables import FittedColumn, FittedTable

UNITS = ("rows", "rollouts", "groups")  # units of the history's counts
REWARD = "reward/all/mean"


class TrainingDisplay:
    """Show the steps of a training. Use it as a context manager.

    Args:
        steps: number of steps of the whole training.
        csv_path: file for the numbers of all steps.
        console: where to print; None: standard output.
    """

    def __init__(self, steps: int, csv_path: Path, console: Console | None = None):
        self.console = console or Console()
        self.csv_path = csv_path
        self.history: list[dict[str, float]] = []
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("reward {task.fields[reward]}  rows kept {task.fields[kept]}, out {task.fields[out]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=steps, reward="–", kept="–", out="–")

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, numbers: Mapping[str, float]) -> None:
        """Show the numbers of one step, and write them to the CSV file."""
        self.history.append(dict(numbers))
        rows, trained = numbers.get("rows/in", 0), numbers.get("rows/trained", 0)
        self._progress.update(
            self._task,
            advance=1,
            reward=f"{numbers.get(REWARD, float('nan')):.2f}",
            kept=f"{trained:.0f}",
            out=f"{rows - trained:.0f}",
        )
        write_csv(self.csv_path, self.history)

    def close(self, title: str, *, page: Path | None = None, lines: Sequence[Text] = ()) -> None:
        """Print the table over all steps, further lines, and where the files are; without steps, nothing."""
        if self.history:
            self.console.print(history_table(self.history, title), *lines, sep="\n")
            shown = f"written to {self.csv_path.parent}"
            shown += f"\nthe page: {page.resolve().as_uri()}" if page else ""
            self.console.print(Text(printable(shown, keep="\n")), soft_wrap=True)


def write_csv(path: Path, history: list[dict[str, float]]) -> None:
    """Append the last step to a CSV file. Rewrite the file if the step has new columns."""
    columns = list(dict.fromkeys(key for numbers in history for key in numbers))
    before = list(dict.fromkeys(key for numbers in history[:-1] for key in numbers))
    rewrite = columns != before
    with path.open("w" if rewrite else "a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if rewrite:
            writer.writeheader()
        writer.writerows(history if rewrite else history[-1:])


def history_table(history: list[dict[str, float]], title: str) -> FittedTable:
    """Sum rows, rollouts and groups over steps: collected, out by stage and reason, and trained.

    A rollout or group is out only if all its rows are out. A reason that removes only parts of rollouts
    counts 0 rollouts.

    Args:
        history: the numbers of each step (:attr:`StepReport.numbers`).
        title: title of the table.
    """
    table = FittedTable(
        [FittedColumn("", gives="wrap"), *(FittedColumn(unit, right=True) for unit in UNITS)], title
    )

    def total(key: str) -> float | None:
        known = [numbers[key] for numbers in history if key in numbers]
        return sum(known) if known else None

    totals = totals_over(history)
    table.add("collected", *(shown_count(totals.get(f"{unit}/in")) for unit in UNITS))
    for key in dict.fromkeys(key for numbers in history for key in numbers if key.startswith("out/")):
        if total(key):
            stage, reason = key.split("/")[1:]
            counts = (shown_loss(total(f"{prefix}{key}")) for prefix in ("", "rollouts/", "groups/"))
            table.add(shown_reason(stage, reason), *counts, indent=2)
    table.add("trained", *(shown_count(totals.get(f"{unit}/trained")) for unit in UNITS), style="bold")
    if rows := totals.get("rows/in"):
        words = f"{percent(totals['rows/trained'] / rows)} of the rows were trained"
        table.caption = f"{words}, all {len(history):,} steps" if len(history) > 1 else words
    return table

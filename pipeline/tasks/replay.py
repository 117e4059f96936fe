"""The task ``replay``: rollouts of a dump through a recipe."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from headrace.pipeline.load import build_pipeline
from headrace.pipeline.notebook import show_pipeline
from headrace.pipeline.report import ReportFolder, show_advisories, show_report, tree_words
from headrace.pipeline.train import history_table
from headrace.pipeline.wording import printable

from .logged import LoggedAdvantages
from .source import each_step, open_configured, report_of


def replay(config: DictConfig, output: Path, console: Console | None = None) -> float:
    """Run every step of a dump through the pipeline; print and write the reports.

    Args:
        config: as ``task=replay`` composes it.
        output: folder for ``config.yaml``, ``report.html`` and ``rollouts/``.
        console: where to print; None: standard output.

    Returns:
        The number of rows that are trained.

    Raises:
        ConfigError: no path, or an unknown stage or option.
        SourceError: a file that cannot be read.
        BatchError: a stage refused a step's batch.
    """
    console = console or Console()
    pipeline = build_pipeline(config.pipeline)
    source = open_configured(config)
    output.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, output / "config.yaml", resolve=True)
    console.print(show_pipeline(pipeline))
    folder = ReportFolder.configured(config, output, title=f"replay of {Path(config.source.path).name}")
    history, report, logged = [], None, LoggedAdvantages()
    with folder:
        for step, batch in each_step(source, console):
            how = {"batch": batch, "parameters": config.report.parameters}
            report = report_of(pipeline, step, batch, config, **how)
            history.append(dict(report.numbers))
            logged.add(report)
            folder.add(report)
    page = folder.close()
    if report is not None and len(history) == 1:
        console.print(show_report(report))
    elif history:
        console.print(history_table(history, f"where the rows of {len(history)} steps went"))
        names = {name for numbers in history for name in numbers if name.startswith("tree/tokens/")}
        in_all = {name: sum(numbers.get(name, 0.0) for numbers in history) for name in names}
        if words := tree_words(in_all):
            console.print(Text(f"{words}, all {len(history):,} steps"))
        console.print(*show_advisories(folder.advisories, folder.verdict, folder.unchecked), sep="\n")
    if words := logged.words():
        console.print(Text(words))
    console.print(Text(printable(f"written to {page or output}")), soft_wrap=True)
    return sum(numbers["rows/trained"] for numbers in history)

"""The task ``replay``: run the rollouts of a dump through a recipe."""

from __future__ import annotations

import shlex
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.load import build_pipeline
from headrace.pipeline.tools.audit import LoggedAdvantages
from headrace.pipeline.tools.dumps import DumpSteps, TaskResult, open_configured, print_files, write_files
from headrace.pipeline.tools.report import (
    LENGTH,
    ReportFolder,
    StepReport,
    history_table,
    make_report,
    said_of_trees,
    said_of_unchecked,
    show_advisories,
    show_pipeline,
    show_report,
)

from .missing_groups import GroupHoles


def replay_dump(config: DictConfig, output: Path, console: Console | None = None) -> TaskResult:
    """Run every step of a dump through the pipeline; print and write the reports.

    Args:
        config: the configuration, composed with ``task=replay``.
        output: folder for ``config.yaml``, ``report.html`` and ``rollouts/``.
        console: where to print; None: standard output.

    Returns:
        The number of rows that train, and ``steps`` (the numbers of each step), ``verdict``, ``notices`` and
        ``failed_steps``.

    Raises:
        ConfigError: ``source.path`` is missing, or a stage or option is unknown.
        SourceError: a file cannot be read.
        BatchError: a stage refused the first steps.
        StepsFailed: some steps failed, and `source.skip_bad` does not allow it. All files are written by
            then.
    """
    console = console or Console()
    pipeline = build_pipeline(config.pipeline)
    source = open_configured(config)
    write_files(config, output, {})
    console.print(show_pipeline(pipeline))
    folder = ReportFolder.configured(config, output, title=f"replay of {Path(config.source.path).name}")
    history, logged, missing = list[dict[str, float]](), LoggedAdvantages(), GroupHoles()
    report: StepReport | None = None
    steps = DumpSteps(source, console, folder)
    with folder:

        def reported(step: int, batch: TensorDictBase) -> StepReport:
            how = {"solved": config.report.solved, "parameters": config.report.parameters}
            return make_report(pipeline.run(batch), step=step, batch=batch, **how)

        for report in steps.results(reported):
            history.append(dict(report.numbers))
            logged.add(report)
            missing.add(report)
            folder.unsaid = report.unsaid
            folder.add(report)
        lost = [] if steps.failed or source.draws else missing.said  # not if this replay leaves groups out
        folder.missing = missing.table if lost else None
        folder.notices += [*said_of_dump(folder), *lost]
    folder.close()
    if report is not None and len(history) == 1:
        console.print(show_report(report, setup=folder.setup))
    elif history:
        console.print(history_table(history, f"where the rows of {len(history)} steps went"))
        names = {name for numbers in history for name in numbers if name.startswith("tree/tokens/")}
        in_all = {name: sum(numbers.get(name, 0.0) for numbers in history) for name in names}
        if words := said_of_trees(in_all):
            console.print(Text(f"{words}, all {len(history):,} steps"))
        console.print(
            *show_advisories(folder.advisories, folder.verdict, folder.unchecked, folder.setup), sep="\n"
        )
    steps.show()
    for sentence in [*said_of_dump(folder), *lost]:
        console.print(Text(sentence))
    if folder.missing is not None:
        console.print(folder.missing)
    if words := logged.said:
        console.print(Text(words))
    stored = [f"all rows of all steps: {shlex.join(['headrace', 'view', str(output)])}"]
    print_files(console, output, *(stored if (output / "rollouts").is_dir() else []))
    steps.end()
    found = {"steps": history, "verdict": folder.verdict if history else "", "notices": folder.notices}
    found["failed_steps"] = [each._asdict() for each in steps.failed]
    trained = sum(numbers["rows/trained"] for numbers in history)
    said = [f"{trained:,.0f} rows train, of {steps.counted}", said_of_unchecked(folder.unchecked)]
    return TaskResult(trained, found, "; ".join(filter(None, said)))


def said_of_dump(folder: ReportFolder) -> list[str]:
    """Sentences that say what the dump does not contain."""
    said = []
    if LENGTH in folder.unsaid:
        said.append(
            "Lengths in tokens are not in this dump. No number here depends on them: loss weights and shares "
            "of the gradient are left out. Set `source.tokenizer=PATH`, a tokenizer.json or a folder of "
            "transformers, to count them."
        )
    return said

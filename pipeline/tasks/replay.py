"""The task ``replay``: run the rollouts of a dump through a recipe.

If a step fails, because its records are malformed or a stage refuses them, the replay continues. No number
includes the step. The terminal, the top of the page and the exit status show that it failed. The replay ends
if a column is missing at the first step, or if the first three steps all fail: then the recipe does not fit
the dump.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from headrace.pipeline.failed_steps import FailedStep
from headrace.pipeline.load import build_pipeline
from headrace.pipeline.notebook import show_pipeline
from headrace.pipeline.refused_steps import refused_report
from headrace.pipeline.report import ReportFolder, show_advisories, show_report, tree_words
from headrace.pipeline.report.advice import LENGTH
from headrace.pipeline.sources import SourceError
from headrace.pipeline.sources.batch import Draws
from headrace.pipeline.train import history_table
from headrace.pipeline.wording import in_words_to_type, printable
from headrace.transforms import BatchError, MissingKeyError
from headrace.transforms.errors import listing

from .logged import LoggedAdvantages
from .source import (
    NAMED_DRAWS,
    each_outcome,
    open_configured,
    print_files,
    report_of,
    said_of_draws,
    with_skipped_records,
)

GIVE_UP = 3  # failed steps, without one that passed, after which the replay ends
NAMED = 20  # failed steps whose reason is shown


class StepsFailed(RuntimeError):
    """Some steps of a dump failed. The others were replayed, and the page is written."""


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
        SourceError: a dump that cannot be read.
        BatchError: a stage refused the first steps.
        StepsFailed: some steps failed, and `source.skip_bad` does not allow it. All is written by then.
    """
    console = console or Console()
    pipeline = build_pipeline(config.pipeline)
    source = open_configured(config)
    output.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, output / "config.yaml", resolve=True)
    console.print(show_pipeline(pipeline))
    folder = ReportFolder.configured(config, output, title=f"replay of {Path(config.source.path).name}")
    history, failed = list[dict[str, float]](), folder.failed
    report, logged = None, LoggedAdvantages()
    first = None
    with folder:
        for step, found in each_outcome(source, console):
            try:
                if isinstance(found, SourceError):
                    raise found
                how = {"batch": found, "parameters": config.report.parameters}
                report = report_of(pipeline, step or 0, found, config, **how)
            except (SourceError, BatchError) as err:
                first = first or err
                rows = None
                if isinstance(err, BatchError) and not isinstance(found, SourceError):
                    rows = refused_report(found, step or 0, err)
                    err = with_skipped_records(err, source)
                folder.fail(step, in_words_to_type(err).removeprefix(f"step {step}: "), rows)
                folder.notices = said_of(failed, len(history), source.draws)
                if not history and (isinstance(err, MissingKeyError) or len(failed) == GIVE_UP):
                    raise first from None
                continue
            history.append(dict(report.numbers))
            logged.add(report)
            folder.unsaid = report.unsaid
            folder.notices = said_of(failed, len(history), source.draws)
            folder.add(report, keep=step in list(source.draws)[:NAMED_DRAWS])
        if first is not None and not history:
            raise first
        folder.notices = [*said_of(failed, len(history), source.draws), *said_of_dump(folder)]
    folder.close()
    if report is not None and len(history) == 1:
        console.print(show_report(report, configs=folder.configs))
    elif history:
        console.print(history_table(history, f"where the rows of {len(history)} steps went"))
        names = {name for numbers in history for name in numbers if name.startswith("tree/tokens/")}
        in_all = {name: sum(numbers.get(name, 0.0) for numbers in history) for name in names}
        if words := tree_words(in_all):
            console.print(Text(f"{words}, all {len(history):,} steps"))
        console.print(
            *show_advisories(folder.advisories, folder.verdict, folder.unchecked, folder.configs), sep="\n"
        )
    for notice in folder.notices:
        console.print(Text(printable(notice), style="red" if failed and notice == folder.notices[0] else ""))
    if words := logged.words():
        console.print(Text(words))
    stored = [f"all rows of all steps: {shlex.join(['headrace', 'view', str(output)])}"]
    print_files(console, output, *(stored if (output / "rollouts").is_dir() else []))
    if failed and not source.skips:
        raise StepsFailed(f"{len(failed):,} of {len(failed) + len(history):,} steps failed")
    return sum(numbers["rows/trained"] for numbers in history)


def said_of(failed: Sequence[FailedStep], passed: int, draws: Mapping[int, Draws]) -> list[str]:
    """Sentences about failed steps, with the reasons, and about prompts that were drawn several times.

    Example:
        >>> said_of([FailedStep(7, "group 3 has 7 of 8")], 49, {})[0]
        '1 of 50 steps failed, and is in no number here: step 7.'
    """
    said = []
    if failed:
        steps = ["a step without a number" if each.step is None else f"step {each.step}" for each in failed]
        of, verb = len(failed) + passed, "is" if len(failed) == 1 else "are"
        named = listing(steps, most=NAMED)
        said = [f"{len(failed):,} of {of:,} steps failed, and {verb} in no number here: {named}."]
        said += [f"{step}: {each.why}" for step, each in zip(steps, failed[:NAMED], strict=False)]
    said += said_of_draws(draws)
    return said


def said_of_dump(folder: ReportFolder) -> list[str]:
    """Sentences about what the dump does not contain."""
    said = []
    if LENGTH in folder.unsaid:
        said.append(
            "Lengths in tokens are not in this dump. No number here depends on them: loss weights and shares "
            "of the gradient are left out. Set `source.tokenizer=PATH`, a tokenizer.json or a folder of "
            "transformers, to count them."
        )
    return said

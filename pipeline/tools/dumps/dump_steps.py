"""Read the steps of a dump, one after the other. Steps that fail are left out, and named with a reason.

A step fails if its records are malformed, or if a recipe refuses its rows. No result includes a failed step.
The terminal, the files, the page and the exit status show that it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.error_overrides import text_with_overrides
from headrace.pipeline.tools.report import FailedStep, ReportFolder, said_of_failed
from headrace.pipeline.wording import printable
from headrace.transforms import BatchError, MissingKeyError
from headrace.transforms.table import count_of

from .readers import Draws, Source, SourceError
from .refused_steps import refused_report

Result = TypeVar("Result")
GIVE_UP = 3  # a task ends if this many steps fail before one passes, because its options do not fit the dump
NAMED_DRAWS = 6  # at most this many prompts that were drawn several times in one step are named


class StepsFailed(RuntimeError):
    """Some steps of a dump failed. All results include the other steps, and all files are written."""


class DumpSteps:
    """Apply a task to the steps of a dump, and collect the steps that failed.

    Args:
        source: the dump.
        console: where to show a progress bar.
        folder: gets the failed steps, and the prompts that were drawn several times; None: no folder.

    Attributes:
        failed: the steps that failed.
        passed: number of steps that did not fail.
        rows: number of rows of these steps.
    """

    def __init__(self, source: Source, console: Console, folder: ReportFolder | None = None):
        self.source, self.console, self.folder = source, console, folder
        self.failed: list[FailedStep] = []
        self.passed = self.rows = 0

    def results(self, of: Callable[[int, TensorDictBase], Result]) -> Iterator[Result]:
        """Yield the result of `of` for each step and its batch.

        Args:
            of: a function of the step and its batch. If it raises a BatchError, the step fails.

        Raises:
            SourceError: steps do not ascend, or there are none; or the first steps cannot be read.
            BatchError: the recipe does not fit the dump: a column is missing at the first step that can be
                read, all steps fail, or the first three fail and ``source.skip_bad`` is false.
        """
        first: SourceError | BatchError | None = None
        for step, found in _with_progress(self.source, self.console):
            try:
                if isinstance(found, SourceError):
                    raise found
                result = of(cast(int, step), found)  # only batches come with a step
            except (SourceError, BatchError) as err:
                if isinstance(err, BatchError) and "or_wait" in err.facts:
                    err.facts["or_wait"] = ""  # no rollout of a dump is still to come
                    if "size" in err.facts and self.source.sized:
                        err.args = (err.facts["without_remedy"],)
                        err.more += f". For this dump, set source.group_size={err.facts['size']}"
                first = first or err
                self._leave_out(step, found, err)
                ends = len(self.failed) == GIVE_UP and not self.source.skips
                if not self.passed and (ends or isinstance(err, MissingKeyError)):
                    raise self._advised(err if isinstance(err, MissingKeyError) else first) from None
                continue
            finally:
                if self.folder is not None:
                    self.folder.notices = self._of_source
            self.passed, self.rows = self.passed + 1, self.rows + cast(TensorDictBase, found).numel()
            yield result
        if first is not None and not self.passed:
            raise self._advised(first)

    def _advised(self, err: SourceError | BatchError) -> SourceError | BatchError:
        """The error, with the options of the run that wrote the dump."""
        if isinstance(err, BatchError):
            err.more += self.source.advice
        return err

    def _leave_out(
        self, step: int | None, found: TensorDictBase | SourceError, err: SourceError | BatchError
    ) -> None:
        rows, why = None, str(err.args[0])
        if step is not None and isinstance(err, BatchError) and not isinstance(found, SourceError):
            why, err.step = text_with_overrides(err), step
            if self.folder is not None and self.folder.dump is not None:
                rows = refused_report(found, step, err)
        self.failed.append(FailedStep(step, why))
        if self.folder is not None:
            self.folder.fail(step, why, rows)

    @property
    def said(self) -> list[str]:
        """Sentences about failed steps, with the reasons, and about where groups and tokens come from."""
        failed = said_of_failed(self.failed, self.passed) if self.failed else []
        return failed + self._of_source

    @property
    def _of_source(self) -> list[str]:
        return said_of_draws(self.source.draws) + self.source.notices

    @property
    def counted(self) -> str:
        """Say how many rows and steps were read, and how much of the dump was left out."""
        left_out = {
            "steps that failed": len(self.failed),
            "malformed records": self.source.skipped,
            "rows of repeated prompts": sum(each.rows_left_out for each in self.source.draws.values()),
        }
        said = f"{count_of(self.rows, 'row')} in {count_of(self.passed, 'step')}"
        listed = ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
        return said + (f", without {listed}" if listed else "")

    def show(self) -> None:
        """Print the sentences of :attr:`said`."""
        for notice in self.said:
            red = self.failed and notice == self.said[0]
            self.console.print(Text(printable(notice), style="red" if red else ""), soft_wrap=True)

    def end(self) -> None:
        """End the task, after all files are written.

        Raises:
            StepsFailed: steps failed, and ``source.skip_bad`` does not allow it.
        """
        if self.failed and not self.source.skips:
            of = len(self.failed) + self.passed
            error = StepsFailed(
                f"{len(self.failed):,} of {of:,} steps failed, which is an error. With source.skip_bad=true, "
                "malformed records are skipped, and steps that still fail are left out without an error"
            )
            self.console.print(Text(str(error), style="red"), soft_wrap=True)
            raise error


def said_of_draws(draws: Mapping[int, Draws]) -> list[str]:
    """Sentences about prompts that were drawn several times in one step."""
    said = []
    split = sum(each.split for each in draws.values())
    confirmed = sum(each.confirmed for each in draws.values())
    left_out = sum(each.groups_left_out for each in draws.values())
    rows = sum(each.rows_left_out for each in draws.values())
    if draws:
        prompts = [
            f"step {step}, {prompt}, {count_of(rollouts, 'rollout')}"
            for step, each in draws.items()
            for prompt, rollouts in each.drawn
        ]
        drawn = "1 prompt was" if len(prompts) == 1 else f"{len(prompts):,} prompts were"
        named = "; ".join(prompts[:NAMED_DRAWS])
        others = ", and others" if len(prompts) > NAMED_DRAWS else ""
        said.append(f"{drawn} drawn several times in one step: {named}{others}.")
    if confirmed:
        said.append(
            f"{confirmed:,} of these groups {'was' if confirmed == 1 else 'were'} split into the draws, and "
            "the logged advantages are those of the draws."
        )
    if split := split - confirmed:
        said.append(
            f"{split:,} of these groups {'was' if split == 1 else 'were'} split into the draws, by the "
            "order of the dump. This is right if the trainer dumps rollouts in the order in which it drew "
            "their prompts. verl does so with trainer.balance_batch=False."
        )
    if left_out:
        said.append(
            f"{left_out:,} of these groups, {rows:,} rows, {'was' if left_out == 1 else 'were'} left out: "
            "the dump does not have the order of the draws."
        )
    return said


def _with_progress(
    source: Source, console: Console
) -> Iterator[tuple[int | None, TensorDictBase | SourceError]]:
    """Yield each step with its batch or its error (:meth:`Source.outcomes`), and show a progress bar."""
    columns = (
        TextColumn("reading"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TextColumn("step {task.fields[step]}"),
        TimeRemainingColumn(),
    )
    # Into a pipe, the bar would only write an empty line.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=source.total_bytes, step="–")
        for step, found in source.outcomes():
            progress.update(task, completed=source.read_bytes, step="?" if step is None else step)
            yield step, found
    if source.regraded is not None:
        console.print(Text(str(source.regraded)), soft_wrap=True)
    if source.skipped:
        count = source.skipped
        skipped = "1 malformed record was" if count == 1 else f"{count:,} malformed records were"
        console.print(f"[yellow]{skipped} skipped[/]", highlight=False)
        for message in source.messages:
            console.print(Text(f"  {message}"), soft_wrap=True)  # not read as markup or emoji

"""Write the files of a training, a replay or a comparison: the rows of each step, and one page."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Generic, Literal, TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from headrace.installed import versions
from headrace.pipeline.composing.compose import ConfigError
from headrace.pipeline.wording import for_python, printable
from headrace.transforms.carry import write_whole
from headrace.transforms.table import count_of, listing
from headrace.transforms.table.options import at_least, takes_options, within

from .advice import Advice, Advisory, History, Setup, advice_at, numbers_read
from .dump import write_dump
from .failed_steps import FAILED, FailedStep, read_failed
from .history import HISTORY, add_step, begin_history
from .html import read_steps, write_page
from .over_steps import totals_over
from .page_contents import page_data
from .page_schema import Step
from .step import StepReport
from .survivors import page_tables
from .tables import FittedTable
from .valid_json import json_text

Item = TypeVar("Item")
UNNAMED = "a run"
MOST_FAILED = 20  # at most this many failed steps are named, each with its reason
POINTS = 500  # curves have at most this many steps, so that a long run's page is quick to write and to read
STEP_FILE = re.compile(r"step_\d+\.(parquet|jsonl)")
SHARE = 0.02  # greatest share of a run's time that is spent on writing the page


@takes_options
class ReportFolder:
    """Take reports step by step. Write the rows of each step, and a page that grows with the run.

    The page has curves over all steps, or over evenly spread steps if the run has more than 500. It shows the
    rows of at most `steps` steps: the first, the last, and some in between. You can open the page while the
    run goes on: it reloads itself until :meth:`close`. A ``with`` statement closes the folder, however the
    loop ends. ``headrace view FOLDER`` shows all rows of all steps.

    Args:
        folder: the folder for ``report.html`` and ``rollouts/``. It is made if it does not exist.
        title: title of the page.
        steps: the page shows the rows of at most this many steps, ≥ 2.
        dump: ``parquet`` or ``jsonl``: the rows of each step are written to a file ``rollouts/step_NNNNNNNN``
            (:func:`write_dump`). None: only the page has rows.
        existing: what to do if the folder has rows already. ``raise`` refuses. ``resume`` continues that run,
            after a restart from a checkpoint: the files of the first new step and later steps are removed,
            because those steps are trained again. Earlier steps stay. Curves, verdict and advice are of the
            whole run, and the curves have a mark at each restart. Earlier steps stay on the page, if they
            were on it. If `dump` is None, set ``resume`` from the first start on.
        page: whether to write the page.
        every: seconds, ≥ 0, between two writings of the page. The page is written less often if writing takes
            over 2 % of the time. None: it is only written at the end.
        config: the resolved configuration, as YAML, for the page and the files' metadata.
        versus: the names of two recipes, if `advantage_by_row` of the reports is the advantage of the second.
            The page then says how the recipes differ, and gives no advice.

    Attributes:
        notices: sentences about what the page lacks. You may set it.
        difference: how two recipes differ, as a sentence.
        failed: the failed steps, from :meth:`fail`.
        unsaid: names of numbers that the replayed dump cannot have. You may set it.
        missing: a table of the groups that the replayed dump lacks, shown at the last step. You may set it.
        recipe: name of the recipe, for ``headrace view``. Empty: the viewer shows the title.
        setup: the setup of a run of the command. The page shows the overrides that were typed, and no remedy
            with an option that the run does not have. None: the run was started in Python.

    Raises:
        ValueError: `steps` is below 2, `every` is below 0, or `dump` or `existing` is unknown; from
            :meth:`add`: the rows of the step were written before.
        FileExistsError: the folder has rows of another run.

    Example:
        >>> import tempfile
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import Pipeline, ReportFolder, make_report
        >>> pipeline, batch = Pipeline({}), TensorDict({"rollout_id": [4, 5]}, batch_size=[2])
        >>> with tempfile.TemporaryDirectory() as path, ReportFolder(path, title="my run") as folder:
        ...     for step in range(3):  # your loop
        ...         run = pipeline.run(batch)
        ...         folder.add(make_report(run, step=step))
        ...     sorted(file.name for file in folder.folder.iterdir())
        ['report.html', 'rollouts']
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        title: str = UNNAMED,
        steps: int = 20,
        dump: Literal["parquet", "jsonl"] | None = "parquet",
        existing: Literal["raise", "resume"] = "raise",
        page: bool = True,
        every: float | None = 5.0,
        config: str | None = None,
        versus: Sequence[str] | None = None,
    ):
        at_least("steps", steps, 2)
        within("every", every, 0)
        folder = Path(folder)
        if dump is not None and existing == "raise":
            refuse_rows(folder, "another folder", "continue its run with ReportFolder(existing='resume')")
        self.folder, self.title, self.steps, self.dump, self.page = folder, title, steps, dump, page
        self.every, self.config, self.versus = every, config, versus
        self.notices: list[str] = []
        self.difference = ""
        self.failed: list[FailedStep] = []
        self.unsaid: list[str] = []
        self.setup: Setup | None = None
        self.recipe = ""
        self.missing: FittedTable | None = None
        self.existing = existing
        self._began, self._due, self._closed = now(), 0.0, False
        self._written: set[int] = set()  # steps whose rows are in a file
        self._begun = False  # whether the files of an earlier process were read
        self._starts: list[tuple[int, str]] = []  # the starts of RunHistory
        self._latest: Mapping[str, float] = {}  # numbers of the last step
        # The kept reports, each with its index among all reports.
        self._kept: Thinned[tuple[int, StepReport | Step | None]] = Thinned(at_least("steps", steps, 2))
        self._curves: Thinned[tuple[int, Mapping[str, float]]] = Thinned(POINTS)
        self._read: list[tuple[int, Mapping[str, float]]] = []  # of all steps, the numbers that rules read
        self._advice: dict[int, Advice] = {}  # the advice at the steps that the page shows, by index

    @classmethod
    def configured(cls, config: DictConfig, folder: Path, *, title: str) -> ReportFolder:
        """Make the folder that ``report:`` of a composed configuration describes.

        Args:
            config: the composed configuration. Its YAML goes onto the page and into the files' metadata.
            folder: as for the class.
            title: as for the class, but without the name of the recipe.

        Raises:
            ConfigError: the class refuses a setting.
            FileExistsError: the folder has rows of another run.
        """
        if config.report.dump is not None:
            named = "output" if for_python() else "hydra.run.dir=FOLDER (with -m hydra.sweep.dir=FOLDER)"
            refuse_rows(folder, f"another folder, {named}")
        composed = HydraConfig.get() if HydraConfig.initialized() else None
        recipe = composed.runtime.choices.get("pipeline") if composed else None
        try:
            made = cls(
                folder,
                title=f"{recipe or 'headrace'}, {title}",
                steps=config.report.steps,
                dump=config.report.dump,
                page=config.report.html,
                every=config.report.every,
                config=OmegaConf.to_yaml(config, resolve=True),
            )
        except ValueError as err:
            raise ConfigError(f"report.{err}") from err
        typed: list[str] = []
        if composed is not None:
            typed = [each for each in composed.overrides.hydra if each.startswith("hydra.searchpath=")]
            typed = [*composed.overrides.task, *typed]
        made.setup, made.recipe = Setup(config, typed), recipe or ""
        return made

    def __enter__(self) -> ReportFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def verdict(self) -> str:
        """A sentence that says whether the reward rises, up to the last step."""
        return self._advice_at_last().verdict

    @property
    def advisories(self) -> list[Advisory]:
        """The advice at the last step (:func:`advise`)."""
        return self._advice_at_last().advisories

    @property
    def unchecked(self) -> list[str]:
        """The names of symptoms that cannot be checked at the last step, for lack of data."""
        return self._advice_at_last().unchecked

    def add(self, report: StepReport) -> None:
        """Take the report of the next step; write its rows, and the page if it is due.

        Raises:
            TypeError: the argument is not a report.
            ValueError: the rows of a step with this number were written before.
        """
        if not isinstance(report, StepReport):
            raise TypeError(f"add takes make_report(run, step=...); got {type(report).__name__}")
        if self.dump is not None:
            self._write_rows(report)
        self._begin(report.step)
        self._closed = False
        self._kept.add((len(self._read), report))
        self._note(report.step, report.numbers)
        if self._has_history:
            add_step(self.folder / "rollouts" / HISTORY, report.step, report.numbers)
        if self.page and self.every is not None and time.monotonic() >= self._due:
            began = time.monotonic()
            self._write(live=max(self.every, 1.0))
            ended = time.monotonic()
            self._due = ended + max(self.every, (ended - began) / SHARE)

    def fail(self, step: int | None, why: str, refused: StepReport | None = None) -> None:
        """Record a failed step, which no number includes, and the reason. ``headrace view`` shows both.

        Args:
            step: number of the step; None if it is not known.
            why: the reason.
            refused: a report of its rows, if they can be read; ``headrace view`` shows them.
        """
        if refused is not None and self.dump is not None:
            self._write_rows(refused)
        else:
            self._begin(step)
        self.failed.append(FailedStep(step, why))
        if self.dump is not None:
            self._write_failed()

    def close(self) -> Path | None:
        """Write the page of a run that has ended, and return its path; None if no page is written.

        If a resumed run has no new step, the page stays as it is.
        """
        resumed_nothing = self.existing == "resume" and not (self._begun or self.failed)
        if (
            self.page
            and not self._closed
            and not (resumed_nothing and (self.folder / "report.html").exists())
        ):
            self._write(live=None)
            self._closed = True
        return self.folder / "report.html" if self.page else None

    def _write_rows(self, report: StepReport) -> None:
        if report.step in self._written:
            raise ValueError(
                "each step needs a number of its own, or its rows would replace those of another; found "
                f"step {report.step} again. Set make_report(run, step=...), or ReportFolder(dump=None) to "
                "keep no rows"
            )
        self._begin(report.step)
        write_dump(report, self.folder / "rollouts", format=self.dump or "parquet", config=self.config)
        self._written.add(report.step)

    @property
    def _has_history(self) -> bool:
        return self.dump is not None or self.existing == "resume"

    def _note(self, step: int, numbers: Mapping[str, float]) -> None:
        self._latest = numbers
        self._curves.add((step, dict(numbers)))
        self._read.append((step, {key: numbers[key] for key in numbers_read() if key in numbers}))

    def _begin(self, step: int | None) -> None:
        """At the first step, continue from the files of earlier steps, and remove the files of later ones."""
        if self._begun or step is None:
            return
        self._begun = True
        if self._has_history:
            path, resumes = self.folder / "rollouts" / HISTORY, self.existing == "resume"
            named = self.recipe or ("" if self.title == UNNAMED else self.title)
            found = begin_history(path, step, self._began, resumes=resumes, recipe=named)
            self._starts, self._began = found.starts, found.starts[0][1]
            shown = read_steps(self.folder / "report.html") if found.steps else {}
            for earlier, numbers in found.steps:
                self._kept.add((len(self._read), shown.get(earlier)))  # None: the page did not have the step
                self._note(earlier, numbers)
        if self.dump is not None:
            self._begin_rows(step)

    def _begin_rows(self, step: int) -> None:
        resumes = self.existing == "resume"
        late = [file for file in row_files(self.folder) if step_of(file) >= step]
        for file in late if resumes else row_files_of_failed(self.folder):
            file.unlink()
        if resumes:
            earlier = read_failed(self.folder / "rollouts")
            self.failed = [each for each in earlier if each.step is None or each.step < step] + self.failed
        self._write_failed()

    def _write_failed(self) -> None:
        path = self.folder / "rollouts" / FAILED
        if self.failed or path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda file: file.write_text(json_text(self.failed), encoding="utf-8"))

    def _write(self, *, live: float | None) -> None:
        kept = self._kept.all()
        shown = {place: report for place, report in kept if isinstance(report, StepReport)}
        self._advice = {
            place: self._advice.get(place) or self._advice_at(report.numbers, self._read[: place + 1])
            for place, report in shown.items()
        }
        data = page_data(
            [*shown.values()],
            earlier=[step for _, step in kept if isinstance(step, dict)],
            title=self.title,
            history=self._curves.all(),
            advice=[*self._advice.values()],
            totals=totals_over(numbers for _, numbers in self._read),
            recorded=len(self._read),
            setup=self.setup,
        )
        data["run"] = {
            "began": self._began,
            "written": now(),
            "live": live,
            "restarts": [step for step, _ in self._starts[1:]],
            "versions": versions(),
            "overrides": [printable(each) for each in (self.setup.overrides if self.setup else ())],
            "config": None if self.config is None else printable(self.config, keep="\n"),
        }
        if self.missing is not None:
            data["steps"][-1]["survivors"] += page_tables({self.missing.columns[0].name: self.missing})
        data["unsaid"] = self.unsaid
        data["rows_kept"] = self.dump is not None
        data["notices"] = [printable(notice) for notice in self.notices]
        if self.failed:
            said, *reasons = map(printable, said_of_failed(self.failed, len(self._read)))
            data["failed"] = {"said": said, "reasons": reasons}
        if self.versus is not None:
            data["versus"] = list(self.versus)
            data["difference"] = printable(self.difference)
        path = self.folder / "report.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(data, path)

    def _advice_at_last(self) -> Advice:
        if not self._read:
            return Advice("No step was recorded.", [], [])
        return self._advice_at(self._latest, self._read)

    def _advice_at(self, numbers: Mapping[str, float], history: History) -> Advice:
        """The advice at a step. A page of two recipes has none, because it shows how they differ."""
        return advice_at(numbers, history) if self.versus is None else Advice("", [], [])


def said_of_failed(failed: Sequence[FailedStep], passed: int) -> list[str]:
    """Return a sentence about the failed steps, and one with the reason of each.

    Example:
        >>> said_of_failed([FailedStep(3, "it has no rows")], 5)
        ['1 of 6 steps failed, and is in no number here: step 3.', 'step 3: it has no rows']
    """
    named = listing((each.called for each in failed), most=MOST_FAILED)
    of, verb = len(failed) + passed, "is" if len(failed) == 1 else "are"
    reasons = [f"{each.called}: {each.why}" for each in failed[:MOST_FAILED]]
    return [f"{len(failed):,} of {of:,} steps failed, and {verb} in no number here: {named}.", *reasons]


def row_files(folder: Path) -> list[Path]:
    """List the files of rows that a run has written to its folder, sorted by step."""
    files = (folder / "rollouts").glob("step_*")
    return sorted(file for file in files if STEP_FILE.fullmatch(file.name))


def step_of(file: Path) -> int:
    """Return the step of a file of rows."""
    return int(file.stem.removeprefix("step_"))


def row_files_of_failed(folder: Path) -> list[Path]:
    """List the files with the rows of failed steps, which a stage refused."""
    with suppress(ValueError):  # the list of failed steps is damaged
        failed = {each.step for each in read_failed(folder / "rollouts")}
        return [file for file in row_files(folder) if step_of(file) in failed]
    return []


def refuse_rows(folder: Path, *ways: str) -> None:
    """Refuse a folder that has the rows of a run, unless all of its steps failed.

    Args:
        folder: folder of the run.
        ways: what to do instead, for the message.

    Raises:
        FileExistsError: the folder has such rows.
    """
    failed = row_files_of_failed(folder)
    if old := [file for file in row_files(folder) if file not in failed]:
        raise FileExistsError(
            f"{folder / 'rollouts'} has the rows of another run, {count_of(len(old), 'file')} from "
            f"{old[0].name} on: take {', or '.join([*ways, 'remove these files'])}"
        )


class Thinned(Generic[Item]):
    """Keep at most `most` of the added items, evenly spread, and also the last one.

    Args:
        most: number of items, ≥ 2. If there would be more, every second item is dropped, and from then on
            only every second item is kept.

    Example:
        >>> some = Thinned(4)
        >>> for number in range(11):
        ...     some.add(number)
        >>> some.all()
        [0, 4, 8, 10]
    """

    def __init__(self, most: int):
        self.most = most
        self._kept: list[Item] = []  # every `_every`-th item, from the first on
        self._every, self._seen = 1, 0

    def add(self, item: Item) -> None:
        """Add the next item."""
        self._last = item
        if self._seen % self._every == 0:
            self._kept.append(item)
            if len(self._kept) >= self.most:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._seen += 1

    def all(self) -> list[Item]:
        """The kept items, in order."""
        last_is_kept = (len(self._kept) - 1) * self._every == self._seen - 1
        return [*self._kept] if last_is_kept else [*self._kept, self._last]


def now() -> str:
    """The time, UTC, ISO 8601 to the second: ``2026-11-22T04:19:11+00:00``."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

"""The files of a training, a replay or a comparison: a dump of each step, and one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from omegaconf import DictConfig, OmegaConf

from headrace.pipeline.composing import ConfigError

from .dump import write_dump
from .html import write_page
from .page_data import page_data
from .step import StepReport


class ReportFolder:
    """Take reports step by step; write a file per step, and at the end one page.

    The page has curves over all steps, and shows `steps` of them at most: the first, the last, and some in
    between, evenly spread.

    Args:
        folder: where ``report.html`` and the folder ``rollouts/`` go.
        title: of the page.
        steps: most steps that the page shows, ≥ 2.
        dump: ``parquet`` or ``jsonl`` files of every step; None: none.
        page: whether to write the page.
        config: the resolved configuration, as YAML, for the files' metadata.
        versus: two recipes' names, where `advantage_by_row` of the reports is the advantage of the second.

    Raises:
        ValueError: `steps` below 2, or another `dump`.
        FileExistsError: the folder has a dump already.
    """

    def __init__(
        self,
        folder: Path,
        *,
        title: str,
        steps: int = 20,
        dump: Literal["parquet", "jsonl"] | None = None,
        page: bool = True,
        config: str | None = None,
        versus: Sequence[str] | None = None,
    ):
        if steps < 2:
            raise ValueError(f"steps must be ≥ 2; got {steps}")
        if dump not in (None, "parquet", "jsonl"):
            raise ValueError(f"dump must be 'parquet', 'jsonl' or null; got {dump!r}")
        if dump is not None and (old := sorted((folder / "rollouts").glob("step_*"))):
            raise FileExistsError(
                f"a dump is of one training or replay; {folder / 'rollouts'} has {len(old)} files of "
                f"another, {old[0].name} the first: take another folder (hydra.run.dir=...), or remove them"
            )
        self.folder, self.title, self.steps, self.dump, self.page = folder, title, steps, dump, page
        self.config, self.versus = config, versus
        self.history: list[tuple[int, dict[str, float]]] = []
        self._kept: list[StepReport] = []
        self._every = 1
        self._last: StepReport | None = None

    @classmethod
    def configured(cls, config: DictConfig, folder: Path, *, title: str) -> ReportFolder:
        """The folder that ``report:`` of a composed configuration describes.

        Args:
            config: composed; its YAML goes into the files' metadata.
            folder: as for the class.
            title: as for the class.

        Raises:
            ConfigError: a setting that the class refuses.
        """
        try:
            return cls(
                folder,
                title=title,
                steps=config.report.steps,
                dump=config.report.dump,
                page=config.report.html,
                config=OmegaConf.to_yaml(config, resolve=True),
            )
        except ValueError as err:
            raise ConfigError(f"report.{err}") from err

    def add(self, report: StepReport) -> None:
        """Take the report of the next step."""
        if self.dump is not None:
            write_dump(report, self.folder / "rollouts", format=self.dump, config=self.config)
        if len(self.history) % self._every == 0:
            self._kept.append(report)
            if len(self._kept) >= self.steps:  # drop every other one, and from now on keep half as many
                self._kept, self._every = self._kept[::2], 2 * self._every
        self.history.append((report.step, dict(report.numbers)))
        self._last = report

    def close(self) -> Path | None:
        """Write the page, and return its path; None where no page is written."""
        if not self.page:
            return None
        kept = list(self._kept)
        if self._last is not None and (not kept or self._last is not kept[-1]):
            kept.append(self._last)
        path = self.folder / "report.html"
        data = page_data(kept, title=self.title, history=self.history)
        write_page(data if self.versus is None else data | {"versus": list(self.versus)}, path)
        return path

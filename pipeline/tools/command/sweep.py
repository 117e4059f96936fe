"""Print a table at the end of a sweep (``headrace -m``): a line for each job, and the errors of failed jobs.

Each job writes a file into its folder, with any launcher and on any machine. The table is made from these
files.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from headrace.pipeline.tools.report import FittedColumn, FittedTable, json_text
from headrace.pipeline.wording import printable

FILE = "job.json"
REWARD = "reward/all/mean"
WINDOWS = (
    "reward: mean over the first quarter and over the last quarter of the steps; with fewer than 12 steps, "
    "the first and the last step. trained: share of the rows that are trained, over all steps"
)
NUMBERS = {  # the name of the number that a task returns; `train` shows several numbers instead
    "train": "",
    "replay": "rows trained",
    "compare": "correlation",
    "plan": "uninformative",
    "audit": "findings",
    "certify": "greatest bias",
}


class SweepTable(Callback):
    """Print the table of a sweep when all its jobs have run. Exit with status 2 if a job has failed."""

    began: float  # when the sweep began, in seconds

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep the time of the start, because the folder may have jobs of an earlier sweep."""
        self.began = time.time()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table.

        Raises:
            SystemExit: a job has failed.
        """
        folder = Path(config.hydra.sweep.dir)
        jobs = [json.loads(path.read_text()) for path in folder.rglob(FILE)]
        jobs = sorted((job for job in jobs if job["ended"] >= self.began), key=lambda job: job["job"])
        show_sweep(jobs, folder, Console())
        if any(job["failure"] for job in jobs):
            sys.exit(2)


def record_job(output: Path, *, began: float, **said: Any) -> None:
    """Write what the table shows of a job into the job's folder.

    Args:
        output: folder of the job.
        began: when the job began, in seconds.
        said: ``job``: the job's number in the sweep. ``task`` and ``overrides``: its task and overrides.
            ``number``: the number that the task returned; None if it failed. ``failure``: its error, or an
            empty string.
    """
    ended, found = time.time(), dict[str, Any]()
    csv_path = output / "metrics.csv"
    if csv_path.exists() and csv_path.stat().st_mtime >= began:  # else the file is of an earlier job
        with csv_path.open(newline="") as file:
            steps = list(csv.DictReader(file))
        from headrace.pipeline.tools.report import quarter_means

        rewards = [(k, float(step[REWARD])) for k, step in enumerate(steps) if step.get(REWARD)]
        ends = [each.value for each in quarter_means(rewards)] if rewards else []
        rows, trained = (
            sum(float(step.get(name) or 0) for step in steps) for name in ("rows/in", "rows/trained")
        )
        share = trained / rows if rows else None
        found = {"steps": len(steps), "rewards": ends[:1] + ends[-1:], "trained": share}
    times = {"folder": str(output), "seconds": ended - began, "ended": ended}
    output.mkdir(parents=True, exist_ok=True)
    (output / FILE).write_text(json_text(said | times | found, indent=1))


def show_sweep(jobs: Sequence[dict[str, Any]], folder: Path, console: Console) -> None:
    """Print a line for each job, with the overrides in which jobs differ, and then the errors of failed jobs.

    Args:
        jobs: the contents of the files of :func:`record_job`.
        folder: folder of the sweep.
        console: where to print.
    """
    said = [dict(each.lstrip("+").partition("=")[::2] for each in job["overrides"]) for job in jobs]
    typed = dict.fromkeys(key for each in said for key in each)
    keys = [key for key in typed if len({each.get(key) for each in said}) > 1]
    tasks = {job["task"] for job in jobs} or {"train"}
    task = tasks.pop() if len(tasks) == 1 else ""  # if tasks differ, cells name their numbers
    names = ["reward", "trained", "steps"] if task == "train" else [NUMBERS.get(task, "number")]
    last = [key.split(".")[-1] for key in keys]
    names_shown = [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]
    columns = [FittedColumn("job", right=True), *(FittedColumn(name, gives="wrap") for name in names_shown)]
    columns += [FittedColumn(name, right=True) for name in (*names, "seconds")]
    table = FittedTable(columns, f"a sweep of {len(jobs)} jobs", WINDOWS if task == "train" else "")
    for job, each in zip(jobs, said, strict=True):
        values = (str(each.get(key, "–")) for key in keys)
        table.add(str(job["job"]), *values, *_cells(job, task), f"{job['seconds']:.1f}")
    console.print(table)
    for job in jobs:
        if job["failure"]:
            console.print(
                Text(f"job {job['job']} failed: {printable(job['failure'])}", "yellow"), soft_wrap=True
            )
    console.print(Text(printable(f"written to {folder}, a folder for each job")), soft_wrap=True)


def _cells(job: dict[str, Any], task: str) -> list[str]:
    """The results of a job; for a failed job, its progress."""
    if task != "train":
        name = "" if task else f"{NUMBERS.get(job['task']) or job['task']} "
        number = "–" if job["number"] is None else f"{name}{job['number']:,.4g}"
        return ["failed" if job["failure"] else number]
    rewards, share = job.get("rewards") or [], job.get("trained")
    reward = f"{rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else "–"
    trained = "–" if share is None else f"{share:.0%}"
    return ["failed" if job["failure"] else reward, trained, str(job.get("steps", "–"))]

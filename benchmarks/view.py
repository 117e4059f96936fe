"""Time the viewer.

python benchmarks/view.py [--steps 500]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict

from headrace.pipeline import load_pipeline, make_report, write_dump

ROWS, GROUP_SIZE, PROMPTS, ROUNDS = 1024, 8, 2000, 5
WORDS = "the of and so then first next 12 answer is therefore we have x equals compute"
TARGET = 1.0  # seconds
NOTE = f"""{ROWS:,} rows a step, each with a response of about 1,000 characters.

- first rows: from the start of `headrace view` until it has returned some rows of the last step
- all prompts: the first request for the prompts of all steps
- search: a search for a text in the rows of one step

Each number is the least of {ROUNDS} starts. Times are wall times, except for "CPU s"."""


def write(folder: Path, steps: int) -> int:
    """Write the rows of a run. Return the bytes of the files."""
    rng = np.random.default_rng(0)
    words = np.array(WORDS.split())
    prompts = [f"Problem {i}: {' '.join(rng.choice(words, 40))}" for i in range(PROMPTS)]
    pipeline, groups = load_pipeline("grpo", group_size=GROUP_SIZE), ROWS // GROUP_SIZE
    group = np.arange(ROWS) // GROUP_SIZE
    batch = TensorDict(
        {
            "group_id": torch.from_numpy(group),
            "rollout_id": torch.arange(ROWS),
            ("next", "reward"): torch.from_numpy((rng.random(ROWS) < 0.4).astype(np.float32)),
            ("masks", "all_assistant_mask"): torch.ones(ROWS, 16, dtype=torch.bool),
        },
        batch_size=[ROWS],
    )
    report, size = make_report(pipeline.run(batch)), 0
    for step in range(steps):
        drawn = rng.choice(PROMPTS, groups, replace=False)[group]
        texts = {"prompt": [prompts[each] for each in drawn]}
        texts["response"] = [" ".join(rng.choice(words, 190)) for _ in range(ROWS)]
        size += write_dump(replace(report, step=step, texts=texts), folder / "rollouts").stat().st_size
    return size


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds_of(folders: list[Path], step: int) -> list[float]:
    """Measure (CPU) seconds to the first rows, seconds for all prompts and for a search, and peak MiB."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "headrace.pipeline", "view", *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        lines = iter(started.stdout or ())
        address = next(line.split()[1] for line in lines if line.startswith("Open "))

        def ask(question: str) -> dict:
            with urllib.request.urlopen(f"{address}api/{question}") as answer:
                return json.load(answer)

        ask("runs")
        for run in range(len(folders)):
            ask(f"rows?run={run}&step={step}")
        found = [time.perf_counter() - start, cpu_seconds(started.pid)]
        for question in ("prompts", f"rows?run=0&step={step}&text=problem+12"):
            before = time.perf_counter()
            ask(question)
            found.append(time.perf_counter() - before)
        status = Path(f"/proc/{started.pid}/status").read_text()
        started.terminate()  # a background job of a shell ignores SIGINT
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return [*found, int(peak[1]) / 1024 if peak else float("nan")]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the table."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder) / "run", options.steps)
        for name, runs in (("one run", 1), ("two runs", 2)):
            folders = [Path(folder) / "run"] * runs
            times = [seconds_of(folders, options.steps - 1) for _ in range(options.starts)]
            rows, cpu, prompts, search, peak = map(min, zip(*times, strict=True))
            seconds = [Cell(cpu, target=TARGET), Cell(rows), Cell(prompts), Cell(search)]
            cells = [*seconds, Cell(peak, ",.0f"), Cell(size * runs / 2**20, ",.0f")]
            lines.append(Row(f"{name}, {options.steps:,} steps", cells))
    head = ["", "first rows, CPU s", "first rows, s", "all prompts, s", "search, s", "peak, MiB"]
    yield Table("Rows of a run in `headrace view`", NOTE, [*head, "files, MiB"], lines)


if __name__ == "__main__":
    main(tables, __doc__, warm=False, steps=(500, 2), starts=(ROUNDS, 1))

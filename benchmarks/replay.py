"""Time the replay of a dump.

python benchmarks/replay.py [--rows 1000000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from results import main
from rich.console import Console
from tables import Cell, Row, Table

PER_STEP, GROUP_SIZE = 8192, 8
TARGET = 40_000  # rows per second
NOTE = f"""A Parquet dump with a prompt and a response in each row, {PER_STEP:,} rows a step.
`task=replay` reads it, runs the default recipe, and writes report, page and dump. Times are wall times.

- over reading: the time, divided by the time that Arrow needs to read the files
- peak: the most memory of the process
- before: the memory of the process after the imports"""


def write(folder: Path, rows: int) -> int:
    """Write a dump with texts, one step per file; returns its bytes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    size = 0
    for step in range(-(-rows // PER_STEP)):
        count = min(PER_STEP, rows - step * PER_STEP)
        group = np.arange(count) // GROUP_SIZE
        table = pa.table(
            {
                "step": np.full(count, step),
                "row": np.arange(count),
                "group_id": group,
                "rollout_id": np.arange(count),
                "reward": (rng.random(count) < 0.4).astype(float),
                "tokens": rng.integers(1, 1024, count),
                "expected_rollouts": np.bincount(group)[group],
                "prompt": [f"What is {g} times {step}? " + "Think. " * 20 for g in group.tolist()],
                "response": [f"{word:x}" * 60 for word in rng.integers(0, 2**62, count).tolist()],
            }
        ).replace_schema_metadata({"headrace.schema": "1"})
        path = folder / f"step_{step:08d}.parquet"
        pq.write_table(table, path, compression="none")
        size += path.stat().st_size
    return size


def replay(source: Path, output: Path, results: multiprocessing.SimpleQueue) -> None:
    """Run the task. Put its seconds, the peak MiB before and after, and its trained rows into `results`."""
    import torch
    from hydra import compose, initialize_config_module

    from headrace.pipeline.tools.replay import replay_dump

    torch.set_num_threads(1)
    words = ("task=replay", f"source.path={source}", "pipeline.stages.split.remainder=uneven")
    with initialize_config_module("headrace.conf", version_base="1.3"):
        config = compose("config", list(words))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with Path("/dev/null").open("w") as quiet:
        trained = float(replay_dump(config, output, Console(file=quiet)))
    seconds = time.perf_counter() - start
    results.put((seconds, before / 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, trained))


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the table."""
    # A fork of this process need not import anything, which saves time in a quick run.
    context = multiprocessing.get_context("fork" if options.quick else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder) / "dump", options.rows)
        start = time.perf_counter()
        for path in sorted((Path(folder) / "dump").iterdir()):
            pq.read_table(path)
        reading = time.perf_counter() - start
        results = context.SimpleQueue()
        # The task runs in its own process, so that the peak memory is that of the task.
        process = context.Process(target=replay, args=(Path(folder) / "dump", Path(folder) / "out", results))
        process.start()
        process.join()
        seconds, before, peak, trained = results.get()
    cells = [
        Cell(options.rows / seconds, ",.0f", TARGET, at_least=True),
        Cell(seconds, ".1f"),
        Cell(seconds / reading, ".0f"),
        Cell(trained, ",.0f"),
        Cell(peak, ",.0f"),
        Cell(before, ",.0f"),
    ]
    head = ["rows", "rows a second", "s", "over reading", "rows trained", "peak, MiB", "before, MiB"]
    yield Table("A dump with texts", NOTE, head, [Row(f"{options.rows:,}, {size / 2**20:,.0f} MiB", cells)])


if __name__ == "__main__":
    main(tables, __doc__, warm=False, rows=(1_000_000, 512))

"""Measure the grpo recipe on a GPU.

python benchmarks/gpu.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from batches import MINIBATCHES, collected
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict
from timing import measure, median_ms, ratio

from headrace.pipeline import load_pipeline

NOTE = """The wall time of the grpo recipe, divided by that of a copy of the batch on the device. Two equal
pipelines run on the same batch. "Columns that differ" counts the columns in which their results differ."""
NO_GPU = "Not measured, because no GPU was available."


def seconds() -> float:
    """Wall time, after the device has finished."""
    torch.cuda.synchronize()
    return time.perf_counter()


def gathered(batch: TensorDict) -> TensorDict:
    """The output of a new pipeline, all minibatches in one batch."""
    return load_pipeline("pipeline=grpo", f"pipeline.stages.split.minibatches={MINIBATCHES}")(batch)


def differing(first: TensorDict, second: TensorDict) -> int:
    """The number of columns that differ in a bit. NaN equals NaN."""
    keys = first.keys(include_nested=True, leaves_only=True)
    pairs = [[td[key].flatten().view(torch.uint8) for td in (first, second)] for key in keys]
    return sum(not torch.equal(a, b) for a, b in pairs)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """The table, without numbers if there is no GPU."""
    head = ["rows", "copy, ms", "pipeline / copy", "columns that differ"]
    rows, tokens = (64, 16) if options.quick else (4000, 2048)
    cells = [Cell(None)] * 3
    if torch.cuda.is_available():
        batch = collected(rows, tokens).to("cuda")
        pipeline = load_pipeline("pipeline=grpo")
        times = measure({"copy": batch.clone, "pipeline": lambda: pipeline(batch)}, options.rounds, seconds)
        odd = differing(gathered(batch), gathered(batch))
        cells = [Cell(median_ms(times, "copy")), Cell(ratio(times, "pipeline", "copy")), Cell(odd, "d", 0)]
    note = NOTE if torch.cuda.is_available() else f"{NO_GPU} {NOTE}"
    line = Row(f"{rows:,} × {tokens:,} tokens", cells)
    yield Table("The grpo recipe over a copy on the device", note, head, [line])


if __name__ == "__main__":
    main(tables, __doc__, warm=False, rounds=(20, 1))

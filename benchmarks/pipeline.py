"""Compare the time of the grpo recipe with that of a plain gather of the batch.

    python benchmarks/pipeline.py [--rounds 9]

Rows have tokens, masks and log-probabilities. A tenth of the groups have equal rewards, which the filter
masks. A gather copies all rows in random order, column by column. This is the least work of any shuffle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from batches import MINIBATCHES, collected, in_pieces
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict
from timing import measure, median_ms, ratio

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import take_rows

sys.path.append(
    str(Path(__file__).parent.parent / "tests" / "support")
)  # after benchmarks/, which also has a batches.py
from live_bytes import LiveBytes, bytes_of

# Numbers of rows, and of tokens of a row: 15, 115 and 235 MB, then few long rows, and many short rows.
SHAPES = ((512, 2048), (4000, 2048), (8192, 2048), (512, 16_384), (65_536, 128))
TARGETED, TARGETS = SHAPES[1], {"pipeline": 1.9, "minibatches": 2.0}
PEAK = 0.15  # target for the peak memory, as a share of the batch
WITH_TEXTS = 3.5
NOTE = f"""A gather copies all rows in random order. No shuffle can do less. The column "gather" has the
time of the gather. The next columns are other times, divided by the time of the gather:

- in pieces: the same gather in {MINIBATCHES} parts
- td[perm]: the gather of TensorDict
- pipeline: the grpo recipe, as `pipeline(batch)`
- minibatches: a loop over {MINIBATCHES} minibatches of the recipe, which deletes each before the next

"Memory" is the peak memory of this loop without the batch, divided by the size of the batch."""
TEXTS = """Rows of 16 tokens with a prompt and a text. The column "without" has the time of
`pipeline(batch)` without the texts. The next columns are times with the texts, divided by this time."""


def gather_pieces(batch: TensorDict, order: torch.Tensor) -> Callable[[], None]:
    """A gather of all rows in random order, with one piece in memory at a time."""

    def run() -> None:
        for rows in order.chunk(MINIBATCHES):
            take_rows(batch, rows)

    return run


def candidates(batch: TensorDict, pipeline: Pipeline) -> dict[str, Callable[[], object]]:
    """The measured functions, by the names of the columns."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    return {
        "gather": lambda: take_rows(batch, order),
        "in pieces": gather_pieces(batch, order),
        "td[perm]": lambda: batch[order],
        "pipeline": lambda: pipeline(batch),
        "minibatches": in_pieces(batch),
    }


def peak_memory(batch: TensorDict, loop: Callable[[], object]) -> float:
    """The peak memory of a loop's tensors after a first run, divided by the size of the batch."""
    with LiveBytes() as memory:
        loop()
    return memory.peak / bytes_of(batch)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the tables for rows of tensors, and for rows with texts."""
    rows, head, pipeline = [], [], load_pipeline("pipeline=grpo")
    for shape in SHAPES:
        count, tokens = (64, 16) if options.quick else shape
        batch = collected(count, tokens)
        functions = candidates(batch, pipeline)
        times = measure(functions, options.rounds)
        head = ["rows", "gather, ms", *list(times)[1:]]
        targets = TARGETS if shape == TARGETED else {}
        cells = [Cell(ratio(times, each, "gather"), target=targets.get(each)) for each in head[2:]]
        peak = peak_memory(batch, functions["minibatches"])
        cells.append(Cell(peak, target=PEAK if shape == TARGETED else None))
        label = f"{count:,} × {tokens:,} tokens, {batch.bytes() / 1e6:.0f} MB"
        rows.append(Row(label, [Cell(median_ms(times, "gather")), *cells]))
    yield Table("The grpo recipe over a gather", NOTE, [*head, "memory"], rows)

    count = 64 if options.quick else 8192
    short, spoken = collected(count, 16), collected(count, 16, texts=True)
    functions = {
        "without, ms": lambda: pipeline(short),
        "pipeline": lambda: pipeline(spoken),
        "minibatches": in_pieces(spoken),
    }
    times = measure(functions, options.rounds)
    cells = [
        Cell(median_ms(times, "without, ms")),
        Cell(ratio(times, "pipeline", "without, ms"), target=WITH_TEXTS),
        Cell(ratio(times, "minibatches", "without, ms")),
    ]
    yield Table("Two columns of texts", TEXTS, ["rows", *functions], [Row(f"{count:,}", cells)])


if __name__ == "__main__":
    main(tables, __doc__, rounds=(9, 1))

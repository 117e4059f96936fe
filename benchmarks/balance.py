"""Balanced micro-batches, against Karmarkar and Karp's method.

    python benchmarks/balance.py [--rounds 15]

Both assign rows to bins of equal count. The reference is `largest_differencing` of the tests: plain Python
that joins lists and compares floats. Implementations in trainers have an object for each set and move items
one by one, which takes longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from results import main
from tables import Cell, Row, Table
from timing import measure, median_ms, ratio
from torch import Tensor

from headrace.transforms.split.bins import balance_evenly

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from karmarkar_karp import imbalance, largest_differencing, lengths_of

BINS = (8, 64, 256)
KINDS = ("lognormal", "bimodal", "uniform")
TARGET = 3.0
NOTE = """Rows of different lengths are put into bins, with the same number of rows in each. The ratio is the
time of Karmarkar and Karp's method (KK), divided by that of `balance_evenly`. The last two columns say how
much fuller than the mean the fullest bin is: 1e-01 is 10 %."""


def compare(costs: Tensor, bins: int, rounds: int) -> list[Cell]:
    """A line of the table."""
    functions = {
        "oracle": lambda: torch.tensor(largest_differencing(costs.tolist(), bins, equal_count=True)),
        "headrace": lambda: balance_evenly(costs, bins),
    }
    times = measure(functions, rounds)
    uneven = [imbalance(costs, function(), bins) for function in functions.values()]
    return [
        Cell(median_ms(times, "oracle"), ".1f"),
        Cell(median_ms(times, "headrace")),
        Cell(ratio(times, "oracle", "headrace"), ".1f", TARGET, at_least=True),
        *(Cell(float(each), ".0e") for each in uneven),
    ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """The one table."""
    rows = [
        Row(f"{kind}, {bins} bins", compare(lengths_of(kind, options.rows), bins, options.rounds))
        for kind in KINDS
        for bins in BINS
    ]
    head = ["lengths", "KK, ms", "headrace, ms", "ratio"]
    head += ["KK, fullest bin", "headrace, fullest bin"]
    yield Table(f"{options.rows:,} rows to bins of equal count", NOTE, head, rows)


if __name__ == "__main__":
    main(tables, __doc__, rounds=(15, 1), rows=(8192, 512))

"""Balanced bins against Karmarkar and Karp's method, as CPU time in one run.

    python benchmarks/balance.py [--rounds 15]

Both give 8,192 rows to bins of equal count. They take turns in random order, and the ratio is the median over
the rounds. The oracle is `largest_differencing` of the tests: plain Python that joins lists and compares
floats. What trainers run has an object per set and moves items one by one, which takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from timing import measure

from headrace.transforms.split.balance import balance_evenly

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from karmarkar_karp import imbalance, largest_differencing, lengths_of

ROWS = 8_192
BINS = (8, 64, 256)
KINDS = ("lognormal", "bimodal", "uniform")
TARGET = 3.0


def compare(kind: str, bins: int, rounds: int) -> tuple[float, float, float]:
    """Median CPU seconds of the oracle and of `balance_evenly`, and the median ratio."""
    costs = lengths_of(kind, ROWS)
    functions = {
        "oracle": lambda: torch.tensor(largest_differencing(costs.tolist(), bins, equal_count=True)),
        "headrace": lambda: balance_evenly(costs, bins),
    }
    times = measure(functions, rounds)
    oracle, headrace = times["oracle"], times["headrace"]
    ratio = statistics.median(a / b for a, b in zip(oracle, headrace, strict=True))
    return statistics.median(oracle), statistics.median(headrace), ratio


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table(title=f"{ROWS:,} rows to bins of equal count, one thread")
    table.add_column("lengths")
    for name in ("bins", "oracle, ms", "headrace, ms", "ratio", "oracle's max/mean − 1", "headrace's"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        for bins in BINS:
            oracle, headrace, ratio = compare(kind, bins, rounds)
            costs = lengths_of(kind, ROWS)
            of_oracle = torch.tensor(largest_differencing(costs.tolist(), bins, equal_count=True))
            uneven = [
                imbalance(costs, assigned, bins) for assigned in (of_oracle, balance_evenly(costs, bins))
            ]
            times = (f"{1e3 * oracle:.1f}", f"{1e3 * headrace:.2f}", f"{ratio:.1f}")
            table.add_row(kind, str(bins), *times, *(f"{x:.0e}" for x in uneven))
    Console().print(table, f"Target: oracle / headrace ≥ {TARGET:g}")


if __name__ == "__main__":
    main()

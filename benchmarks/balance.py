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
    """Median CPU seconds of the oracle and of ours, and the median ratio."""
    costs = lengths_of(kind, ROWS)
    functions = {
        "oracle": lambda: torch.tensor(largest_differencing(costs.tolist(), bins, equal_count=True)),
        "ours": lambda: balance_evenly(costs, bins),
    }
    times = measure(functions, rounds)
    oracle, ours = times["oracle"], times["ours"]
    ratio = statistics.median(a / b for a, b in zip(oracle, ours, strict=True))
    return statistics.median(oracle), statistics.median(ours), ratio


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table(title=f"{ROWS:,} rows to bins of equal count, one thread")
    for name in ("lengths", "bins", "oracle, ms", "ours, ms", "ratio", "oracle's max/mean − 1", "ours"):
        table.add_column(name, justify="left" if name == "lengths" else "right")
    for kind in KINDS:
        for bins in BINS:
            oracle, ours, ratio = compare(kind, bins, rounds)
            costs = lengths_of(kind, ROWS)
            found = torch.tensor(largest_differencing(costs.tolist(), bins, equal_count=True))
            even = [imbalance(costs, by, bins) for by in (found, balance_evenly(costs, bins))]
            cells = [f"{1e3 * oracle:.1f}", f"{1e3 * ours:.2f}", f"{ratio:.1f}", *(f"{x:.0e}" for x in even)]
            table.add_row(kind, str(bins), *cells)
    Console().print(table, f"Target: oracle / ours ≥ {TARGET:g}")


if __name__ == "__main__":
    main()

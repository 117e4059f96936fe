"""The validated advantage against the plain reshape formula, as CPU time in one run.

    python benchmarks/advantage.py [--rounds 30]

The formula has no ids and no checks, and computes in float32: it is the limit. Candidates take turns in
random order, and the ratio is the median over the rounds. Targets are for one row a rollout, and all others.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from timing import measure, without_page_faults
from torch import Tensor

from headrace.transforms import group_relative_advantage

GROUP_SIZE = 8
SIZES = {8_192: (2.6, 3.5), 131_072: (1.7, 2.2), 1_048_576: (1.6, 2.2)}  # rows; targets, the other layouts'


def reshape_formula(reward: Tensor) -> Tensor:
    """The advantage where every group is a row of a matrix."""
    x = reward.view(-1, GROUP_SIZE)
    x = x - x.mean(-1, keepdim=True)
    return (x / (x.std(-1, keepdim=True) + 1e-6)).view(-1)


def candidates(rows: int) -> dict[str, Callable[[], Tensor]]:
    """The formula, and the validated advantage on each layout of a batch, all of `rows` rows."""
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(rows, generator=generator)
    ids = torch.arange(rows)
    fanned = ids // 4
    order = torch.randperm(rows, generator=generator)
    ragged = torch.randint(0, rows // GROUP_SIZE, (rows,), generator=generator).sort().values
    layouts = {
        "one row a rollout": (reward, ids // GROUP_SIZE, ids),
        "fan-out of 4": (reward[fanned], fanned // GROUP_SIZE, fanned),
        "ragged groups": (reward, ragged, ids),
        "rows shuffled": (reward[order], order // GROUP_SIZE, order),
    }
    formula = {"reshape formula": lambda: reshape_formula(reward)}
    return formula | {
        name: lambda columns=columns: group_relative_advantage(*columns) for name, columns in layouts.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    without_page_faults()
    torch.set_num_threads(1)
    table = Table(title=f"Validated advantage over the reshape formula, groups of {GROUP_SIZE}, one thread")
    table.add_column("rows", justify="right")
    table.add_column("formula, ms", justify="right")
    for name in list(candidates(64))[1:]:
        table.add_column(name, justify="right")
    table.add_column("target", justify="right")
    for rows, targets in SIZES.items():
        times = measure(candidates(rows), rounds)
        base = times.pop("reshape formula")
        ratios = [
            statistics.median(t / b for t, b in zip(seconds, base, strict=True)) for seconds in times.values()
        ]
        cells = [f"{rows:,}", f"{1e3 * statistics.median(base):.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
        table.add_row(*cells, f"≤ {targets[0]}; {targets[1]}")
    Console().print(table)


if __name__ == "__main__":
    main()

"""Compare the time of the advantage alone with that of the reshape formula.

    python benchmarks/advantage.py [--rounds 20]

The formula has no ids and no checks, and computes in float32. It is the lower bound.
`group_relative_advantage` runs with its defaults: rollout and group ids, all checks, and float64 statistics.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from results import main
from tables import Cell, Row, Table
from timing import measure, median_ms, ratio
from torch import Tensor

from headrace.transforms import group_relative_advantage

SIZES = (512, 8_192, 131_072, 1_048_576)  # rows; the growth is measured between the last two
QUICK = (64, 128, 256, 512)
# Targets, one for each of SIZES: for the uniform layout by group size, and for all other layouts.
UNIFORM = {8: (None, 2.6, 1.7, 1.6), 16: (None, 3.2, 1.9, 1.8)}
OTHERS = (None, 3.5, 2.2, 2.2)
GROWTH = 9.0
NOTE = """The reshape formula is `(r - mean) / (std + eps)` for each line of `r.view(-1, group_size)`. It has
no ids and no checks, and computes in float32. The first line of the table has the time of the formula. The
other lines have the time of `group_relative_advantage`, divided by that of the formula, for these rows:

- uniform: one row for each rollout, and one group after the other
- fan-out of 4: four rows for each rollout
- fan-out of 4, one short: four rows for each rollout, and the last group lacks a rollout
- ragged: groups of random size
- interleaved: one row of each group, then the next row of each, and so on
- shuffled: the uniform rows in random order

"Growth" is the time for the most rows, divided by the time for an eighth of them."""


def reshape_formula(reward: Tensor, group_size: int) -> Tensor:
    """Compute the advantage, if every group is a row of a matrix."""
    x = reward.view(-1, group_size)
    x = x - x.mean(-1, keepdim=True)
    return (x / (x.std(-1, keepdim=True) + 1e-6)).view(-1)


def layouts(rows: int, group_size: int) -> dict[str, Sequence[Tensor]]:
    """Rewards, group ids and rollout ids, by the layout of the rows."""
    generator = torch.Generator().manual_seed(0)
    reward, ids = torch.randn(rows, generator=generator), torch.arange(rows)
    fanned, groups = ids // 4, rows // group_size
    order = torch.randperm(rows, generator=generator)
    ragged = torch.randint(0, groups, (rows,), generator=generator).sort().values
    fan_out = reward[fanned], fanned // group_size, fanned
    return {
        "uniform": (reward, ids // group_size, ids),
        "fan-out of 4": fan_out,
        "fan-out of 4, one short": [column[:-4].clone() for column in fan_out],
        "ragged": (reward, ragged, ids),
        "interleaved": (reward, ids % groups, ids),
        "shuffled": (reward[order], order // group_size, order),
    }


def candidates(rows: int, group_size: int) -> dict[tuple[str, int], Callable[[], Tensor]]:
    """Calls of the formula, and of the checked advantage on each layout, by name and number of rows."""
    columns = layouts(rows, group_size)
    reward = columns["uniform"][0]
    functions = {("formula", rows): lambda: reshape_formula(reward, group_size)}
    return functions | {
        (name, rows): lambda each=each: group_relative_advantage(*each) for name, each in columns.items()
    }


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A table for each group size."""
    sizes = QUICK if options.quick else SIZES
    for group_size, uniform in UNIFORM.items():
        times = {}
        for size in sizes[:2]:  # short times need more rounds
            times |= measure(candidates(size, group_size), 10 * options.rounds)
        # Both sizes are measured together, for the growth from one to the other.
        large, largest = (candidates(size, group_size) for size in sizes[2:])
        times |= measure(large | largest, options.rounds)
        rows = []
        for name in dict.fromkeys(name for name, _ in times):
            if name == "formula":
                cells = [Cell(median_ms(times, (name, size)), ".3f") for size in sizes]
            else:
                targets = uniform if name == "uniform" else OTHERS
                cells = [
                    Cell(ratio(times, (name, size), ("formula", size)), target=target)
                    for size, target in zip(sizes, targets, strict=True)
                ]
            growth = ratio(times, (name, sizes[-1]), (name, sizes[-2]))
            cells.append(Cell(growth, ".2f", None if name == "formula" else GROWTH))
            rows.append(Row("formula, ms" if name == "formula" else name, cells))
        head = ["rows", *(f"{size:,}" for size in sizes), "growth"]
        note = NOTE if group_size == min(UNIFORM) else f"The same with groups of {group_size}."
        yield Table(f"Advantage over the reshape formula, groups of {group_size}", note, head, rows)


if __name__ == "__main__":
    main(tables, __doc__, rounds=(20, 1))

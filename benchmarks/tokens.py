"""What works on tokens, over its formula in plain torch; and what a step costs around them.

    python benchmarks/tokens.py [--rounds 9]

Each formula is written out next to the call that is measured over it, in token_stages.py, sequence_stages.py
and step_costs.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from results import main
from sequence_stages import sequence_stages
from step_costs import step_costs
from tables import Table
from token_stages import NOTE, token_stages

WHY = """ Missed, and why: of pack and of a tree with few tokens small calls of tensors are left, of which
the plain formula has 90 µs; MergeTurns reads its table and compares tokens as bytes, where the formula copies
them once; DenseRows checks that prompt and response are the whole of a row, one column more than the formula
has."""
AROUND = """The first column is the time of the formula, in ms, where there is one; the second is headrace
over it, unless the name says another unit."""


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A table for each file of formulas."""
    head = ["measure", "formula, ms", "headrace over it"]
    yield Table("Stages of tokens", NOTE, head, token_stages(options.rounds, options.quick))
    head = ["measure", "formula, ms", "headrace"]
    yield Table("Sequences and trees", AROUND + WHY, head, sequence_stages(options.rounds, options.quick))
    yield Table("A step around its tokens", AROUND, head, step_costs(options.rounds, options.quick))


if __name__ == "__main__":
    main(tables, __doc__, rounds=(9, 1))

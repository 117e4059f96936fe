"""Stages that read tokens, and other parts of a step.

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

AROUND = """The first column is the time of the formula in plain torch; "not measured" if there is none. The
second is the time of headrace: divided by that of the formula ("over …"), or in the unit that the line
names ("in …")."""


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A table for each file of formulas."""
    head = ["measure", "formula, ms", "headrace over it"]
    yield Table("Stages of tokens", NOTE, head, token_stages(options.rounds, options.quick))
    head = ["measure", "formula, ms", "headrace"]
    yield Table("Sequences and trees", AROUND, head, sequence_stages(options.rounds, options.quick))
    yield Table("A step around its tokens", AROUND, head, step_costs(options.rounds, options.quick))


if __name__ == "__main__":
    main(tables, __doc__, rounds=(9, 1))

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

AROUND = """The formula is plain torch code for the same work, or what the line names after "over". If a line
has no such code, its cell is "not measured". The last column is about headrace:

- If the name of the line has "over X", the number is the time of headrace, divided by that of X.
- If the name has "in ms", the number is in ms, and so on."""


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """A table for each file of formulas."""
    head = ["measure", "formula, ms", "headrace / formula"]
    yield Table("Stages of tokens", NOTE, head, token_stages(options.rounds, options.quick))
    head = ["measure", "formula, ms", "headrace"]
    yield Table("Sequences and trees", AROUND, head, sequence_stages(options.rounds, options.quick))
    note = "The columns are those of the table above."
    yield Table("Other parts of a step", note, head, step_costs(options.rounds, options.quick))


if __name__ == "__main__":
    main(tables, __doc__, rounds=(9, 1))

"""Time the stages that read tokens, and other parts of a step.

    python benchmarks/tokens.py [--rounds 9]

In token_stages.py, sequence_stages.py and step_costs.py, each formula is next to the call that is compared
with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from results import main
from sequence_stages import sequence_stages
from step_costs import step_costs
from tables import Table
from token_stages import NOTE, token_stages

AROUND = """The formula is plain torch code for the same work. The end of a line's name says what the last
column has:

- "in ms" and so on: the number for headrace, in this unit. For "a token", padding is not counted.
- "over X": the time of headrace, divided by that of X. The time of X is in the column "formula". The time for
  "groups of 8" is in the line above.

A formula is "not measured" if there is no such code."""


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make a table for each of these files."""
    head = ["measure", "formula, ms", "headrace / formula"]
    yield Table("Stages of tokens", NOTE, head, token_stages(options.rounds, options.quick))
    head = ["measure", "formula, ms", "headrace"]
    yield Table("Sequences and trees", AROUND, head, sequence_stages(options.rounds, options.quick))
    note = "The columns are those of the table above."
    yield Table("Other parts of a step", note, head, step_costs(options.rounds, options.quick))


if __name__ == "__main__":
    main(tables, __doc__, rounds=(9, 1))

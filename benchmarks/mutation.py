"""Count the planted faults that tests find: one fault at a time, at random places of the code.

python benchmarks/mutation.py [--sample 200] [--seed 1]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from results import main
from tables import Cell, Row, Table

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from mutants import FATES, Mutant, chosen_mutants, fates_of

NOTE = """Faults by the operators of cosmic-ray, as of `make mutants`. A fault gets the tests that run its
line: as many quick ones (at most a second each) as take 300 seconds without the fault, and as many slow
ones. It is timed out if they take four times as long, and a minute. An equivalent one changes nothing, and
benchmarks/equivalent_mutants.json has the reason. The last column is the percentage of the others that
survives."""


def folder_of(mutant: Mutant) -> str:
    """The folder of a mutant's file, as in the table of layers in CONTRIBUTING."""
    return "/".join(mutant.file.split("/")[:-1][:3])


def words_of(mutant: Mutant) -> str:
    """The cell of a table for a mutant: its file and lines."""
    words = f"{mutant.file}: `{mutant.was}` → `{mutant.now}`"
    return " ".join(words.split()).replace("|", r"\|")


def tables(options: argparse.Namespace) -> list[Table]:
    """The fates of the mutants of each folder, and the mutants that no test finds."""
    fates = fates_of(chosen_mutants([], "", options.sample, options.seed))
    rows = []
    for folder in [*sorted({folder_of(mutant) for mutant in fates}), "all"]:
        found = [fate for mutant, fate in fates.items() if folder in (folder_of(mutant), "all")]
        share = 100 * found.count("survived") / max(1, len(found) - found.count("equivalent"))
        cells = [len(found), *map(found.count, FATES), share]
        rows.append(Row(folder, [Cell(cell, ".0f") for cell in cells]))
    alive = [
        Row(words_of(mutant), [Cell(mutant.line, "d")])
        for mutant, fate in fates.items()
        if fate == "survived"
    ]
    return [
        Table("Faults that tests find", NOTE, ["folder", "faults", *FATES, "%"], rows),
        Table("Faults that no test finds", "The line is that of the day.", ["fault", "line"], alive),
    ]


if __name__ == "__main__":
    main(tables, __doc__, warm=False, sample=(200, 1), seed=(1, 1))

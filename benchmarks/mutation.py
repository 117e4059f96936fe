"""Count the planted faults that tests find: one fault at a time, at random places of the code.

python benchmarks/mutation.py [--sample 200] [--seed 1] [--each 25]
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

from results import main
from tables import Cell, Row, Table

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from mutants import FATES, FOLDERS, ROOT, Mutant, chosen_mutants, fates_of

NOTE = """Faults by the operators of cosmic-ray, as of `make mutants`. A fault gets the tests that run its
line, and the others of its module: as many quick ones (at most a second each) as take 100 seconds without
the fault, and as many slow ones. It is timed out if they take four times as long, and a minute. An
equivalent one changes nothing, and benchmarks/equivalent_mutants.json has the reason. The last column is
the percentage of the others that survives. "all" is a sample of all code. A folder has its faults of this
sample, and further ones up to {} of its own."""


def folder_of(file: str) -> str:
    """The folder of a file, as in the table of layers in CONTRIBUTING."""
    return "/".join(file.split("/")[:-1][:3])


def faults_by_folder(options: argparse.Namespace) -> dict[str, list[Mutant]]:
    """The sample of all code, and the faults of each folder."""
    found = {"all": chosen_mutants([], "", options.sample, options.seed)}
    files = sorted(str(path.relative_to(ROOT)) for each in FOLDERS for path in (ROOT / each).rglob("*.py"))
    for folder in sorted({*map(folder_of, files)}):
        own = [file for file in files if folder_of(file) == folder]
        faults = [fault for fault in found["all"] if fault.file in own]
        more = chosen_mutants(own, "", options.each, options.seed)
        found[folder] = [*dict.fromkeys(faults + more)][: max(len(faults), options.each)]
    return {folder: faults for folder, faults in found.items() if faults}


def words_of(mutant: Mutant) -> str:
    """The cell of a table for a mutant: its file and lines."""
    words = f"{mutant.file}: `{mutant.was}` → `{mutant.now}`"
    return " ".join(words.split()).replace("|", r"\|")


def tables(options: argparse.Namespace) -> list[Table]:
    """The fates of the mutants of each folder, and the mutants that no test finds."""
    by_folder = faults_by_folder(options)
    fates = fates_of([*dict.fromkeys(chain(*by_folder.values()))])
    rows = []
    for folder, faults in sorted(by_folder.items(), key=lambda item: (item[0] == "all", item[0])):
        found = [fates[fault] for fault in faults]
        share = 100 * found.count("survived") / max(1, len(found) - found.count("equivalent"))
        cells = [len(found), *map(found.count, FATES), share]
        rows.append(Row(folder, [Cell(cell, ".0f") for cell in cells]))
    alive = [
        Row(words_of(mutant), [Cell(mutant.line, "d")])
        for mutant, fate in fates.items()
        if fate == "survived"
    ]
    return [
        Table("Faults that tests find", NOTE.format(options.each), ["folder", "faults", *FATES, "%"], rows),
        Table("Faults that no test finds", "The line is that of the day.", ["fault", "line"], alive),
    ]


if __name__ == "__main__":
    main(tables, __doc__, warm=False, sample=(200, 1), seed=(1, 1), each=(25, 1))

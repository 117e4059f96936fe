"""Make docs/benchmarks.md from the results of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tables import Table

HEAD = """# Benchmarks

Written by `make bench` from the files in `benchmarks/results/`. `python benchmarks/NAME.py` runs one
benchmark again, on your machine. The costs of several processes are in [scale.md](scale.md).
"""
HOW = """
Times are CPU times of one thread, unless a table says otherwise. In each round the candidates run once, in
random order, after a warm-up round. The allocator does not return memory to the system, because page faults
would dominate the times. A ratio is the median over the rounds of one time over the other in the same
round. It depends less on the machine than milliseconds do, but still varies by about a tenth from run to
run. "A over B" is the time of A divided by the time of B. A number with a target in brackets is bold if it
misses the target.
"""


def page(results: Mapping[str, dict]) -> str:
    """Make the page from results by name of the benchmark, in order."""
    tables = {name: [Table.of(plain) for plain in result["tables"]] for name, result in results.items()}
    parts = [HEAD, *_machines(results), HOW, _targets([table for some in tables.values() for table in some])]
    for name, result in results.items():
        command = f"`python benchmarks/{name}.py`, {result['seconds']:.0f} s"
        parts += [f"## {result['about'].rstrip('.')}\n\n{command}\n", *(t.markdown() for t in tables[name])]
    return "\n".join(parts)


def read_results(folder: Path, names: list[str]) -> dict[str, dict]:
    """Read the existing results, by name."""
    files = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def _machines(results: Mapping[str, dict]) -> list[str]:
    """The machines of the results: a line for each machine, set of versions and day."""
    if not results:
        return ["Nothing was measured."]
    lines: dict[str, list[str]] = {}
    for name, result in results.items():
        found = result["machine"]
        versions = ", ".join(f"{each} {found[each]}" for each in ("python", "torch", "tensordict", "torchrl"))
        line = (
            f"{found['cpu']}, cores: {found['cores']}, threads: {found['threads']}, "
            f"{found['gpu'] or 'no GPU'}; {found['os']}; {versions}; {found['date']}"
        )
        lines.setdefault(line, []).append(name)
    load = max(result["machine"]["load_before"] for result in results.values())
    one = len(lines) == 1
    parts = [
        f"Measured on {line}." if one else f"{', '.join(names)}: {line}." for line, names in lines.items()
    ]
    parts.append(f"\nThe load of the machine before a benchmark was at most {load:g}.")
    if any(result["quick"] for result in results.values()):
        parts.append("\n**A quick run, to check that benchmarks work: these numbers mean nothing.**")
    return parts


def _targets(tables: list[Table]) -> str:
    """The number of targets that are met, and a list of the others."""
    cells = [
        (f"{table.title}: {row.name}, {column}", cell)
        for table in tables
        for row in table.rows
        for column, cell in zip(table.head[1:], row.cells, strict=True)
        if cell.target is not None and cell.value is not None
    ]
    missed = [f"- {where}: {cell}" for where, cell in cells if cell.missed]
    words = f"{len(cells) - len(missed)} of {len(cells)} targets are met{'. Missed:' if missed else '.'}"
    return "\n".join(["## Targets\n", words, *([""] if missed else []), *missed, ""])

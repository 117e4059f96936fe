"""docs/benchmarks.md, from what benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tables import Table

HEAD = """# Benchmarks

Written by `make bench` from the files in `benchmarks/results/`; `python benchmarks/NAME.py` measures one
again, wherever you are. What more processes cost is in [scale.md](scale.md).
"""
HOW = """
Times are CPU time of one thread, unless a table says otherwise. Candidates take turns in random
order after a round to warm up, with an allocator that gives no memory back, since page faults would hide
all else. A ratio is the median over the rounds of one time over the other's in the same round, so that it
depends on the machine less than milliseconds do; still it moves by a tenth or so from run to run. A number
with a target in brackets is bold where it misses that.
"""


def page(results: Mapping[str, dict]) -> str:
    """The page of results by name of the benchmark, in their order."""
    tables = {name: [Table.of(plain) for plain in result["tables"]] for name, result in results.items()}
    parts = [HEAD, *_machines(results), HOW, _targets([table for some in tables.values() for table in some])]
    for name, result in results.items():
        command = f"`python benchmarks/{name}.py`, {result['seconds']:.0f} s"
        parts += [f"## {result['about'].rstrip('.')}\n\n{command}\n", *(t.markdown() for t in tables[name])]
    return "\n".join(parts)


def read_results(folder: Path, names: list[str]) -> dict[str, dict]:
    """What is there, by name."""
    files = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def _machines(results: Mapping[str, dict]) -> list[str]:
    """On what they were measured: a line for each machine, set of versions and day."""
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
    parts.append(f"\nThe load before a benchmark began was at most {load:g}.")
    if any(result["quick"] for result in results.values()):
        parts.append("\n**A quick run, to see that benchmarks work: these numbers mean nothing.**")
    return parts


def _targets(tables: list[Table]) -> str:
    """How many targets are met, and which are not."""
    cells = [
        (f"{table.title}: {row.name}, {column}", cell)
        for table in tables
        for row in table.rows
        for column, cell in zip(table.head[1:], row.cells, strict=True)
        if cell.target is not None and cell.value is not None
    ]
    missed = [f"- {where}: {cell}" for where, cell in cells if cell.missed]
    words = f"{len(cells) - len(missed)} of {len(cells)} targets are met{'; not these:' if missed else '.'}"
    return "\n".join(["## Targets\n", words, *([""] if missed else []), *missed, ""])

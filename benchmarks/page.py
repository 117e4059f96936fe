"""Make docs/benchmarks.md from the results of the benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tables import Table

HEAD = """# Benchmarks

This page says what headrace costs, and how each number was measured. `make bench` measures everything on your
machine, in some minutes, and writes this page again. `python benchmarks/pipeline.py` measures one part.
[Scale](scale.md) has the costs of several processes. [Lost and preferred rollouts](lost-rollouts.md) compares
which rollouts are trained, in headrace and in other projects.
"""
COSTS = """## What it costs

| what | how much |
| --- | --- |"""
WHY = """
The times are for one CPU thread. The plain formula, `(r - mean) / (std + eps)`, has no ids and no checks.
headrace checks ids and rewards. It also sorts each group and computes in float64, so that the order of the
rows changes no bit of an advantage.
"""
HOW = """## How it was measured

- Times are CPU times of one thread, if a table does not say otherwise.
- A benchmark has several rounds. Each round runs everything that is compared, in random order. A table shows
  the median time over the rounds, if it does not say otherwise.
- "A / B" or "A over B" is the time of A, divided by the time of B. 2 means that A takes twice as long.
- A ratio is computed in each round, and a table shows the median ratio. So it can differ from that of the two
  times next to it, and be above 1 where A has the smaller time. A ratio varies by about a tenth from run to
  run.
- "(≤ 2)" is a target. A number that misses its target is bold.
"""
Number = Callable[[str, str, str, str], float]
"""A function that returns a cell by benchmark, table, row and column. A missing cell is a KeyError."""


def page(results: Mapping[str, dict]) -> str:
    """Make the page from the results of benchmarks, by name and in order."""
    tables = {name: [Table.of(plain) for plain in result["tables"]] for name, result in results.items()}
    every = [table for some in tables.values() for table in some]
    parts = [HEAD, *_costs(tables), HOW, *_machines(results), _targets(every)]
    for name, result in results.items():
        command = f"`python benchmarks/{name}.py`, {result['seconds']:.0f} s"
        parts += [f"## {result['about'].rstrip('.')}\n\n{command}\n", *(t.markdown() for t in tables[name])]
    return "\n".join(parts)


def read_results(folder: Path, names: list[str]) -> dict[str, dict]:
    """Read the existing results, by name."""
    files = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


LARGE = "pipeline", "The grpo recipe over a gather", "4,000 × 2,048 tokens, 115 MB"


def _advantages(number: Number) -> str:
    title, size = "Advantage over the reshape formula, groups of 8", "131,072"
    formula = number("advantage", title, "formula, ms", size)
    ways = [number("advantage", title, row, size) * formula for row in ("uniform", "ragged", "shuffled")]
    return f"{min(ways):.0f} to {max(ways):.0f} ms. The plain formula takes {formula:.0f} ms."


def _small_batch(number: Number) -> str:
    return f"{number('yardstick', 'Over plain Python and NumPy', '64 rows over NumPy', 'A, ms'):.1f} ms"


def _large_batch(number: Number) -> str:
    gather, times = number(*LARGE, "gather, ms"), number(*LARGE, "minibatches")
    return f"{gather * times:.0f} ms: {times:.1f} times as long as copying the batch once"


def _memory(number: Number) -> str:
    return f"{100 * number(*LARGE, 'memory'):.0f} % of the batch, in addition to the batch"


def _stream(number: Number) -> str:
    place = "stream", "Groups of 8 out of a stream", "100,000 dense"
    ours, theirs = (number(*place, f"{name}, ms") / 1e3 for name in ("assembler", "MCAdvantage"))
    return f"{ours:.1f} s. TorchRL's MCAdvantage takes {theirs:.0f} s."


def _replay(number: Number) -> str:
    place = "replay", "A dump with texts", "1,000,000, 948 MiB"
    seconds, peak = number(*place, "s"), number(*place, "peak, MiB")
    return f"{seconds:.0f} s of wall time, and at most {peak:.0f} MiB of memory"


def _viewer(number: Number) -> str:
    place = "view", "Rows of a run in `headrace view`", "one run, 500 steps"
    return f"{number(*place, 'first rows, s'):.1f} s of wall time"


SUMMARY: dict[str, Callable[[Number], str]] = {
    "The advantages of 131,072 rows, in groups of 8": _advantages,
    "The grpo recipe on a batch of 64 short rows": _small_batch,
    "The grpo recipe on 4,000 rows of 2,048 tokens": _large_batch,
    "Memory for this batch in 8 minibatches, one after the other": _memory,
    "Whole groups from a stream of 100,000 rows": _stream,
    "`task=replay` of a dump of a million rows with texts, 948 MiB": _replay,
    "`headrace view` of a run of 500 steps, until it shows rows": _viewer,
}
"""The lines of the first table, each computed from cells of the tables below."""


def _costs(tables: Mapping[str, list[Table]]) -> list[str]:
    """The lines that can be computed."""
    values = {
        (name, table.title, row.name, column): cell.value
        for name, some in tables.items()
        for table in some
        for row in table.rows
        for column, cell in zip(table.head[1:], row.cells, strict=True)
        if cell.value is not None
    }
    lines = []
    for what, words in SUMMARY.items():
        try:
            lines.append(f"| {what} | {words(lambda *place: values[place])} |")
        except KeyError:  # a quick run has other sizes
            continue
    return [COSTS.rstrip(), *lines, WHY] if lines else []


def _machines(results: Mapping[str, dict]) -> list[str]:
    """The lines about machines: one for each machine, set of versions and day."""
    if not results:
        return ["Nothing was measured."]
    lines: dict[str, list[str]] = {}
    for name, result in results.items():
        found = result["machine"]
        versions = ", ".join(f"{each} {found[each]}" for each in ("python", "torch", "tensordict", "torchrl"))
        line = (
            f"| {found['cpu']}, {found['cores']} cores, {found['gpu'] or 'no GPU'}, {found['os']} | "
            f"{versions} | {found['date']} |"
        )
        lines.setdefault(line, []).append(name)
    load = max(result["machine"]["load_before"] for result in results.values())
    parts = ["| benchmarks | machine | versions | day |\n| --- | --- | --- | --- |"]
    parts += [f"| {', '.join(names)} {line}" for line, names in lines.items()]
    parts.append(f"\nOther programs ran, too: the load before a benchmark was at most {load:g}.")
    if any(result["quick"] for result in results.values()):
        parts.append("\n**A quick run, to check that benchmarks work: these numbers mean nothing.**")
    return parts


def _targets(tables: list[Table]) -> str:
    """The section about targets: how many are met, in total and for each table."""
    lines, met, total = [], 0, 0
    for table in tables:
        missed = [
            cell.missed for row in table.rows for cell in row.cells if None not in (cell.target, cell.value)
        ]
        total, met = total + len(missed), met + missed.count(False)
        if missed:
            link = f"[{table.title}](#{_anchor(table.title)})"
            lines.append(f"| {link} | {missed.count(False)} of {len(missed)} |")
    head = ["", "| table | targets met |", "| --- | ---: |"] if lines else []
    return "\n".join(["\n## Targets\n", f"{met} of {total} targets are met.", *head, *lines, ""])


def _anchor(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())

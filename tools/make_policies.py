"""Write the effect of policies on slow rollouts into docs/streams.md, from benchmarks/runs.py."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "streams.md"
RESULTS = ROOT / "benchmarks" / "results" / "runs.json"
BEGIN, END = "<!-- policies: written by tools/make_policies.py -->\n", "<!-- end of policies -->\n"
HEAD = """
| policy | slowest tenth | speed | waste, % | oldest |
|---|---|---|---|---|
"""


def files() -> dict[Path, str]:
    """The page with its table. Each cell has the numbers of the first three simulated worlds."""
    worlds = json.loads(RESULTS.read_text())["tables"][:3]
    heads = worlds[0]["head"][1:]
    lines = []
    for number, row in enumerate(worlds[0]["rows"]):
        cells = []
        for name in ("slowest tenth", "speed", "waste, %", "oldest"):
            found = [world["rows"][number]["cells"][heads.index(name)] for world in worlds]
            cells.append(" · ".join(format(cell["value"], cell["form"]) for cell in found))
        lines.append(f"| {row['name']} | {' | '.join(cells)} |\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return {PAGE: f"{before}{BEGIN}{HEAD}{''.join(lines)}\n{END}{rest.partition(END)[2]}"}

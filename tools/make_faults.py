"""Write the table of faults in docs/streams.md: the error of each fault, and the seconds until it is raised.

python tools/make_faults.py  # takes two minutes on two idle cores, with the extra `ray`

The cells come from tests/support/troubles.py. tests/collect/test_fault_table.py tests each of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "streams.md"
BEGIN, END = "<!-- faults: written by tools/make_faults.py -->\n", "<!-- end of faults -->\n"


def seconds(after: float) -> str:
    """The seconds as text, rounded."""
    return "under 1 s" if after < 1 else f"{after:.0f} s"


def table() -> str:
    """Try every cell, and return the table of the results.

    Raises:
        ValueError: a result differs from its cell.
    """
    import ray
    from troubles import CELLS, PLACES, look_at_all

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    every = [look_at_all(place, at_once=2) for place in PLACES]  # more processes would slow one another down
    ray.shutdown()
    lines = ["| the environment … | " + " | ".join(PLACES) + " |", "|---" * (1 + len(PLACES)) + "|"]
    for trouble, cells in CELLS.items():
        words = []
        for cell, place, found in zip(cells, PLACES, every, strict=True):
            if not cell.is_in(found[trouble]):
                raise ValueError(f"{trouble} behind {place}: found {found[trouble]}; expected {cell}")
            words.append(f"{cell.shown}, {seconds(found[trouble].after)}")
        lines.append(f"| {trouble} | " + " | ".join(words) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    folders = [str(ROOT / name) for name in ("src", "tests/support", "examples")]
    sys.path[:0] = folders
    # Worker processes, such as those of Ray, also import from these folders.
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")

"""Run the benchmarks, one after the other, and write docs/benchmarks.md from what they find.

    python benchmarks [--only advantage pipeline] [--quick] [--render]

Each is a process of its own and leaves a file in `benchmarks/results/`. What is not run again stays on the
page as it was. `--quick` is to see that all works: it writes to `build/benchmarks/`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from page import page, read_results

ROOT = Path(__file__).parent.parent
# In the order of the page.
NAMES = ["yardstick", "structure", "advantage", "peers", "pipeline", "stages", "replay", "balance", "trees"]
NAMES += ["stream", "ranks", "gpu"]


def main() -> None:
    """Run, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--quick", action="store_true", help="tiny; the numbers mean nothing")
    parser.add_argument("--render", action="store_true", help="run none: only write the page")
    parser.add_argument("--results", type=Path, help="the folder of JSON")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    build = ROOT / "build" / "benchmarks"
    results = options.results or (build if options.quick else ROOT / "benchmarks" / "results")
    target = options.page or (build if options.quick else ROOT / "docs") / "benchmarks.md"
    for name in [] if options.render else options.only:
        words = [str(ROOT / "benchmarks" / f"{name}.py"), "--json", str(results / f"{name}.json")]
        subprocess.run([sys.executable, *words, *(["--quick"] if options.quick else [])], check=True)
    target.write_text(page(read_results(results, NAMES)))


if __name__ == "__main__":
    main()

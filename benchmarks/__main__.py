"""Run the benchmarks, one after the other, and write docs/benchmarks.md from what they find.

    python benchmarks [--only advantage pipeline] [--quick] [--render]

Each is a process of its own and leaves a file in `benchmarks/results/`. What is not run again stays on the
page as it was. `--quick` is to see that all works: it imports once for all, and writes to
`build/benchmarks/`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

from page import page, read_results

ROOT = Path(__file__).parent.parent
# In the order of the page.
NAMES = ["yardstick", "structure", "advantage", "peers", "pipeline", "stages", "tokens", "replay", "balance"]
NAMES += ["trees", "stream", "ranks", "view", "gpu"]


def run(script: Path, *words: str) -> None:
    """Run a benchmark in a new process."""
    subprocess.run([sys.executable, str(script), *words], check=True)


def run_in_fork(script: Path, *words: str) -> None:
    """Run a benchmark in a fork of this process, which has imported what takes longer than a quick run."""
    import torchrl.objectives.llm  # noqa: F401

    import headrace.pipeline.tasks.replay  # noqa: F401

    if (child := os.fork()) == 0:
        failed = 1
        try:
            sys.argv = [str(script), *words]
            runpy.run_path(str(script), run_name="__main__")
            failed = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(f"{script.name} failed")


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
        script, words = ROOT / "benchmarks" / f"{name}.py", ["--json", str(results / f"{name}.json")]
        if options.quick:
            run_in_fork(script, *words, "--quick")
        else:
            run(script, *words)
    target.write_text(page(read_results(results, NAMES)))


if __name__ == "__main__":
    main()

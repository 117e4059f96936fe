"""Run the benchmarks one after the other, and write docs/benchmarks.md from their results.

    python benchmarks [--only advantage pipeline] [--quick] [--render]

Each benchmark runs in its own process and writes a file to `benchmarks/results/`. The page keeps the results
of benchmarks that do not run. `--quick` checks that all benchmarks work: it imports once for all of them, and
writes to `build/benchmarks/`.
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
# Names of the benchmarks, in the order of the page.
NAMES = ["yardstick", "pipeline", "stages", "tokens", "advantage", "peers", "stream", "runs", "survivors"]
NAMES += ["ranks", "replay", "view", "trees", "gpu", "structure", "mutation"]
LONG = ["mutation"]  # takes an hour or two, so only `make mutants` runs it


def run(script: Path, *words: str) -> None:
    """Run a benchmark in a new process."""
    subprocess.run([sys.executable, str(script), *words], check=True)


def run_in_fork(script: Path, *words: str) -> None:
    """Run a benchmark in a fork of this process, which has done the slow imports."""
    import torchrl.objectives.llm  # noqa: F401

    import headrace.pipeline.tools.replay.replay_task  # noqa: F401

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
    """Run the benchmarks, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in NAMES if name not in LONG]
    parser.add_argument("--only", nargs="+", choices=NAMES, default=usual)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the numbers mean nothing")
    parser.add_argument("--render", action="store_true", help="run nothing, only write the page")
    parser.add_argument("--results", type=Path, help="folder of the JSON files")
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

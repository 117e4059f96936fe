"""Simulate which rollouts are lost and preferred, in headrace and in other projects, and write the page.

    python benchmarks/lost_rollouts [--only headrace TRL] [--render] [--sources FOLDER]

This takes about two minutes on two cores and writes docs/lost-rollouts.md. The code of other projects is read
from `build/lost_rollouts`, or from the folder of `--sources`. If it is missing there, it is installed or
cloned. Systems that are not run again keep their results in `benchmarks/results/lost_rollouts.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT / "benchmarks")  # this folder is the package `lost_rollouts`

from lost_rollouts import page, peers, sources  # noqa: E402
from lost_rollouts.runs import jobs_of, measured, merged  # noqa: E402
from lost_rollouts.systems import SYSTEMS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lost_rollouts.json"


def main() -> None:
    projects = list(dict.fromkeys(entry.project.rstrip(" *") for entry in SYSTEMS.values()))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=projects, default=projects)
    parser.add_argument("--render", action="store_true", help="run nothing: only write the page")
    parser.add_argument("--sources", type=Path, help="a folder with the packages and repositories")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "lost-rollouts.md")
    options = parser.parse_args()
    if options.sources:
        os.environ[sources.VARIABLE] = str(options.sources.resolve())
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.render:
        for source in peers.SOURCES:
            if source.project in options.only:
                try:
                    source.fetch()
                except subprocess.CalledProcessError as error:
                    raise SystemExit(f"{source.project} cannot be fetched: {error.stderr}") from error
        starred = [entry.project for entry in SYSTEMS.values() if entry.project.rstrip(" *") in options.only]
        results = merged(results, measured(jobs_of(starred)))
        options.results.write_text(json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    options.page.write_text(page.page(results))


if __name__ == "__main__":
    main()

"""Run each peer's own code on each case, and write docs/field-bugs.md and a page for each case.

    python benchmarks/field_bugs [--only headrace verl] [--render]

Each peer gets its own environment in `build/field_bugs`: the pinned packages without their requirements.
torch and all other packages come from the environment that runs this, through a .pth file. Peers that do not
run again keep their results in `benchmarks/results/field_bugs.json`. The page lists peers that cannot be
installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from pages import write
from peers import PEERS, Peer

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "field_bugs.json"


def environment(name: str, peer: Peer) -> str:
    """The Python of a peer's environment. A missing environment is made.

    Raises:
        CalledProcessError: the packages cannot be installed.
    """
    if not peer.packages:
        return sys.executable
    folder = ROOT / "build" / "field_bugs" / name.replace(" ", "-")
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists() or done.read_text() != str(peer.packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        own, running = [
            sysconfig.get_path("purelib", vars={"base": str(base)}) for base in (folder, sys.prefix)
        ]
        Path(own, "running.pth").write_text(running)
        # agentlightning requires Python 3.12, but its code that runs here does not need it.
        options = ["--quiet", "--no-deps", "--ignore-requires-python", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", "--python", python, "install", *options]
        subprocess.run([*pip, *peer.packages], check=True, capture_output=True, text=True)
        done.write_text(str(peer.packages))
    return str(python)


def run(name: str, peer: Peer) -> dict[str, Any]:
    """The version and the answers of a peer, or the reason why there are none."""
    try:
        python = environment(name, peer)
        script = Path(__file__).with_name("peers.py")
        ran = subprocess.run([python, script, name], check=True, capture_output=True, text=True, timeout=600)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = str(error.stderr or error).strip().splitlines()
        return {"not_run": lines[-1] if lines else "it stopped"}
    return json.loads(ran.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--render", action="store_true", help="run none: only write the pages")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for name in [] if options.render else options.only:
        results[name] = run(name, PEERS[name])
        print(name, results[name].get("version") or results[name])
    if not options.render:
        in_order = {name: results[name] for name in PEERS if name in results}
        options.results.write_text(json.dumps(in_order, indent=1, allow_nan=False) + "\n")
    write(options.docs, results)


if __name__ == "__main__":
    main()

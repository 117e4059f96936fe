"""Run a benchmark, alone or by `make bench`, and keep its tables and a description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from tables import Table
from timing import without_page_faults


def machine() -> dict[str, str | int | float]:
    """Describe the machine and the versions on which the numbers depend."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = f"{platform.system()} {platform.release()}"
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "os": system,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "tensordict", "torchrl")},
        "date": datetime.now(timezone.utc).date().isoformat(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main(
    tables: Callable[[argparse.Namespace], Iterable[Table]],
    doc: str | None,
    *,
    warm: bool = True,
    **numbers: tuple[int, int],
) -> None:
    """Run a benchmark as a script: print its tables, and write them to the file of `--json`.

    Args:
        tables: the function of the benchmark. Its argument has the options below, and `quick`.
        doc: the docstring of the benchmark's module, for ``--help``.
        warm: whether to run without page faults.
        numbers: further options by name, each with its default and its value for ``--quick``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it runs; the numbers mean nothing"
    )
    parser.add_argument("--json", type=Path, help="the file to which the results are written")
    for name, (full, quick) in numbers.items():
        parser.add_argument(f"--{name}", type=int, help=f"{full:,}; {quick:,} if quick")
    options = parser.parse_args()
    for name, defaults in numbers.items():
        if getattr(options, name) is None:
            setattr(options, name, defaults[options.quick])
    if warm and not options.quick:
        without_page_faults()
    torch.set_num_threads(1)
    before, start, found = machine(), time.perf_counter(), []
    for table in tables(options):
        found.append(table)
        Console().print(table.console())
    if options.json:
        result = {
            "quick": options.quick,
            "seconds": round(time.perf_counter() - start, 1),
            "machine": before,
            "about": (doc or "").partition("\n")[0],
            "tables": [asdict(table) for table in found],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

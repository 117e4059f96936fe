"""Functions in processes of their own, which start from one that has imported what they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.multiprocessing
from ready_python import ready_python


def process_context():
    """A clean start without the imports, which would take longer than all that is tried."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_executable(ready_python())
    return context


@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    """Processes of TorchRL begin from one that has imported it, too."""
    process_context()
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def run_processes(function, *args, count: int) -> None:
    """Run ``function(rank, *args)`` on `count` ranks; what one raises is raised."""
    process_context()
    torch.multiprocessing.start_processes(function, args=args, nprocs=count, start_method="forkserver")

"""Run functions in processes that are forked from one that has imported what they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.multiprocessing
from ready_python import ready_python


def process_context():
    """A start method for clean processes that need no imports. Imports would take longer than the tests."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_executable(ready_python())
    return context


@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    """In this context, TorchRL's processes are also forked from a process that has imported TorchRL."""
    process_context()
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def run_processes(function, *args, count: int) -> None:
    """Run ``function(rank, *args)`` on `count` ranks, and raise the error of any rank."""
    process_context()
    torch.multiprocessing.start_processes(function, args=args, nprocs=count, start_method="forkserver")

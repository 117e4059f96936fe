"""Functions in processes of their own, which start from one that has imported what they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

import torch.multiprocessing

IMPORTED = [
    "headrace.pipeline",
    "headrace.pipeline.main",
    "headrace.pipeline.reverse",
    "headrace.pipeline.tasks.perform",
    "torchrl.collectors",
    "torchrl.objectives.llm",
    "pyarrow.compute",
    *filter(find_spec, ["pandas"]),  # pyarrow imports it with the first array, where it is
]


def process_context():
    """A clean start without the imports, which would take longer than all that is tried."""
    for name in IMPORTED:
        assert find_spec(name), f"there is no {name}, of which that process would not say a word"
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
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

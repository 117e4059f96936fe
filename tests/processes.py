"""Functions in processes of their own, which start from one that has imported what they need."""

from __future__ import annotations

import torch.multiprocessing

IMPORTED = ["headrace.pipeline", "headrace.pipeline.reverse", "torchrl.collectors", "torchrl.objectives.llm"]


def process_context():
    """A clean start without the imports, which would take longer than all that is tried."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run_processes(function, *args, count: int) -> None:
    """Run ``function(rank, *args)`` on `count` ranks; what one raises is raised."""
    process_context()
    torch.multiprocessing.start_processes(function, args=args, nprocs=count, start_method="forkserver")

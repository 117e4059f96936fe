"""What sharing a batch costs, over one process.

    python benchmarks/ranks.py [--ranks 2] [--rollouts 8192] [--rounds 10]

The default recipe on ranks with rows of their own. Wall time, since ranks wait for one another; more ranks
than cores wait for a core.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms.distributed import Ranks

GROUP_SIZE = 8
NOTE = """Wall time. One batch, of rollouts of one row and one token, each rank with its share of it, over
the same batch in one process. A meeting is one round of messages between the ranks, before which they wait
for one another; a batch has several."""


def collected(rollouts: int, rank: int = 0) -> TensorDict:
    """Rollouts of one row and one token each."""
    ids = torch.arange(rank * rollouts, (rank + 1) * rollouts)
    columns = {
        "group_id": ids // GROUP_SIZE,
        "rollout_id": ids,
        ("next", "reward"): torch.rand(rollouts),
        ("masks", "all_assistant_mask"): torch.ones(rollouts, 1, dtype=torch.bool),
    }
    return TensorDict(columns, batch_size=[rollouts])


def recipe(*overrides: str) -> Pipeline:
    """The default one."""
    return load_pipeline(f"pipeline.stages.gate.group_size={GROUP_SIZE}", *overrides)


def seconds(function: Callable[[], object], rounds: int) -> float:
    """The median of some rounds, after one to warm up."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def run_rank(rank: int, arguments: argparse.Namespace, port: int, results: Any) -> None:
    """What each process does; the first puts the seconds into `results`: shared, alone, of a meeting."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, arguments.ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    own = arguments.rollouts // arguments.ranks
    pipeline, mine = recipe("pipeline.process_group=world"), collected(own, rank)
    shared = seconds(lambda: pipeline(mine), arguments.rounds)
    ranks = Ranks(dist.group.WORLD)
    meeting = seconds(ranks.meet, 20 * arguments.rounds)
    if rank == 0:
        alone, every = recipe(), collected(arguments.rollouts)
        single = seconds(lambda: alone(every), arguments.rounds)
        results.put((shared, single, meeting))
    dist.barrier()
    dist.destroy_process_group()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """The one table."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    start = torch.multiprocessing.start_processes
    start(run_rank, (options, port, results), options.ranks, start_method="spawn")
    shared, single, meeting = results.get()
    cells = [Cell(1e3 * shared, ".1f"), Cell(1e3 * single, ".1f"), Cell(shared / single), Cell(1e3 * meeting)]
    head = ["rollouts", f"{options.ranks} ranks, ms", "one process, ms", "ratio", "a meeting, ms"]
    yield Table("Ranks that share a batch", NOTE, head, [Row(f"{options.rollouts:,}", cells)])


if __name__ == "__main__":
    main(tables, __doc__, warm=False, ranks=(2, 2), rollouts=(8192, 64), rounds=(10, 1))

"""Measure ranks that share a batch.

    python benchmarks/ranks.py [--ranks 2] [--rounds 10]

Each rank runs the grpo recipe on its own rows. With more ranks than cores, ranks wait for a core.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from batches import MINIBATCHES, collected, grpo_loop
from results import main
from tables import Cell, Row, Table

SIZES, TOKENS = (1024, 8192), 16  # rows of a rank, tokens of a row
TARGET = 1.5  # target of the smallest size
NOTE = f"""The time, in ms, of the loop over the {MINIBATCHES} minibatches of the grpo recipe: on a rank,
and in one process, which has the rows of all ranks. "2 × 1,024" is two ranks with 1,024 rows each. The
ratio is that of the CPU times. A collective is an exchange between the ranks; the last column counts
those of a rank for a batch."""
# The methods of a process group. Methods that this version lacks are not counted.
COLLECTIVES = """allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced allreduce
allreduce_coalesced alltoall alltoall_base barrier monitored_barrier broadcast gather scatter reduce
reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced recv recv_anysource send"""


def join_ranks(rank: int, ranks: int, port: int) -> None:
    """Make this process one of the ranks."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def free_port() -> int:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def loops(rank: int, ranks: int, rows: int, tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make the loop of a rank with `rows` rows, and the loop of one process with the rows of all ranks."""
    every = collected(ranks * rows, tokens)
    mine = every[rank * rows : (rank + 1) * rows].clone()
    return grpo_loop(mine, MINIBATCHES, "pipeline.process_group=world"), grpo_loop(every, MINIBATCHES)


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Measure the CPU time of this thread, and the wall time, of a call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    function()
    return time.thread_time() - cpu, time.perf_counter() - wall


def run_rank(rank: int, ranks: int, sizes: list[int], rounds: int, port: int, results: Any) -> None:
    """Run one rank. The first rank puts its times in each round, as a rank and alone, into `results`."""
    join_ranks(rank, ranks, port)
    for rows in sizes:
        shared, single = loops(rank, ranks, rows, TOKENS)
        times = []
        for _ in range(rounds + 1):
            dist.barrier()
            times.append((seconds(shared), seconds(single) if rank == 0 else ()))
        collectives = count_collectives(shared)
        if rank == 0:
            results.put((times[1:], collectives))
    dist.barrier()
    dist.destroy_process_group()


def count_collectives(function: Callable[[], object]) -> int:
    """Count how often a function calls the process group."""
    count = 0
    with ExitStack() as patches:
        for name in COLLECTIVES.split():
            if (method := getattr(dist.ProcessGroup, name, None)) is not None:

                def counted(*args, _method=method, **options):
                    nonlocal count
                    count += 1
                    return _method(*args, **options)

                patches.enter_context(mock.patch.object(dist.ProcessGroup, name, counted))
        function()
    return count


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the table."""
    sizes = [32 + 8 * i if options.quick else rows for i, rows in enumerate(SIZES)]
    results = torch.multiprocessing.get_context("fork").SimpleQueue()  # no imports in the new processes
    arguments = (options.ranks, sizes, options.rounds, free_port(), results)
    torch.multiprocessing.start_processes(run_rank, arguments, options.ranks, start_method="fork")
    lines = []
    for rows in sizes:
        times, collectives = results.get()
        (cpu, wall), (single, single_wall) = (
            [[each[who][clock] for each in times] for clock in (0, 1)] for who in (0, 1)
        )
        ratio = statistics.median(a / b for a, b in zip(cpu, single, strict=True))
        middle = [Cell(1e3 * statistics.median(each), ".1f") for each in (cpu, single, wall, single_wall)]
        target = TARGET if rows == sizes[0] else None
        last = Cell(ratio, target=target), Cell(collectives, "d", 3)
        lines.append(Row(f"{options.ranks} × {rows:,}", [*middle, *last]))
    head = ["ranks × rows", "a rank, CPU", "one process, CPU", "a rank, wall", "one process, wall", "ratio"]
    head.append("collectives")
    yield Table("A rank over one process", NOTE, head, lines)


if __name__ == "__main__":
    main(tables, __doc__, warm=False, ranks=(2, 2), rounds=(20, 1))

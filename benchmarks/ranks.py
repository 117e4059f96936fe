"""What sharing a batch costs: the default recipe on ranks with rows of their own, over one process.

    python benchmarks/ranks.py [--ranks 2] [--rollouts 8192] [--rounds 10]

Wall time, since ranks wait for one another; more ranks than cores wait for a core.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms.distributed import Ranks

GROUP_SIZE = 8


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


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """What each process does; the first prints."""
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
        Console(soft_wrap=True).print(
            f"{arguments.rollouts:,} rollouts on {arguments.ranks} ranks: {1e3 * shared:.1f} ms, "
            f"{shared / single:.2f} of one process ({1e3 * single:.1f} ms); a meeting {1e3 * meeting:.2f} ms"
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in (("ranks", 2), ("rollouts", 8192), ("rounds", 10)):
        parser.add_argument(f"--{option}", type=int, default=default)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(run_rank, (arguments, port), arguments.ranks, start_method="spawn")


if __name__ == "__main__":
    main()

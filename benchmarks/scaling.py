"""Measure the cost of a rollout in the control path, which only handles the table, without tokens.

    python benchmarks/scaling.py [--processes 2 4 8] [--rounds 5]

It measures one process with a thousand to ten million rollouts; several gloo ranks; and one of 1,024 ranks
with 1,024 rollouts each. In the last case, the other 1,023 ranks do not run, and their data are given. With
more processes than cores, wall times include the wait for a core. `docs/scale.md` explains the results, and
`engines.py` measures Ray and TransferQueue.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import free_port, join_ranks
from rich.console import Console
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms.ranks import Ranks

GROUP_SIZE = 8
SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)
MODEL = (1024, 1024)  # ranks, rollouts of each rank
CONSOLE = Console(soft_wrap=True)


def table_only(rollouts: int, process: int = 0) -> TensorDict:
    """Rollouts with one row each: ids, rewards and ends, but no tokens."""
    ids = torch.arange(process * rollouts, (process + 1) * rollouts)
    columns = {
        "group_id": ids // GROUP_SIZE,
        "rollout_id": ids,
        ("next", "reward"): torch.rand(rollouts),
        ("next", "done"): torch.ones(rollouts, dtype=torch.bool),
    }
    return TensorDict(columns, batch_size=[rollouts])


def say(words: str) -> None:
    CONSOLE.print(f"{words} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")


class Exchanged:
    """Counts the bytes that this process sends and receives in the tensors of `all_gather`."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        counted = partial(self.all_gather, dist.all_gather)
        dist.all_gather = counted
        dist.distributed_c10d.all_gather = counted  # the name by which objects are gathered

    def all_gather(self, do: Any, found: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> None:
        self.sent += tensor.nbytes
        self.received += sum(each.nbytes for each in found) - tensor.nbytes
        do(found, tensor, **options)


def control_pipeline(*words: str) -> Pipeline:
    """The default recipe without the loss weights, which need tokens."""
    return load_pipeline(f"pipeline.stages.gate.group_size={GROUP_SIZE}", "~pipeline.stages.weight", *words)


def decide(pipeline: Pipeline, rows: TensorDict, rounds: int) -> tuple[float, float, float]:
    """Return the median CPU and wall seconds, and the bytes of the table per row. No row is gathered."""
    cpus, walls = [], []
    for _ in range(rounds + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        run = pipeline.run(rows)
        cpus.append(time.process_time() - cpu)
        walls.append(time.perf_counter() - wall)
    table = run.known_rows.table
    bytes_ = sum(column.numel() * column.element_size() for column in table.columns.values()) / table.size
    return statistics.median(cpus[1:]), statistics.median(walls[1:]), bytes_


def run_control(rank: int, options: argparse.Namespace, processes: int, port: int) -> None:
    """Run the control path on this rank's rows. The first rank prints the results."""
    join_ranks(rank, processes, port)
    exchanged, pipeline = Exchanged(), control_pipeline("pipeline.process_group=world")
    for size in SIZES[:-1]:
        rollouts = size // processes // GROUP_SIZE * GROUP_SIZE
        mine = table_only(rollouts, rank)
        cpu, wall, _ = decide(pipeline, mine, options.rounds)
        before = exchanged.sent, exchanged.received
        pipeline.run(mine)
        numbers = [cpu, wall, exchanged.sent - before[0], exchanged.received - before[1]]
        every = [torch.zeros(4, dtype=torch.float64) for _ in range(processes)]
        dist.all_gather(every, torch.tensor(numbers, dtype=torch.float64))
        if rank == 0:
            total, last = processes * rollouts, every[-1].tolist()
            say(
                f"{processes} ranks, {total:,} rollouts: {1e3 * max(wall, last[1]):.1f} ms; CPU "
                f"{1e3 * cpu:.1f} ms on rank 0, {1e3 * last[0]:.1f} on the last, "
                f"{1e3 * sum(float(each[0]) for each in every):.1f} on all; a rank gives "
                f"{numbers[2] / rollouts:.1f} bytes for each of its rows, and gets {numbers[3] / total:.1f} "
                f"for each row of all"
            )
    dist.barrier()
    dist.destroy_process_group()


class OneOfMany(Ranks):
    """One of many ranks of equal size, in one process. The data that the other ranks would send are given."""

    def __init__(self, size: int, columns: dict[Any, torch.Tensor]):
        self.group, self.shared_ids, self.size, self.rank = None, "same", size, 0
        self.refused, self.columns = False, columns

    def meet(self, about: str = "", error: BaseException | None = None) -> None:
        """Do not wait, because no other rank runs."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def _all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values] * self.size)

    def _gather(self, columns: Any, counts: list[int]) -> dict[Any, torch.Tensor]:
        return {key: self.columns[key] for key in columns}


def measure_model(options: argparse.Namespace) -> None:
    """Measure the decision on one of many ranks."""
    ranks, rollouts = MODEL
    rows = ranks * rollouts
    columns = dict(control_pipeline().run(table_only(rows)).known_rows.table.columns)
    pipeline = control_pipeline("pipeline.process_group=world", "pipeline.shared_ids=same")
    many = OneOfMany(ranks, columns)
    with mock.patch("headrace.pipeline.pipeline.connect", return_value=many):
        cpu, _, bytes_ = decide(pipeline, table_only(rollouts), options.rounds)
    say(
        f"model, {ranks:,} ranks × {rollouts:,}: {1e3 * cpu:.0f} ms of CPU to decide, with a table of "
        f"{bytes_ * rows / 1e6:.0f} MB"
    )


def measure_control(options: argparse.Namespace) -> None:
    """Measure one process, then ranks, then one of many ranks."""
    pipeline = control_pipeline()
    for rollouts in SIZES if options.processes else ():
        rows = table_only(rollouts // GROUP_SIZE * GROUP_SIZE)
        cpu, _, bytes_ = decide(pipeline, rows, options.rounds if rollouts < SIZES[-1] else 1)
        say(
            f"1 process, {rollouts:,} rollouts: {1e3 * cpu:,.1f} ms of CPU, {1e9 * cpu / rollouts:,.0f} ns a "
            f"row; the table has {bytes_:.0f} bytes a row"
        )
    for processes in options.processes:
        arguments = (options, processes, free_port())
        torch.multiprocessing.start_processes(run_control, arguments, processes, start_method="spawn")
    measure_model(options)


def main() -> None:
    """Print a line for each size, and for each number of processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    torch.set_num_threads(1)
    measure_control(parser.parse_args())


if __name__ == "__main__":
    main()

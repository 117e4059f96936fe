"""What a rollout costs in the control path, which handles the table alone, without tokens.

    python benchmarks/scaling.py [--processes 2 4 8] [--rounds 5]

It measures from a thousand to ten million rollouts in one process; gloo ranks, with `decide_on=each_rank` and
`first_rank`; and the first of 1,024 ranks with 1,024 rollouts each. The other 1,023 ranks do not run: their
data are given, and the messages to them are made. Wall times of more processes than cores include the wait
for a core. `docs/scale.md` explains the results, and `engines.py` measures Ray and TransferQueue.
"""

from __future__ import annotations

import argparse
import os
import pickle
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
from headrace.transforms.distributed import Ranks

GROUP_SIZE = 8
SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)
MODEL = (1024, 1024)  # ranks, rollouts of each
WAYS = ("each_rank", "first_rank")  # decide_on
WIRE = 1e9  # bytes a second that the model takes for granted
CONSOLE = Console(soft_wrap=True)


def table_only(rollouts: int, process: int = 0) -> TensorDict:
    """Rollouts of one row each: ids, rewards and ends, and no tokens."""
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
    """Bytes that this process gives to the others, and gets from them: of collectives, by their tensors."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        for name in ("all_gather", "gather", "scatter", "broadcast"):
            counted = partial(getattr(self, name), getattr(dist, name))
            setattr(dist, name, counted)
            setattr(dist.distributed_c10d, name, counted)  # for objects

    def all_gather(self, do: Any, found: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> None:
        self.sent += tensor.nbytes
        self.received += sum(each.nbytes for each in found) - tensor.nbytes
        do(found, tensor, **options)

    def gather(self, do: Any, tensor: torch.Tensor, found: list | None = None, **options: Any) -> None:
        self.sent += tensor.nbytes
        self.received += sum(each.nbytes for each in found) - tensor.nbytes if found else 0
        do(tensor, found, **options)

    def scatter(self, do: Any, tensor: torch.Tensor, *given: Any, **options: Any) -> None:
        found = options.get("scatter_list", given[0] if given else None)
        self.sent += sum(each.nbytes for each in found) - tensor.nbytes if found else 0
        self.received += 0 if found else tensor.nbytes
        do(tensor, *given, **options)

    def broadcast(self, do: Any, tensor: torch.Tensor, *given: Any, **options: Any) -> None:
        self.received += tensor.nbytes if dist.get_rank() else 0
        do(tensor, *given, **options)


def control_pipeline(*words: str) -> Pipeline:
    """The default recipe but for the weights, which are of tokens."""
    return load_pipeline(f"pipeline.stages.gate.group_size={GROUP_SIZE}", "~pipeline.stages.weight", *words)


def decide(pipeline: Pipeline, rows: TensorDict, rounds: int) -> tuple[float, float, float]:
    """Median seconds of CPU and of wall time, and bytes of the table a row. No row is gathered."""
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
    """The control path on this rank's rows, decided on each rank and on the first, which prints."""
    join_ranks(rank, processes, port)
    exchanged = Exchanged()
    for size in SIZES[:-1]:
        rollouts = size // processes // GROUP_SIZE * GROUP_SIZE
        mine = table_only(rollouts, rank)
        for way in WAYS:
            pipeline = control_pipeline("pipeline.process_group=world", f"pipeline.decide_on={way}")
            cpu, wall, _ = decide(pipeline, mine, options.rounds)
            before = exchanged.sent, exchanged.received
            pipeline.run(mine)
            numbers = [cpu, wall, exchanged.sent - before[0], exchanged.received - before[1]]
            every = [torch.zeros(4, dtype=torch.float64) for _ in range(processes)]
            dist.all_gather(every, torch.tensor(numbers, dtype=torch.float64))
            if rank == 0:
                total, last = processes * rollouts, every[-1].tolist()
                say(
                    f"{processes} ranks, {total:,} rollouts, {way}: {1e3 * max(wall, last[1]):.1f} ms; CPU "
                    f"{1e3 * cpu:.1f} ms on rank 0, {1e3 * last[0]:.1f} on the last, "
                    f"{1e3 * sum(float(each[0]) for each in every):.1f} on all; bytes a row of all: rank 0 "
                    f"gets {numbers[3] / total:.1f} and gives {numbers[2] / total:.1f}, the last gets "
                    f"{last[3] / total:.1f} and gives {last[2] / total:.1f}"
                )
    dist.barrier()
    dist.destroy_process_group()


class FirstOfMany(Ranks):
    """The first of many ranks that all have as many rows, in one process: it has what it would be sent."""

    def __init__(self, size: int, way: str, columns: dict[Any, torch.Tensor]):
        self.group, self.shared_ids, self.size, self.rank = None, "same", size, 0
        self.one_decides, self.decides, self.refused = way == "first_rank", True, False
        self.columns, self.given = columns, 0

    def meet(self, about: str = "", error: BaseException | None = None) -> None:
        """No other rank runs."""

    def _all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values] * self.size)

    def _gather(self, columns: Any, counts: list[int]) -> dict[Any, torch.Tensor]:
        return {key: self.columns[key] for key in columns}

    def scatter_objects(self, values: Any) -> Any:
        self.given += sum(len(pickle.dumps(each)) for each in values)
        return values[0]


def measure_model(options: argparse.Namespace) -> None:
    """What deciding takes on one of very many ranks, and what goes over the wire."""
    ranks, rollouts = MODEL
    rows = ranks * rollouts
    columns = dict(control_pipeline().run(table_only(rows)).known_rows.table.columns)
    for way in WAYS:
        pipeline = control_pipeline("pipeline.process_group=world", "pipeline.shared_ids=same")
        many = FirstOfMany(ranks, way, columns)
        given = {"Ranks": lambda *_, many=many: many, "resolve_group": lambda _: None}
        with mock.patch.multiple("headrace.pipeline.pipeline", **given):
            cpu, _, bytes_ = decide(pipeline, table_only(rollouts), options.rounds)
        back = many.given / (options.rounds + 1) / rows
        say(
            f"model, {ranks:,} ranks × {rollouts:,}, {way}: {1e3 * cpu:.0f} ms of CPU to decide, with a "
            f"table of {bytes_ * rows / 1e6:.0f} MB; {back:.0f} bytes a row back, "
            f"{1e3 * back * rows / WIRE:.0f} ms at {WIRE / 1e9:g} GB/s"
        )


def measure_control(options: argparse.Namespace) -> None:
    """One process, then ranks, then the model."""
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

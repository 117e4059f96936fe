"""What a rollout costs in the control path and on the wire: ranks, Ray, TransferQueue.

    python benchmarks/scaling.py control [--rounds 5]
    python benchmarks/scaling.py ranks [--processes 2 4 8] [--rollouts 8192] [--rounds 5]
    python benchmarks/scaling.py ray   [--processes 2 4 8] [--rollouts 2048] [--tokens 512]
    python benchmarks/scaling.py queue [--processes 2 4 8] [--rollouts 2048] [--tokens 512]

`--rollouts` is per process. Results are wall times, and for ranks also the CPU time of one rank: with more
processes than cores, the wall time includes the wait for a core. `docs/scale.md` explains the results.

`control` measures the table alone, without tokens: from a thousand to ten million rollouts in one process;
on gloo ranks, with `decide_on=each_rank` and `first_rank`; and the first of 1,024 ranks with 1,024 rollouts
each. The other 1,023 ranks do not run: their data are given, and the messages to them are made.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from tensordict import TensorDict

from headrace.pipeline import Pipeline, RayAssembler, RolloutQueue, assembled, load_pipeline
from headrace.transforms import GroupAssembler
from headrace.transforms.distributed import Ranks

GROUP_SIZE, PIECE = 8, 256
CONSOLE = Console(soft_wrap=True)


def collected(rollouts: int, process: int = 0, tokens: int = 1) -> TensorDict:
    """Rollouts of one row each."""
    ids = torch.arange(process * rollouts, (process + 1) * rollouts)
    columns = {
        "group_id": ids // GROUP_SIZE,
        "rollout_id": ids,
        ("next", "reward"): torch.rand(rollouts),
        ("next", "done"): torch.ones(rollouts, dtype=torch.bool),
        ("tokens", "full"): torch.zeros(rollouts, tokens, dtype=torch.int64),
        ("log_probs", "full"): torch.zeros(rollouts, tokens),
        ("masks", "all_assistant_mask"): torch.ones(rollouts, tokens, dtype=torch.bool),
    }
    return TensorDict(columns, batch_size=[rollouts])


def say(words: str) -> None:
    CONSOLE.print(f"{words} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")


# -- ranks that share a batch -----------------------------------------------------------------------------


class Exchanged:
    """Bytes that this process gives to the others, and gets from them: of collectives, by their tensors."""

    def __init__(self) -> None:
        self.sent = self.received = self.tensors = 0
        for name in ("all_gather", "gather", "scatter", "broadcast"):
            counted = partial(getattr(self, name), getattr(dist, name))
            setattr(dist, name, counted)
            setattr(dist.distributed_c10d, name, counted)  # for objects

    def all_gather(self, do: Any, found: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> None:
        self.sent, self.tensors = self.sent + tensor.nbytes, self.tensors + 1
        self.received += sum(each.nbytes for each in found) - tensor.nbytes
        do(found, tensor, **options)

    def gather(self, do: Any, tensor: torch.Tensor, found: list | None = None, **options: Any) -> None:
        self.sent, self.tensors = self.sent + tensor.nbytes, self.tensors + 1
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


def run_rank(rank: int, options: argparse.Namespace, processes: int, port: int) -> None:
    """The default recipe on this rank's rows; the first rank prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, processes, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    words = (f"pipeline.stages.gate.group_size={GROUP_SIZE}", "pipeline.process_group=world")
    pipeline, mine = load_pipeline(*words), collected(options.rollouts, rank)
    pipeline(mine)
    walls, cpus = [], []
    for _ in range(options.rounds):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        pipeline(mine)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    exchanged = Exchanged()
    pipeline(mine)
    if rank == 0:
        total = processes * options.rollouts
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        say(
            f"{processes} ranks × {options.rollouts:,} = {total:,} rollouts: {1e3 * wall:.0f} ms, "
            f"{1e3 * cpu:.0f} ms of CPU a rank, {1e9 * cpu / total:.0f} ns for each of all rollouts; a rank "
            f"sends {exchanged.sent / options.rollouts:.0f} bytes for each of its own, in "
            f"{exchanged.tensors} tensors"
        )
    dist.barrier()
    dist.destroy_process_group()


def spawn(function: Callable[..., None], options: argparse.Namespace, processes: int) -> None:
    """Run a function on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = torch.multiprocessing.start_processes
    start(function, (options, processes, port), processes, start_method="spawn")


# -- the control path: the table alone --------------------------------------------------------------------

SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)
MODEL = (1024, 1024)  # ranks, rollouts of each
WAYS = ("each_rank", "first_rank")  # decide_on
WIRE = 1e9  # bytes a second that the model takes for granted


def table_only(rollouts: int, process: int = 0) -> TensorDict:
    """Ids, rewards and ends, and no tokens."""
    return collected(rollouts, process).exclude("tokens", "log_probs", "masks")


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
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, processes, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
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
        pipeline._ranks = lambda many=many: many
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
        spawn(run_control, options, processes)
    measure_model(options)


# -- writers ----------------------------------------------------------------------------------------------


def send(put: Callable[[TensorDict], None], options: argparse.Namespace, process: int) -> None:
    """What a writer does: its rollouts, shuffled, so that groups are not whole for a while."""
    torch.set_num_threads(1)
    rows = collected(options.rollouts, process, options.tokens)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(process))
    for piece in order.split(PIECE):
        put(rows[piece])


def send_to_actor(assembler: RayAssembler, options: argparse.Namespace, process: int) -> None:
    send(assembler.put, options, process)


def send_to_queue(queue: RolloutQueue, options: argparse.Namespace, process: int) -> None:
    send(queue.put, options, process)
    queue.end()


def report(kind: str, processes: int, rows: int, seconds: float, bytes_: float, payload: float) -> None:
    say(
        f"{kind}, {processes} writers: {rows:,} rollouts in {seconds:.2f} s, {rows / seconds:,.0f} a second; "
        f"{bytes_:,.0f} bytes a rollout on the wire, of which {payload:,.0f} are its columns"
    )


def payload_of(options: argparse.Namespace) -> float:
    rows = collected(PIECE, 0, options.tokens)
    return rows.bytes() / PIECE


def measure_ray(options: argparse.Namespace, processes: int) -> None:
    import ray

    task = ray.remote(num_cpus=0, max_retries=0)(send_to_actor)
    idle = argparse.Namespace(rollouts=0, tokens=options.tokens)
    assembler = RayAssembler(group_size=GROUP_SIZE)
    ray.get([task.remote(assembler, idle, process) for process in range(processes)])  # all have begun
    start, rows = time.perf_counter(), 0
    writers = [task.remote(assembler, options, process) for process in range(processes)]
    for batch in assembler.batches(writers, patience=300):
        rows += len(batch)
    seconds = time.perf_counter() - start
    bytes_ = len(ray.cloudpickle.dumps((collected(PIECE, 0, options.tokens), None))) / PIECE
    report("Ray", processes, rows, seconds, bytes_, payload_of(options))
    assembler.shutdown()


def loopback() -> int:
    """Bytes that this machine has sent to itself."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def measure_queue(options: argparse.Namespace, processes: int) -> None:
    import ray

    task = ray.remote(num_cpus=0, max_retries=0)(send_to_queue)
    idle = argparse.Namespace(rollouts=0, tokens=options.tokens)
    begun = RolloutQueue(f"begun {processes}")
    ray.get([task.remote(begun, idle, process) for process in range(processes)])
    name = f"rollouts {processes}"
    source = RolloutQueue(name, producers=processes)
    start, rows, before = time.perf_counter(), 0, loopback()
    for process in range(processes):
        task.remote(RolloutQueue(name), options, process)
    for batch in assembled(source, GroupAssembler(group_size=GROUP_SIZE), patience=300):
        rows += len(batch)
    seconds = time.perf_counter() - start
    # Written once and read once; what else runs on the machine is in it too.
    report("TransferQueue", processes, rows, seconds, (loopback() - before) / rows, payload_of(options))


def main() -> None:
    """Print a line for each number of processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["control", "ranks", "ray", "queue"])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--rollouts", type=int, help="of each process")
    for option, default in (("rounds", 5), ("tokens", 512)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    options.rollouts = options.rollouts or {"ranks": 8192}.get(options.what, 2048)
    torch.set_num_threads(1)
    if options.what == "ranks":
        for processes in options.processes:
            spawn(run_rank, options, processes)
        return
    if options.what == "control":
        measure_control(options)
        return
    import ray

    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False)
    if options.what == "queue":
        import transfer_queue

        transfer_queue.init()
    for processes in options.processes:
        {"ray": measure_ray, "queue": measure_queue}[options.what](options, processes)
    ray.shutdown()


if __name__ == "__main__":
    main()

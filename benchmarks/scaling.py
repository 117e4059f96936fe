"""What a rollout costs in the control path and on the wire: ranks, Ray, TransferQueue.

    python benchmarks/scaling.py control [--rounds 5]
    python benchmarks/scaling.py ranks [--processes 2 4 8] [--rollouts 8192] [--rounds 5]
    python benchmarks/scaling.py ray   [--processes 2 4 8] [--rollouts 2048] [--tokens 512]
    python benchmarks/scaling.py queue [--processes 2 4 8] [--rollouts 2048] [--tokens 512]

`--rollouts` is per process. Wall time, and for ranks the CPU time of one: more processes than cores wait for
a core, which the wall time has and the CPU time has not. `docs/scale.md` says what it means.

`control` is of the table alone, without tokens, from a thousand to ten million rollouts in one process, and
on gloo ranks; from that it says what 1,024 ranks of 1,024 rollouts would cost.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from tensordict import TensorDict

from headrace.pipeline import Pipeline, RayAssembler, RolloutQueue, assembled, load_pipeline
from headrace.transforms import GroupAssembler

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


def count_sent(sent: list[int]) -> None:
    """Note the bytes of each tensor that this process gives to the others; objects are small."""
    gather = dist.all_gather

    def counted(found: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return gather(found, tensor, **options)

    dist.all_gather = counted


def run_rank(rank: int, options: argparse.Namespace, processes: int, port: int) -> None:
    """The default recipe on this rank's rows; the first rank prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, processes, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    words = (f"pipeline.stages.gate.group_size={GROUP_SIZE}", "pipeline.process_group=world")
    pipeline, mine, sent = load_pipeline(*words), collected(options.rollouts, rank), []
    pipeline(mine)
    walls, cpus = [], []
    for _ in range(options.rounds):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        pipeline(mine)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    count_sent(sent)
    pipeline(mine)
    if rank == 0:
        total = processes * options.rollouts
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        say(
            f"{processes} ranks × {options.rollouts:,} = {total:,} rollouts: {1e3 * wall:.0f} ms, "
            f"{1e3 * cpu:.0f} ms of CPU a rank, {1e9 * cpu / total:.0f} ns for each of all rollouts; a rank "
            f"sends {sum(sent) / options.rollouts:.0f} bytes for each of its own, in {len(sent)} tensors"
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
SHARED = 10**6  # rollouts of all ranks together
MODEL = (1024, 1024)  # ranks, rollouts of each
SENT = 32  # bytes a row, as is measured of ranks
PLAN = 32  # bytes a row: minibatch, micro-batch, advantage and weight
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


def exchanged(processes: int, rollouts: int, wide: int, rounds: int) -> tuple[float, float]:
    """Median seconds in which all get the columns of all; in which one does, and gives each its plan."""
    mine = torch.zeros(rollouts, wide, dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(processes)]
    plan = torch.zeros(rollouts, PLAN, dtype=torch.uint8)
    plans = [torch.zeros_like(plan) for _ in range(processes)] if dist.get_rank() == 0 else None

    def all_of_them() -> None:
        dist.all_gather(every, mine)

    def by_one() -> None:
        dist.gather(mine, every if dist.get_rank() == 0 else None)
        dist.scatter(plan, plans)

    found = []
    for exchange in (all_of_them, by_one):
        seconds = []
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            exchange()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds[1:]))
    return found[0], found[1]


def run_control(rank: int, options: argparse.Namespace, processes: int, port: int) -> None:
    """The control path on this rank's rows; the first rank prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, processes, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    rollouts = SHARED // processes // GROUP_SIZE * GROUP_SIZE
    pipeline, mine = control_pipeline("pipeline.process_group=world"), table_only(rollouts, rank)
    cpu, wall, _ = decide(pipeline, mine, options.rounds)
    sent: list[int] = []
    count_sent(sent)
    pipeline.run(mine)
    wide = sum(sent) // rollouts
    everywhere, by_one = exchanged(processes, rollouts, wide, options.rounds)
    if rank == 0:
        say(
            f"{processes} ranks, {processes * rollouts:,} rollouts: {1e3 * cpu:.0f} ms of CPU a rank, "
            f"{1e3 * wall:.0f} ms; a rank sends {wide} bytes a row of its own and receives "
            f"{wide * processes * rollouts / 1e6:.0f} MB; that exchange alone {1e3 * everywhere:.0f} ms, "
            f"to one rank and {PLAN} bytes a row back {1e3 * by_one:.0f} ms"
        )
    dist.barrier()
    dist.destroy_process_group()


def measure_control(options: argparse.Namespace) -> None:
    """One process, then ranks, then the model."""
    pipeline = control_pipeline()
    for rollouts in SIZES:
        rows = table_only(rollouts // GROUP_SIZE * GROUP_SIZE)
        cpu, _, bytes_ = decide(pipeline, rows, options.rounds if rollouts < SIZES[-1] else 1)
        say(
            f"1 process, {rollouts:,} rollouts: {1e3 * cpu:,.1f} ms of CPU, {1e9 * cpu / rollouts:,.0f} ns a "
            f"row; the table has {bytes_:.0f} bytes a row"
        )
    for processes in options.processes:
        spawn(run_control, options, processes)
    ranks, rollouts = MODEL
    rows = ranks * rollouts
    cpu, _, bytes_ = decide(pipeline, table_only(rows), options.rounds)
    say(
        f"model, {ranks:,} ranks × {rollouts:,}: every rank decides in {1e3 * cpu:.0f} ms of CPU with a "
        f"table of {bytes_ * rows / 1e6:.0f} MB, after it has received {SENT * rows / 1e6:.0f} MB, "
        f"{1e3 * SENT * rows / WIRE:.0f} ms at {WIRE / 1e9:g} GB/s; all of them together take "
        f"{ranks * cpu:,.0f} s of CPU. If one decides: {1e3 * cpu:.0f} ms on that one, which the others "
        f"wait for, and {1e3 * (SENT + PLAN) * rows / WIRE:.0f} ms in and out of it"
    )


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
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
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

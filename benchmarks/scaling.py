"""Bytes per rollout on the wire, and what more processes cost: ranks that share a batch, Ray, TransferQueue.

    python benchmarks/scaling.py ranks [--processes 2 4 8] [--rollouts 8192] [--rounds 5]
    python benchmarks/scaling.py ray   [--processes 2 4 8] [--rollouts 2048] [--tokens 512]
    python benchmarks/scaling.py queue [--processes 2 4 8] [--rollouts 2048] [--tokens 512]

`--rollouts` is per process. Wall time, and for ranks the CPU time of one: more processes than cores wait for
a core, which the wall time has and the CPU time has not. `docs/scaling.md` says what it means.
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

from headrace.pipeline import RayAssembler, RolloutQueue, assembled, load_pipeline
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


def measure_ranks(options: argparse.Namespace, processes: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = torch.multiprocessing.start_processes
    start(run_rank, (options, processes, port), processes, start_method="spawn")


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
    parser.add_argument("what", choices=["ranks", "ray", "queue"])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rollouts", type=int, help="of each process")
    for option, default in (("rounds", 5), ("tokens", 512)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    options.rollouts = options.rollouts or {"ranks": 8192}.get(options.what, 2048)
    torch.set_num_threads(1)
    if options.what == "ranks":
        for processes in options.processes:
            measure_ranks(options, processes)
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

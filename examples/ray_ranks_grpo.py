"""GRPO on several ranks, which take their groups from one assembler on Ray.

    pip install "headrace[ray]"
    python examples/ray_ranks_grpo.py --ranks 2

Ranks are tasks of Ray, like the writers. Each rank takes the groups that are whole when it asks. The rows
come from the nodes of their writers, and pass through no other rank.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import ray
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import RayAssembler, RepeatSampler, load_pipeline, on_every_rank, optimise
from headrace.pipeline.reverse import DigitPolicy, ReverseEnv

GROUP_SIZE, PROMPTS = 8, 8  # rollouts of a group, groups of a step


@ray.remote(num_cpus=0)
class Weights:
    """The newest weights."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = weights

    def set(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def get(self) -> dict[str, torch.Tensor]:
        return self.weights


@ray.remote(max_retries=0)  # a restarted task would send its rows twice, and they are refused
def collect(
    writer: int, writers: int, assembler: RayAssembler, weights: ray.actor.ActorHandle, batches: int
) -> None:
    """Collect this writer's share of the prompts, in batches that end in the middle of rollouts."""
    torch.set_num_threads(1)
    torch.manual_seed(writer)
    sampler = RepeatSampler(
        1110,
        group_size=GROUP_SIZE,
        prompts_per_batch=PROMPTS,
        remainder="drop",
        rank=writer,
        ranks=writers,
    )
    env, policy = ReverseEnv(sampler), DigitPolicy()
    collector = Collector(
        env,
        policy,
        frames_per_batch=env.frames_per_batch // 2,  # one of the two turns of each slot
        total_frames=env.frames_per_batch * batches,
        auto_register_policy_transforms=False,
    )
    policy.load_state_dict(ray.get(weights.get.remote()))
    for rows in collector:
        assembler.put(rows)
        policy.load_state_dict(ray.get(weights.get.remote()))
    collector.shutdown()


@ray.remote(num_cpus=0, max_retries=0)
def train(
    rank: int, ranks: int, store: str, assembler: RayAssembler, writers: list[Any], weights: Any
) -> tuple[list[TensorDict], dict[str, torch.Tensor]]:
    """Train one rank. Return the rank's rows of each step, with their advantages, and the weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    policy = DigitPolicy()
    policy.load_state_dict(ray.get(weights.get.remote()))  # the same on all ranks
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    pipeline = load_pipeline("grpo", reward="sum", process_group="world")
    trained = []
    for step, batch in enumerate(on_every_rank(assembler.batches(writers, patience=300))):
        run = pipeline.run(batch)
        optimise(run.minibatches(), loss, optimizer, max_grad_norm=1.0, process_group="world")
        if rank == 0:
            weights.set.remote(policy.state_dict())
        print(f"step {step}: trained {len(run.batch)} rows", flush=True)
        trained.append(run.batch)
    dist.destroy_process_group()
    return trained, policy.state_dict()


def main(batches: int = 20, writers: int = 2, ranks: int = 2) -> list[tuple[list[TensorDict], Any]]:
    """Start the assembler, the writers and the ranks, and wait for the ranks."""
    torch.manual_seed(0)
    assembler = RayAssembler(groups=PROMPTS // ranks)  # groups that one rank takes
    weights = Weights.remote(DigitPolicy().state_dict())
    tasks = [collect.remote(writer, writers, assembler, weights, batches) for writer in range(writers)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"  # with several nodes: an address of rank 0's
    found = ray.get([train.remote(rank, ranks, store, assembler, tasks, weights) for rank in range(ranks)])
    assembler.shutdown()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on several ranks with writers on Ray")
    parser.add_argument("--batches", type=int, default=20, help="batches of each writer")
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    ray.init()
    main(options.batches, options.writers, options.ranks)

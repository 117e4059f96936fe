"""GRPO with TransferQueue between producers, the pipeline and the ranks that train.

    pip install "headrace[tq]"
    python examples/transfer_queue_grpo.py --batches 20

Producers put rows as they finish. One process gets only the few columns that it needs to make whole groups
and run the pipeline. It tells each rank its rows of each optimiser step, and the rank fetches these rows from
the queue's storage. Gradients are summed over the ranks. The first rank publishes the weights for the
producers.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import ray
import torch
import torch.distributed as dist
import transfer_queue
from torchrl.collectors import Collector
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import RepeatSampler, RolloutQueue, StepQueue, assembled, load_pipeline, optimise
from headrace.pipeline.reverse import DigitPolicy, ReverseEnv
from headrace.transforms import GroupAssembler

GROUP_SIZE, PROMPTS, RANKS = 8, 8, 2
# TransferQueue's actors reserve CPUs of Ray, but hardly compute.
CPUS = 16


def initial_policy() -> DigitPolicy:
    """Make the policy that all processes start with."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return DigitPolicy()


@ray.remote(num_cpus=0)
class Weights:
    """The newest weights."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = initial_policy().state_dict()

    def set(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def get(self) -> dict[str, torch.Tensor]:
        return self.weights


@ray.remote(max_retries=0)
def produce(producer: int, producers: int, queue: RolloutQueue, weights: Any, batches: int) -> None:
    """Collect this producer's share of the prompts, in batches that end in the middle of rollouts."""
    policy = initial_policy()
    torch.manual_seed(producer)
    sampler = RepeatSampler(
        1110,
        group_size=GROUP_SIZE,
        prompts_per_batch=PROMPTS,
        remainder="drop",
        rank=producer,
        ranks=producers,
    )
    env = ReverseEnv(sampler)
    collector = Collector(
        env,
        policy,
        frames_per_batch=env.frames_per_batch // 2,  # one of the two turns of each slot
        total_frames=env.frames_per_batch * batches,
        auto_register_policy_transforms=False,
    )
    for rows in collector:
        queue.put(rows)
        policy.load_state_dict(ray.get(weights.get.remote()))
    queue.end()
    collector.shutdown()


@ray.remote(max_retries=0)
def train(rank: int, queue: StepQueue, weights: Any, port: int) -> tuple[int, int]:
    """Train on this rank's rows of each step. Return the numbers of the rank's steps and rows."""
    policy, rows = initial_policy(), 0
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    steps = 0
    for minibatch in queue.minibatches(rank, patience=300):
        rows += len(minibatch)
        steps += optimise([minibatch], loss, optimizer, max_grad_norm=1.0, process_group="world")
        if rank == 0:
            weights.set.remote(policy.state_dict())
    dist.destroy_process_group()
    return steps, rows


def main(batches: int = 20, producers: int = 2) -> tuple[list[float], list[tuple[int, int]]]:
    """Run all processes. Return each batch's mean reward, and each rank's numbers of steps and rows."""
    weights, assembler = Weights.remote(), GroupAssembler(groups=PROMPTS)
    pipeline = load_pipeline(
        "pipeline=grpo",
        "pipeline.stages.collapse.reward=sum",
        "pipeline.stages.split.minibatches=2",
        f"pipeline.stages.split.ranks={RANKS}",
    )
    source = RolloutQueue("rollouts", producers=producers, decided_by=[assembler, pipeline])
    steps = StepQueue("steps", ranks=RANKS, max_steps=2, rollouts="rollouts")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = [produce.remote(each, producers, source, weights, batches) for each in range(producers)]
    ranks = [train.remote(rank, steps, weights, port) for rank in range(RANKS)]
    rewards = []
    for batch in assembled(source, assembler, patience=300):
        run = pipeline.run(batch)
        steps.put(run.minibatches(), patience=300)
        source.keep_only(assembler, pipeline, steps)
        rewards.append(run.metrics["collapse/reward_mean"])
        print(
            f"batch {len(rewards)}: reward {rewards[-1]:.3f}, {run.metrics['rows/trained']:.0f} rows",
            flush=True,
        )
    steps.end()
    ray.get(tasks)
    return rewards, ray.get(ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO through TransferQueue")
    parser.add_argument("--batches", type=int, default=20, help="batches of each producer")
    options = parser.parse_args()
    ray.init(num_cpus=CPUS, log_to_driver=False)
    transfer_queue.init()
    for rank, (steps, rows) in enumerate(main(options.batches)[1]):
        print(f"rank {rank}: {steps} optimiser steps on {rows} rows")
    transfer_queue.close()

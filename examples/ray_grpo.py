"""GRPO with rollouts from several processes of Ray, which come as they come.

    pip install "headrace[ray]"
    python examples/ray_grpo.py --batches 60

Each writer collects by itself, and the assembler's actor makes whole groups of what arrives: a collector's
batches end in the middle of rollouts, and the writers are not in step. Before each batch they look for newer
weights. They are at most a few groups ahead, since they wait while `max_ready` whole groups are there that
nobody took.
"""

from __future__ import annotations

import argparse

import ray
import torch
from torchrl.collectors import Collector
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import RayAssembler, RepeatSampler, load_pipeline, optimise
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


@ray.remote(max_retries=0)  # one that Ray began anew would send its rows twice, and be refused
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


def main(batches: int = 60, writers: int = 2) -> list[float]:
    """Train and print; returns the mean reward of each step."""
    torch.manual_seed(0)
    policy = DigitPolicy()
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    pipeline = load_pipeline(
        "pipeline=grpo", "pipeline.stages.collapse.reward=sum", "pipeline.stages.split.minibatches=2"
    )
    assembler = RayAssembler(groups=PROMPTS)
    weights = Weights.remote(policy.state_dict())
    tasks = [collect.remote(writer, writers, assembler, weights, batches) for writer in range(writers)]
    rewards = []
    for step, batch in enumerate(assembler.batches(tasks, patience=300)):
        run = pipeline.run(batch, epochs=2)
        optimise(run.minibatches(), loss, optimizer, max_grad_norm=1.0)
        weights.set.remote(policy.state_dict())
        rewards.append(run.metrics["collapse/reward_mean"])
        print(
            f"step {step}: reward {rewards[-1]:.3f}, trained {run.metrics['rows/trained']:.0f} rows",
            flush=True,
        )
    assembler.shutdown()
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO with several writers on Ray")
    parser.add_argument("--batches", type=int, default=60, help="batches of each writer")
    parser.add_argument("--writers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small to share
    ray.init(log_to_driver=False)
    main(options.batches, options.writers)

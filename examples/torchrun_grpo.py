"""GRPO on several processes, with the same weights as on one process.

    torchrun --nproc-per-node 2 examples/torchrun_grpo.py
    python examples/torchrun_grpo.py

Two workers each generate one half of each group. Either two processes run one worker each, or one process
runs both. Groups have rollouts on both processes. Advantages are equal bit for bit, because means and
denominators cover all ranks. Gradients are summed, and differ only by rounding.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import RepeatSampler, load_pipeline, optimise
from headrace.pipeline.reverse import DigitPolicy, digits

WORKERS, GROUP_SIZE, PROMPTS = 2, 8, 8


def roll_out(draws: TensorDict, worker: int, policy: DigitPolicy) -> TensorDict:
    """Generate a worker's half of each group: every second rollout."""
    rows = draws[worker::WORKERS]
    torch.manual_seed(int(rows["rollout_id"][0]))  # a seed of its own for each worker
    rows["tokens", "prompt"] = digits.prompts()[rows["prompt"]]
    rows = policy(rows)
    reward = digits.graded(rows["tokens", "response"], digits.answers()[rows["prompt"]])
    rows["next", "reward"], rows["next", "done"] = reward, torch.ones_like(reward).bool()
    return rows


def main(steps: int = 10, out: str | None = None) -> None:
    """Train, and save each rollout's advantage by its id, and the weights."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    words, group = ["pipeline=grpo", "pipeline.stages.split.minibatches=1"], None
    if world > 1:
        dist.init_process_group("gloo")
        group = "world"
        words += ["pipeline.process_group=world", "pipeline.shared_ids=same"]
    pipeline = load_pipeline(*words)
    torch.manual_seed(0)
    policy = DigitPolicy()
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    sampler = RepeatSampler(1110, group_size=GROUP_SIZE, prompts_per_batch=PROMPTS, remainder="drop")
    advantages: dict[int, float] = {}
    for step, draws in zip(range(steps), sampler.draws(), strict=False):
        parts = [roll_out(draws, worker, policy) for worker in range(rank, WORKERS, world)]
        run = pipeline.run(torch.cat(parts))
        optimise(run.minibatches(), loss, optimizer, max_grad_norm=1.0, process_group=group)
        batch = run.batch
        advantages |= zip(batch["rollout_id"].tolist(), batch["advantage"].flatten().tolist(), strict=True)
        reward = batch["next", "reward"].mean()
        print(f"rank {rank}, step {step}: trained {len(batch)} rows, reward {reward:.3f}", flush=True)
    if out is not None:
        torch.save({"advantages": advantages, "weights": policy.state_dict()}, Path(out) / f"{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on several processes, with the same weights as on one")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", help="folder for the advantages and weights")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow down so small a model
    main(options.steps, options.out)

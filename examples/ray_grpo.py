"""GRPO with rollouts from tasks of Ray, which may end in any order.

    pip install "headrace[ray]"
    python examples/ray_grpo.py --steps 60

The stream says which prompts may be sent now. A task generates the rollouts of a prompt, with the newest
weights, and puts them into the stream's assembler, which is an actor of Ray. The trainer takes whole groups.
"""

from __future__ import annotations

import argparse
import threading

import ray
import torch
from tensordict import TensorDict
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import RayAssembler, RepeatSampler, RolloutStream, load_pipeline, optimise
from headrace.pipeline.reverse import DigitPolicy, ReverseEnv

GROUP_SIZE, PROMPTS = 8, 8  # rollouts of a group, groups of a step


@ray.remote(max_retries=0)  # a restarted task would send its rows twice, and they are refused
def generate(assembler: RayAssembler, draws: TensorDict, weights: dict[str, torch.Tensor]) -> None:
    """Generate the rollouts of a group. A rollout has one or two turns."""
    torch.set_num_threads(1)
    torch.manual_seed(int(draws["group_id"][0]))
    env = ReverseEnv(RepeatSampler(1, group_size=GROUP_SIZE), draws=iter([draws]))
    policy = DigitPolicy()
    policy.load_state_dict(weights)
    assembler.put(env.rollout(2, policy, break_when_any_done=False))


def main(steps: int = 60) -> list[float]:
    """Train and print. Return the mean reward of each step."""
    torch.manual_seed(0)
    policy = DigitPolicy()
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    pipeline = load_pipeline("grpo", reward="sum", minibatches=2)
    sampler = RepeatSampler(PROMPTS * steps, group_size=GROUP_SIZE, prompts_per_batch=PROMPTS)
    stream = RolloutStream(sampler, assembler=RayAssembler, steps_ahead=1, epochs=1, patience=300)
    weights = [ray.put(policy.state_dict())]  # a reference to the newest weights

    def dispatch() -> None:
        for draws in stream.draws(wait=True):
            groups = draws.split(GROUP_SIZE)
            stream.watch(*(generate.remote(stream.assembler, group, weights[0]) for group in groups))

    threading.Thread(target=dispatch, daemon=True).start()
    rewards = []
    for step, batch in enumerate(stream):
        run = pipeline.run(batch, epochs=2)
        optimise(run.minibatches(), loss, optimizer, max_grad_norm=1.0)
        weights[0] = ray.put(policy.state_dict())
        stream.version = step + 1
        rewards.append(run.metrics["collapse/reward_mean"])
        print(
            f"step {step}: reward {rewards[-1]:.3f}, trained {run.metrics['rows/trained']:.0f} rows",
            flush=True,
        )
    stream.assembler.shutdown()
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO with tasks of Ray that generate")
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # more threads slow down so small a model
    ray.init(log_to_driver=False)
    main(steps)

"""GRPO in a plain PyTorch loop, without TorchRL: python examples/pytorch_grpo.py

A network of 8,400 weights learns to repeat a digit: for (7, 3) it should make the tokens 7, 7, 7 and END. Its
mean reward rises from 0.1 to above 0.95 in three seconds on one CPU thread.
"""

import argparse

import torch
from torch import nn
from torch.distributions import Categorical

import headrace

PROMPTS, GROUP_SIZE, END = 16, 8, 10


def logits_of(policy, prompts):  # (N, 4, 11): the logits of each token of a response
    return policy(nn.functional.one_hot(prompts, 10).flatten(1).float()).view(-1, 4, 11)


def grade(prompts, responses, mask):  # (N,): the share of right tokens
    digit, times = prompts[:, :1], prompts[:, 1:]
    right = responses == torch.where(torch.arange(4) < times, digit, END)
    return (right & mask).sum(1) / torch.maximum(mask.sum(1), times[:, 0] + 1)


def train(steps, seed=0):
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 44))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    rollout_id = torch.arange(PROMPTS * GROUP_SIZE)
    group_id = rollout_id // GROUP_SIZE
    for step in range(steps):
        # 1. Collect GROUP_SIZE responses to each prompt, and grade them.
        prompts = torch.stack([torch.randint(10, (PROMPTS,)), torch.randint(1, 4, (PROMPTS,))], 1)[group_id]
        with torch.no_grad():
            sampler = Categorical(logits=logits_of(policy, prompts))
            responses = sampler.sample()
            old = sampler.log_prob(responses)
        ended = (responses == END).int()
        mask = ended.cumsum(1) - ended == 0  # True up to the first END, which trains too
        reward = grade(prompts, responses, mask)
        # 2. Decide which rows train, with which advantage and weight, in which optimiser step.
        columns = {"group_id": group_id, "rollout_id": rollout_id, "reward": reward, "tokens": mask.sum(1)}
        decision = headrace.decide(columns, "grpo", group_size=GROUP_SIZE, minibatches=2, seed=step)
        # 3. Train. The weights of the tokens of an optimiser step add up to 1, so their sum is the mean.
        for rows in decision.steps:
            if not decision.keep[rows].any():
                continue  # with a gradient of 0, Adam would still move the weights
            new = Categorical(logits=logits_of(policy, prompts[rows])).log_prob(responses[rows])
            ratio, advantage = (new - old[rows]).exp(), decision.advantage[rows, None]
            token_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            weight = decision.loss_weight[rows, None] * mask[rows]
            optimizer.zero_grad()
            (weight * token_loss).sum().backward()
            optimizer.step()
        yield reward.mean().item(), decision


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads slow down so small a network
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    for step, (reward, decision) in enumerate(train(parser.parse_args().steps)):
        if step % 20 == 0:
            print(f"step {step}: reward {reward:.3f}, {decision.ledger}", flush=True)

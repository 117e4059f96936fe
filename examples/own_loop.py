"""A complete training loop without a trainer: python examples/own_loop.py run --steps 120

A thread generates rollouts with a copy of the policy that may be some steps old. The loop trains on
complete groups whose rewards differ, corrects for the age of the copy, and writes a report and numbers. If it
is killed, the same command goes on after the last saved step. A network of 8,400 weights learns to repeat a
digit, as in pytorch_grpo.py. In a minute on one CPU thread, the mean reward of the batches rises from below
0.2 to 0.8.
"""

import argparse
import copy
import json
import threading
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical

import headrace
from headrace.pipeline import Checkpoint, RepeatSampler, RolloutStream

END = 10
PROMPTS = [(digit, times) for digit in range(10) for times in (1, 2, 3)]  # repeat digit this often
MASK, SAMPLED, OLD = ("masks", "all_assistant_mask"), ("log_probs", "full"), ("old_log_probs", "full")


def distribution(policy, prompts):  # the distribution of the four tokens of a response, (N, 4)
    digit, times = torch.tensor([PROMPTS[prompt] for prompt in prompts.tolist()]).T
    both = [nn.functional.one_hot(each, 10).float() for each in (digit, times)]
    return Categorical(logits=policy(torch.cat(both, 1)).view(-1, 4, 11))


def grade(prompts, tokens, mask):  # (N,): the share of right tokens
    digit, times = torch.tensor([PROMPTS[prompt] for prompt in prompts.tolist()]).T[:, :, None]
    right = tokens == torch.where(torch.arange(4) < times, digit, END)
    return (right & mask).sum(1) / torch.maximum(mask.sum(1), times[:, 0] + 1)


class Sampler:
    """The copy of the policy that generates, and the version of its weights."""

    def __init__(self, policy):
        self.lock, self.policy, self.version = threading.Lock(), copy.deepcopy(policy), 0

    def update(self, policy, version):
        with self.lock:
            self.policy.load_state_dict(policy.state_dict())
            self.version = version

    @torch.no_grad()
    def generate(self, rows):
        """Generate and grade: add to the rows of prompts what an engine and a grader would add."""
        with self.lock:
            sampler = distribution(self.policy, rows["prompt"])
            rows["next", "policy_version"] = torch.full((len(rows),), self.version)
        tokens = sampler.sample()
        ended = (tokens == END).int()
        rows["tokens", "full"], rows[MASK] = tokens, ended.cumsum(1) - ended == 0  # True up to the first END
        rows[SAMPLED] = sampler.log_prob(tokens)  # μ: the policy that sampled
        rows["next", "reward"] = grade(rows["prompt"], tokens, rows[MASK])
        rows["next", "done"] = torch.ones(len(rows), dtype=torch.bool)
        return rows


class NumbersFile:
    """A logger. A logger is any object with log_scalar, such as TorchRL's WandbLogger."""

    def __init__(self, path):
        self.path = path

    def log_scalar(self, name, value, step):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, name: value}) + "\n")


def loss_of(
    policy, rows
):  # Σ loss_weight · mask · token loss, which is the mean over the tokens of the optimiser step
    log_probs = distribution(policy, rows["prompt"]).log_prob(rows["tokens", "full"])
    ratio = (log_probs - rows[OLD]).exp()  # relative to π_old, because the advantage has the factor π_old / μ
    advantage = rows["advantage"].flatten(1)
    token_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (rows["loss_weight"][:, None] * rows[MASK] * token_loss).sum()


def train(path, steps, seed=0):
    path = Path(path)
    path.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    # 1. Construct all parts, as at the first start.
    policy = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 44))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    prompts = RepeatSampler(len(PROMPTS), group_size=8, prompts_per_batch=8, seed=seed, remainder="drop")
    options = {"steps_ahead": 1, "max_staleness": 2, "journal": path / "journal"}
    stream = RolloutStream(prompts, informative=True, **options)  # groups whose rewards differ
    pipeline = headrace.load_pipeline("tis", minibatches=2, masked_log_prob="keep")
    states = {"policy": policy, "optimizer": optimizer, "pipeline": pipeline}
    checkpoint = Checkpoint(path / "saved", stream=stream, **states)
    report = headrace.ReportFolder(path, title="tis", existing="resume")
    numbers = NumbersFile(path / "numbers.jsonl")
    # 2. Load the last saved step, before anything is dispatched.
    begun = checkpoint.load() or 0
    sampler = Sampler(policy)
    sampler.version = stream.version  # the version of the loaded weights

    # 3. Generate in a thread. draws() waits while no rollouts may be dispatched.
    writer = Future()

    def generate():
        try:
            for rows in stream.draws(wait=True):
                stream.put(sampler.generate(rows))
        except BaseException as error:
            writer.set_exception(error)

    stream.watch(writer)  # the loop below raises if the thread has raised
    threading.Thread(target=generate, daemon=True).start()
    # 4. Train.
    with report:
        for step, batch in enumerate(stream, start=begun + 1):
            if step > steps:
                break
            with torch.no_grad():  # π_old: the policy that trains, before the step
                batch[OLD] = distribution(policy, batch["prompt"]).log_prob(batch["tokens", "full"])
            run = pipeline.run(batch)
            for minibatch in run.minibatches():
                optimizer.zero_grad()
                loss_of(policy, minibatch).backward()
                optimizer.step()
            stream.version = step  # before the thread gets the weights
            sampler.update(policy, step)
            # 5. Report the step and save it. After a crash, a step that is not saved is trained again.
            texts = {
                "prompt": [f"{digit} × {times}" for digit, times in (PROMPTS[i] for i in batch["prompt"])]
            }
            texts["response"] = [" ".join(map(str, row)) for row in batch["tokens", "full"].tolist()]
            made = headrace.make_report(run, step=step, batch=batch, texts=texts)
            report.add(made)
            headrace.log_report(numbers, made)
            checkpoint.save(step)
            yield step, batch, run


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads slow down so small a network
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    for step, batch, run in train(arguments.folder, arguments.steps):
        if step % 10 == 0:
            reward, weight = float(batch["next", "reward"].mean()), run.metrics["correction/weight_max_token"]
            print(f"step {step}: reward {reward:.3f}, largest importance weight {weight:.2f}", flush=True)

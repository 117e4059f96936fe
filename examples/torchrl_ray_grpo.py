"""TorchRL's asynchronous GRPO recipe on Ray, with headrace: python examples/torchrl_ray_grpo.py --steps 30

Collectors write into a replay buffer, each in an actor of its own, and the trainer samples from it, as in
sota-implementations/grpo/grpo-async.py of TorchRL at 0039d5c. Lines that headrace changes or adds end with
`# headrace`. The model is small and made in memory. Collectors ask an actor for the newest weights, whereas
the recipe sends them to vLLM.
"""

import argparse
import functools
import itertools
import random
import time

import ray
import torch
from llm_grpo import PositionsRight, make_model, make_tokenizer
from tensordict import NonTensorStack, TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, RayReplayBuffer
from torchrl.envs import InitTracker, StepCounter
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import StampIds, buffer_account, groups_on_write  # headrace

GROUP_SIZE, FULL = 8, ("log_probs", "full")


@ray.remote(num_cpus=0)
class Weights:
    """The newest weights."""

    def __init__(self, weights):
        self.weights = weights

    def set(self, weights):
        self.weights = weights

    def get(self):
        return self.weights


def make_env(worker, workers, num_envs, seed):
    """Make an environment with the prompts of this collector, each GROUP_SIZE times in a row."""
    torch.set_num_threads(1)
    rng, tokenizer = random.Random(seed + worker), make_tokenizer()
    queries = ("".join(rng.choices("0123456789", k=rng.randint(1, 3))) for _ in itertools.count())
    rows = (TensorDict(query=NonTensorStack(*[q] * GROUP_SIZE), batch_size=[GROUP_SIZE]) for q in queries)
    chat = {"input_mode": "text", "template_kwargs": {"chat_template": "={{ messages[0]['content'] }}="}}
    env = DatasetChatEnv.from_dataloader(rows, batch_size=(num_envs,), tokenizer=tokenizer, **chat)
    env.append_transform(StampIds(repeats=GROUP_SIZE, worker=worker, workers=workers))  # headrace
    for transform in (InitTracker(), StepCounter(max_steps=1), PositionsRight()):
        env.append_transform(transform)
    return env


def make_actor(model):
    """Make an actor for the log-probabilities that TransformersWrapper does not give when it samples."""
    reads = {"input_mode": "tokens", "input_key": ("tokens", "full"), "generate": False}
    return TransformersWrapper(model, tokenizer=make_tokenizer(), return_log_probs=True, **reads)


class Policy(TensorDictModuleBase):
    """Take the newest weights, sample responses, and write their log-probabilities."""

    def __init__(self, weights, seed):
        super().__init__()
        tokenizer = make_tokenizer()
        self.weights, self.model = weights, make_model(tokenizer, seed)
        sampling = {"max_new_tokens": 4, "do_sample": True, "bad_words_ids": [[tokenizer.pad_token_id]]}
        writes = {"input_mode": "text", "generate_kwargs": sampling, "return_log_probs": False}
        self.sample = TransformersWrapper(self.model, tokenizer=tokenizer, **writes)
        self.score = make_actor(self.model)
        self.in_keys, self.out_keys = self.sample.in_keys, [*self.sample.out_keys, FULL]

    def forward(self, prompts):
        self.model.load_state_dict(ray.get(self.weights.get.remote()))
        rows = self.sample(prompts)
        with torch.no_grad():
            scored = self.score(rows.select("tokens", "masks").copy())
        for row, log_probs in zip(rows.unbind(0), scored.get(FULL, as_list=True), strict=True):
            row.set(FULL, log_probs)
        return rows


def train(*, steps, collectors=2, seed=0, num_envs=16, batch_size=32, storage_size=256):
    """Yield the mean reward, the loss and the buffer's account at each step."""
    torch.manual_seed(seed)
    model = make_model(make_tokenizer(), seed)
    loss = GRPOLoss(make_actor(model), masking_strategy="sft", entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    weights = Weights.remote(model.state_dict())
    buffer = RayReplayBuffer(
        storage=functools.partial(LazyStackStorage, storage_size),
        transform_factory=functools.partial(groups_on_write, "grpo", worker_patience=120),  # headrace
        batch_size=batch_size,
        remote_config={"num_cpus": 0},
    )
    workers = [
        RayLLMCollector(
            env=functools.partial(make_env, worker, collectors, num_envs, seed),
            policy_factory=functools.partial(Policy, weights, seed),
            dialog_turns_per_batch=num_envs,
            replay_buffer=buffer.client(),
            remote_config={"num_cpus": 0},
        )
        for worker in range(collectors)
    ]
    for worker in workers:
        worker.start()
    try:
        while len(buffer) < batch_size:
            if error := buffer_account(buffer).error:  # headrace
                raise RuntimeError(error)  # headrace
            time.sleep(0.1)
        for _ in range(steps):
            batch = buffer.sample(batch_size)
            value = loss(batch).loss_objective
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            weights.set.remote(model.state_dict())
            account = buffer_account(buffer)  # headrace
            yield float(batch["next", "reward"].mean()), float(value.detach()), account
    finally:
        for worker in workers:
            worker.shutdown()
        buffer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--collectors", type=int, default=2)
    torch.set_num_threads(1)  # more threads slow down so small a model
    ray.init(log_to_driver=False)
    for step, (reward, _, account) in enumerate(train(**vars(parser.parse_args()))):
        waiting = f"{account.held} rows wait, {account.counts['lost']} were lost"
        print(f"step {step}: reward {reward:.3f}, {account.emitted} groups written, {waiting}", flush=True)

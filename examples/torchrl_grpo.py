"""TorchRL's GRPO recipe with headrace in it: python examples/torchrl_grpo.py --turns 2

Five lines differ from torchrl_mcadvantage.py, which uses MCAdvantage: two imports, the ids of rollouts, the
transform of the buffer, and the assembler around the collector.
"""

import argparse
import itertools
import random

import torch
from llm_grpo import PositionsRight, make_model, make_tokenizer
from tensordict import NonTensorStack, TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import InitTracker, StepCounter
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import assembled, load_pipeline
from headrace.transforms import GroupAssembler

GROUP_SIZE = 8
FULL = ("tokens", "full"), ("log_probs", "full")


def prompts(rng):
    for group in itertools.count():
        query = "".join(rng.choices("0123456789", k=rng.randint(1, 3)))
        rows = torch.arange(GROUP_SIZE * group, GROUP_SIZE * (group + 1))
        ids = {"group_id": rows // GROUP_SIZE, "rollout_id": rows}
        yield TensorDict(ids, [GROUP_SIZE]).set("query", NonTensorStack(*[query] * GROUP_SIZE))


def make_scorer(actor):
    """Compute log-probabilities of all tokens, which TransformersWrapper does not give when it generates."""

    def score(rows):
        rows = rows.reshape(-1)
        with torch.no_grad():
            scored = actor(rows.select("tokens", "masks").copy())
        for row, log_probs in zip(rows.unbind(0), scored.get(FULL[1], as_list=True), strict=True):
            row.set(FULL[1], log_probs)
        return rows

    return score


def train(*, steps, turns=1, seed=0, num_envs=32, dialog_turns_per_batch=64, batch_size=32, epochs=2):
    """Yield the mean reward and the loss after each step."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model, inference_model = make_model(tokenizer, seed), make_model(tokenizer, seed)
    chat = {"input_mode": "text", "template_kwargs": {"chat_template": "={{ messages[0]['content'] }}="}}
    source = prompts(random.Random(seed))
    env = DatasetChatEnv.from_dataloader(source, batch_size=(num_envs,), tokenizer=tokenizer, **chat)
    for transform in (InitTracker(), StepCounter(max_steps=turns), PositionsRight()):
        env.append_transform(transform)

    sampling = {"max_new_tokens": 4, "do_sample": True, "bad_words_ids": [[tokenizer.pad_token_id]]}
    writes = {"input_mode": "text", "generate_kwargs": sampling, "return_log_probs": False}
    reads = {"input_mode": "tokens", "input_key": FULL[0], "generate": False, "return_log_probs": True}
    policy = TransformersWrapper(inference_model, tokenizer=tokenizer, **writes)
    actor = TransformersWrapper(model, tokenizer=tokenizer, **reads)
    loss = GRPOLoss(actor, masking_strategy="sft", entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)

    storage, sampler = LazyStackStorage(100 * dialog_turns_per_batch), SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    buffer.append_transform(load_pipeline("pipeline.stages.collapse.reward=sum").halves()[0], invert=True)
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=dialog_turns_per_batch,
        yield_completed_trajectories=True,
        postproc=make_scorer(actor),
    )
    for rows in assembled(collector, GroupAssembler(group_size=GROUP_SIZE)):
        buffer.extend(rows)
        if len(buffer) < dialog_turns_per_batch:  # groups are written when they are complete
            continue
        for _ in range(epochs):
            for batch in buffer:
                value = loss(batch).loss_objective
                value.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        yield float(rows["next", "reward"].mean()), float(value.detach())
        buffer.empty()
        inference_model.load_state_dict(model.state_dict())
        if (steps := steps - 1) == 0:
            break
    collector.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=1)
    torch.set_num_threads(1)  # more threads slow down so small a model
    for step, (reward, _) in enumerate(train(**vars(parser.parse_args()))):
        print(f"step {step}: reward {reward:.3f}", flush=True)

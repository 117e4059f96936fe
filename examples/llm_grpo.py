"""GRPO on a language model behind TorchRL's LLMCollector: python examples/llm_grpo.py --steps 60

A Llama of 133,000 weights learns to reverse strings of one to three digits from a graded reward. On one CPU
thread, the mean reward rises from below 0.1 to about 0.7 in a minute. `draws()` gives ids to drawn prompts.
"""

import argparse
import random

import torch
from tensordict import NonTensorStack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import InitTracker, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.pipeline import RepeatSampler, load_pipeline, optimise
from headrace.transforms import split_minibatches


def make_tokenizer():  # padding has a token of its own, because wrappers remove this token everywhere
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate("_$=0123456789")}))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_", eos_token="$")


def make_model(tokenizer, seed):
    torch.manual_seed(seed)
    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **size, **ids)).eval()


class PositionsRight(Transform):
    def _step(self, now, following):  # reward: the share of the answer's characters that are right
        pairs = zip(now["text"].response, now["query"], strict=True)
        right = [sum(map(str.__eq__, text, f"{query[::-1]}$")) / (len(query) + 1) for text, query in pairs]
        return following.set("reward", torch.tensor(right)[:, None, None])


def train(model, tokenizer, *, steps, seed=0, num_envs=128, rollouts_per_env=2, group_size=8):
    torch.manual_seed(seed)
    rng, turns = random.Random(seed), num_envs * rollouts_per_env
    strings = ["".join(rng.choices("0123456789", k=rng.randint(1, 3))) for _ in range(1024)]
    drawn = {"prompts_per_batch": num_envs // group_size, "remainder": "drop", "seed": seed}
    draws = RepeatSampler(strings, group_size=group_size, **drawn).draws()
    queries = (row.set("query", NonTensorStack(*(strings[i] for i in row["prompt"]))) for row in draws)
    chat = {"input_mode": "text", "template_kwargs": {"chat_template": "={{ messages[0]['content'] }}="}}
    env = DatasetChatEnv.from_dataloader(queries, batch_size=(num_envs,), tokenizer=tokenizer, **chat)
    for transform in (InitTracker(), StepCounter(max_steps=1), PositionsRight()):
        env.append_transform(transform)
    sampling = {"max_new_tokens": 4, "do_sample": True, "bad_words_ids": [[tokenizer.pad_token_id]]}
    writes = {"input_mode": "text", "generate_kwargs": sampling, "return_log_probs": False}
    reads = {"input_mode": "tokens", "input_key": ("tokens", "full"), "generate": False, "pad_output": True}
    policy, actor = (TransformersWrapper(model, tokenizer=tokenizer, **how) for how in (writes, reads))
    pad_id = f"pipeline.stages.dense.pad_id={tokenizer.pad_token_id}"
    pipeline = load_pipeline("pipeline=grpo", "rows=llm", pad_id, "pipeline.stages.split.minibatches=4")
    pipeline.stages["score"].actor = actor
    count = {"dialog_turns_per_batch": turns, "total_dialog_turns": turns * steps}
    collector = LLMCollector(env, policy=policy, postproc=pipeline, **count)
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    for batch in collector:
        for _ in range(2):
            optimise(split_minibatches(batch), loss, optimizer, max_grad_norm=1.0)
        yield batch, pipeline.metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # more threads slow down so small a model
    tokens = make_tokenizer()
    for step, (_, numbers) in enumerate(train(make_model(tokens, seed=0), tokens, steps=steps)):
        print(f"step {step}: reward {numbers['collapse/reward_mean']:.3f}", flush=True)

"""GRPO on a language model: the pipeline behind TorchRL's LLMCollector.

    pip install "headrace[llm]"
    python examples/llm_grpo.py --steps 60

A Llama of 133,000 weights, made in memory like its tokenizer, learns to reverse strings of one to three
digits from nothing but a graded reward. On one CPU thread the mean reward rises from below 0.1 to about 0.7
in a minute.

``RepeatSampler.draws()`` stamps the ids where prompts are drawn, and they travel with the rows through
TorchRL's environment and collector. ``LLMCollector(postproc=...)`` makes one dense batch of the ragged rows,
scores it and runs the recipe over it: what the collector yields is what GRPOLoss trains on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import InitTracker, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.pipeline import RepeatSampler, load_pipeline, optimise
from headrace.transforms import split_minibatches

DIGITS, MAX_LENGTH = "0123456789", 3
CHAT_TEMPLATE = "={{ messages[0]['content'] }}="
FULL, ASSISTANT = ("tokens", "full"), ("masks", "all_assistant_mask")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per digit, and `=`, which encloses what is to be reversed."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "=", *DIGITS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    # The wrappers take <pad> for padding wherever it stands: if it were <eos> too, no response would end.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def rollouts(sampler: RepeatSampler, strings: list[str]) -> Iterator[TensorDict]:
    """The data of the environment: a row per rollout, with its ids, its prompt and the right answer."""
    for draws in sampler.draws():
        words = [strings[i] for i in draws["prompt"].tolist()]
        draws["query"] = NonTensorStack(*words)
        draws["answer"] = NonTensorStack(*(word[::-1] for word in words))
        yield draws


class PositionsRight(Transform):
    """Reward a response by the fraction of the answer's tokens, <eos> included, that are in their places."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        super().__init__(in_keys=[], out_keys=["reward"])
        self.tokenizer = tokenizer

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = []
        responses = tensordict.get(("tokens", "response"), as_list=True)
        for response, answer in zip(responses, tensordict["answer"], strict=True):
            wanted = [*self.tokenizer(answer)["input_ids"], self.tokenizer.eos_token_id]
            right = sum(a == b for a, b in zip(response.tolist(), wanted, strict=False))
            rewards.append(right / len(wanted))
        return next_tensordict.set("reward", torch.tensor(rewards)[:, None])

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1))
        return reward_spec


def collate(rows: TensorDictBase, pad: int) -> TensorDict:
    """One dense left-padded batch ``[N]`` of the collector's ragged rows ``[envs, rollouts_per_env]``.

    Tokens are padded once, here, on the left, where prompts differ in length; masks mark the tokens.
    """
    rows = rows.reshape(-1)
    full = rows.get(FULL, as_padded_tensor=True, padding_side="left", padding_value=pad)

    def last_tokens(key: str) -> torch.Tensor:
        lengths = [len(tokens) for tokens in rows.get(("tokens", key), as_list=True)]
        return torch.arange(full.shape[1], 0, -1) <= torch.tensor(lengths)[:, None]

    wanted = ["group_id", "rollout_id", "expected_rollouts", ("next", "reward"), ("next", "done"), "is_init"]
    batch = rows.select(*wanted).contiguous()
    batch[FULL] = full
    batch["masks", "all_attention_mask"] = last_tokens("full")
    batch[ASSISTANT] = last_tokens("response")
    return batch


@torch.no_grad()
def score(batch: TensorDict, actor: TransformersWrapper) -> TensorDict:
    """Add the log-probabilities under the policy that sampled the batch.

    TransformersWrapper returns some when it generates, but with 0 for the first token of each response.
    """
    policy = actor.get_dist(batch, mask_key=ASSISTANT)
    return batch.set(("log_probs", "full"), policy.log_prob(batch[FULL]))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    seed: int,
    num_envs: int = 128,
    rollouts_per_env: int = 2,
    group_size: int = 8,
    minibatches: int = 4,
    epochs: int = 2,
) -> Iterator[tuple[TensorDict, dict[str, float]]]:
    """Train on ``num_envs · rollouts_per_env`` rollouts a step; after each, yield batch and pipeline metrics.

    The collector resets its environment once before it starts, which loses the first `num_envs` rollouts.
    They must be whole groups, so `num_envs` is a multiple of `group_size`; else the gate raises, and names
    the groups that are incomplete.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    strings = ["".join(rng.choices(DIGITS, k=rng.randint(1, MAX_LENGTH))) for _ in range(1024)]
    sampler = RepeatSampler(
        strings, group_size=group_size, prompts_per_batch=num_envs // group_size, remainder="drop", seed=seed
    )
    env = DatasetChatEnv.from_dataloader(  # without `repeats`: the sampler repeats prompts
        rollouts(sampler, strings),
        batch_size=(num_envs,),
        tokenizer=tokenizer,
        template_kwargs={"chat_template": CHAT_TEMPLATE},
        input_mode="text",
    )
    # The collector warns where its policy finds no InitTracker. One turn ends a rollout.
    for transform in (InitTracker(), StepCounter(max_steps=1), PositionsRight(tokenizer)):
        env.append_transform(transform)

    sampling = {
        "max_new_tokens": MAX_LENGTH + 1,
        "do_sample": True,
        "suppress_tokens": [tokenizer.pad_token_id],  # it would be a hole in the middle of a response
    }
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="text", generate_kwargs=sampling, return_log_probs=False
    )
    actor = TransformersWrapper(  # the same weights, for scoring and training
        model, tokenizer=tokenizer, input_mode="tokens", input_key=FULL, generate=False, pad_output=True
    )
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)

    pipeline = load_pipeline(
        "pipeline=grpo",
        f"pipeline.stages.split.minibatches={minibatches}",
        f"pipeline.stages.split.seed={seed}",
    )
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=num_envs * rollouts_per_env,
        total_dialog_turns=num_envs * rollouts_per_env * steps,
        postproc=lambda rows: pipeline(score(collate(rows, tokenizer.pad_token_id), actor)),
    )
    try:
        for batch in collector:
            for _ in range(epochs):
                optimise(split_minibatches(batch), loss, optimizer, max_grad_norm=1.0)
            yield batch, pipeline.metrics
    finally:
        collector.shutdown()


def main(steps: int = 60, seed: int = 0, **sizes: int) -> list[float]:
    """Train and print; returns the mean reward of each step. `sizes` are options of :func:`train`."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    rewards = []
    for step, (_, numbers) in enumerate(train(model, tokenizer, steps=steps, seed=seed, **sizes)):
        rewards.append(numbers["collapse/reward_mean"])
        print(
            f"step {step}: reward {rewards[-1]:.3f}, "
            f"trained {numbers['rows/trained']:.0f} of {numbers['rows/in']:.0f} rows, "
            f"{numbers['groups/trained']:.0f} of {numbers['groups/in']:.0f} groups",
            flush=True,
        )
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on a language model that learns to reverse digits")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small to share
    main(options.steps, options.seed)

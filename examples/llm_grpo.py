"""GRPO on a language model: the pipeline behind TorchRL's LLMCollector.

    pip install "headrace[llm]"
    python examples/llm_grpo.py --steps 60

A Llama of 130,000 weights learns to reverse strings of digits, from nothing but a graded reward. Model and
tokenizer are made in memory; nothing is downloaded. One CPU thread takes the mean reward from 0.1 to above
0.5 in about a minute.

What to look at: ids are stamped where prompts are drawn, by ``RepeatSampler.draws()``, and travel with the
rows through TorchRL's environment. The collector's ragged rows are collated and scored, and then the recipe
runs, all in ``LLMCollector(postproc=...)``. What the collector yields is ready for ``GRPOLoss``.
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

from headrace.pipeline import RepeatSampler, load_pipeline
from headrace.pipeline.optimise import optimise
from headrace.transforms import split_minibatches

MAX_DIGITS = 3
CHAT_TEMPLATE = "{{ messages[0]['content'] }}="


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per digit, and `=`, after which the answer is due."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "=", *"0123456789"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    # TransformersWrapper attends to what is not padding: were <pad> the <eos>, no row would end in one.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def rollouts(sampler: RepeatSampler, strings: list[str]) -> Iterator[TensorDict]:
    """What the environment loads: one row per rollout, its ids stamped where its prompt is drawn."""
    for draws in sampler.draws():
        digits = [strings[i] for i in draws["prompt"].tolist()]
        draws["query"] = NonTensorStack(*digits)
        draws["answer"] = NonTensorStack(*(word[::-1] for word in digits))
        yield draws


class PositionsRight(Transform):
    """Reward a response by the part of the answer's tokens, <eos> included, that it has in their places."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        super().__init__(in_keys=[], out_keys=["reward"])
        self.tokenizer = tokenizer

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        responses = tensordict.get(("tokens", "response"), as_list=True)
        rewards = []
        for response, answer in zip(responses, tensordict["answer"], strict=True):
            wanted = [*self.tokenizer(answer)["input_ids"], self.tokenizer.eos_token_id]
            right = sum(x == y for x, y in zip(response.tolist(), wanted, strict=False))
            rewards.append(right / len(wanted))
        return next_tensordict.set("reward", torch.tensor(rewards).view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def collate(rows: TensorDictBase, pad: int) -> TensorDict:
    """One dense batch ``[N]``, left-padded, of the collector's ragged rows ``[envs, turns]``.

    GRPOLoss pads ragged columns of ours on the wrong side, and a lazy stack costs ten times the model.
    """
    rows = rows.reshape(-1)
    full = rows.get(("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=pad)
    size, width = full.shape
    from_the_right = torch.arange(width, 0, -1)

    def last(key: str) -> torch.Tensor:
        lengths = [len(tokens) for tokens in rows.get(("tokens", key), as_list=True)]
        return from_the_right <= torch.tensor(lengths)[:, None]

    ids = {key: rows[key].view(size) for key in ("group_id", "rollout_id", "expected_rollouts")}
    return TensorDict(
        {
            "tokens": {"full": full},
            "masks": {"all_attention_mask": last("full"), "all_assistant_mask": last("response")},
            "next": {"reward": rows["next", "reward"].view(size, 1)},
            **ids,
        },
        batch_size=[size],
    )


@torch.no_grad()
def score(batch: TensorDict, actor: TransformersWrapper) -> TensorDict:
    """Add the log-probabilities under the policy that sampled.

    The wrapper that generates could return them, but its first response token always has a 0.
    """
    policy = actor.get_dist(batch, mask_key=("masks", "all_assistant_mask"))
    return batch.set(("log_probs", "full"), policy.log_prob(batch["tokens", "full"]))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    seed: int,
    num_envs: int = 128,
    turns: int = 2,
    group_size: int = 8,
    minibatches: int = 4,
    epochs: int = 2,
) -> Iterator[tuple[TensorDict, dict[str, float]]]:
    """Train, and yield each step's batch and the pipeline's metrics after training on it."""
    # The collector resets its environment once before the first step, and those `num_envs` rollouts are
    # lost. They must be whole groups: the gate raises for a group that has lost some of its rollouts.
    if num_envs % group_size:
        raise ValueError(f"num_envs must be a multiple of group_size; got {num_envs} and {group_size}")
    torch.manual_seed(seed)
    rng = random.Random(seed)
    strings = ["".join(rng.choices("0123456789", k=rng.randint(1, MAX_DIGITS))) for _ in range(1024)]
    sampler = RepeatSampler(
        strings, group_size=group_size, prompts_per_batch=num_envs // group_size, remainder="drop", seed=seed
    )
    # Without `repeats`: the sampler repeats prompts already, and knows which rollouts are one group.
    env = DatasetChatEnv.from_dataloader(
        rollouts(sampler, strings),
        batch_size=(num_envs,),
        tokenizer=tokenizer,
        template_kwargs={"chat_template": CHAT_TEMPLATE},
        input_mode="text",
    )
    env.append_transform(InitTracker())
    env.append_transform(StepCounter(max_steps=1))
    env.append_transform(PositionsRight(tokenizer))

    # A sampled <pad> would vanish from the attention mask in the middle of a response.
    sampling = {
        "max_new_tokens": MAX_DIGITS + 1,
        "do_sample": True,
        "suppress_tokens": [tokenizer.pad_token_id],
    }
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="text", generate_kwargs=sampling, return_log_probs=False
    )
    actor = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        input_key=("tokens", "full"),
        generate=False,
        pad_output=True,
    )
    pipeline = load_pipeline(
        "pipeline=grpo",
        f"pipeline.stages.split.minibatches={minibatches}",
        f"pipeline.stages.split.seed={seed}",
    )
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=num_envs * turns,
        total_dialog_turns=num_envs * turns * steps,
        postproc=lambda rows: pipeline(score(collate(rows, tokenizer.pad_token_id), actor)),
    )
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    try:
        for batch in collector:
            for _ in range(epochs):
                optimise(split_minibatches(batch), loss, optimizer, max_grad_norm=1.0)
            yield batch, pipeline.metrics
    finally:
        collector.shutdown()


def main(steps: int = 60, seed: int = 0, **sizes: int) -> list[float]:
    """Train and print; returns each step's mean reward. `sizes` are options of :func:`train`."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    rewards = []
    for step, (_, numbers) in enumerate(train(model, tokenizer, steps=steps, seed=seed, **sizes)):
        rewards.append(numbers["collapse/reward_mean"])
        print(
            f"step {step}: reward {rewards[-1]:.3f}, "
            f"trained {numbers['rows/trained']:.0f} of {numbers['rows/in']:.0f} rows, "
            f"{numbers['groups/trained']:.0f} of {numbers['groups/in']:.0f} groups"
        )
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on a language model that learns to reverse digits")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small to share
    main(options.steps, options.seed)

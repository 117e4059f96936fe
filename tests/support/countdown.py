"""TorchRL's CountdownEnv and LLMCollector, with a language model that is made in memory."""

from __future__ import annotations

import string
from typing import Any

import torch
from tensordict import set_list_to_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import InitTracker
from torchrl.envs.llm import CountdownEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.pipeline import StampIds

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each printable character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
    )


def make_countdown(tokenizer, *, slots: int, repeats: int, mode: str, **stamp: Any) -> CountdownEnv:
    with set_list_to_stack(True):
        env = CountdownEnv(tokenizer=tokenizer, num_envs=slots, repeats=repeats, seed=0, input_mode=mode)
    env.append_transform(InitTracker())
    env.append_transform(StampIds(repeats=repeats, **stamp))
    return env


def collect_countdown(env: CountdownEnv, tokenizer, mode: str, **options) -> LLMCollector:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    policy = TransformersWrapper(
        LlamaForCausalLM(config).eval(),
        tokenizer=tokenizer,
        input_mode=mode,
        generate=True,
        pad_output=False,
        return_log_probs=False,
        generate_kwargs={"max_new_tokens": 3, "do_sample": True},
    )
    return LLMCollector(env, policy=policy, **options)
